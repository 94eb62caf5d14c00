"""Which packages of others were run against ours, with which result: what `make test-clients` and
`make test-harnesses` write into docs/works-with.json, and docs/works-with.md made of it.

A row is one test. It names the packages of the environments below .venvs whose programs the test
started, as they are installed there. A test that was not run, or was skipped, keeps its row.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "docs" / "works-with.json", ROOT / "docs" / "works-with.md"

Row = dict[str, Any]
"""test (its pytest id), packages (name -> version), ran (a date), result (green, red), why (of a red
one: its first failing line).
"""

IN_ENVIRONMENT = re.compile(r"[^\s:'\"]*/\.venvs/(?:sources/)?[^/\s:'\"]+")
REQUIREMENT = re.compile(r"[A-Za-z][\w.-]*")
LONGEST_WHY = 200

VERSIONS_OF = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""

HEAD = """# Works with

Packages of others that were run against our service, unmodified and each in an environment of its own, by
`make test-harnesses` and `make test-clients`, which write this page. A row is one test: the versions that were installed, what was
run, and how it ended on that day. What is not here was not run. SDKs of Tinker have [a page of their own](compatibility.md).

| packages | what was run | result | on |
|---|---|---|---|
"""


@cache
def packages_in(environment: Path) -> dict[str, str]:
    """Name -> version of what an environment was made for (scripts/client, scripts/npm-client)."""
    if environment.parent.name == "sources":
        name, _, version = environment.name.rpartition("-")
        return {name: version}
    if (environment / "package.json").exists():
        names = json.loads((environment / "package.json").read_text("utf-8"))["dependencies"]
        modules = [environment / "node_modules" / name / "package.json" for name in names]
        return {
            name: json.loads(file.read_text("utf-8"))["version"]
            for name, file in zip(names, modules, strict=True)
        }
    required = environment / "requirements"
    if not required.exists():
        return {}
    words = required.read_text("utf-8").split()
    names = [found[0] for word in words if (found := REQUIREMENT.match(word))]
    command = [environment / "bin" / "python", "-c", VERSIONS_OF, *names]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(told.stdout)


class Recorder:
    """The plugin of `pytest --works-with`: notes what each test starts, and writes rows and page."""

    def __init__(self, rows: Path, page: Path, *, is_worker: bool) -> None:
        self._files, self._is_worker = (rows, page), is_worker
        self._started = set[str]()
        self._rows: dict[str, Row] = {}
        sys.addaudithook(self._note)

    def _note(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            executable, argv, _, variables = given
            paths = [(variables or {}).get(name, "") for name in ("PATH", "PYTHONPATH")]
            self._started.update(IN_ENVIRONMENT.findall(f"{executable} {argv} {paths}"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Nothing is started yet."""
        self._started.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Put the packages into the report, which a worker sends on."""
        packages: dict[str, str] = {}
        used = [Path(one) for one in sorted(self._started)]
        # where a package's sources are run, its environment holds what they need
        sources = [one for one in used if one.parent.name == "sources"]
        for environment in sources or used:
            packages |= packages_in(environment)
        item.user_properties.append(("packages", packages))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how it went: setup, test and teardown are reported one after the other."""
        packages: Any = dict(report.user_properties).get("packages")
        is_red = self._rows.get(report.nodeid, {}).get("result") == "red"
        if not packages or report.skipped or is_red:
            return
        row: Row = {"test": report.nodeid, "packages": packages}
        row["ran"] = f"{datetime.now(UTC):%Y-%m-%d}"
        if report.failed:
            self._rows[report.nodeid] = row | {"result": "red", "why": first_line(report)}
        elif report.when == "call":
            self._rows[report.nodeid] = row | {"result": "green", "why": ""}

    def pytest_sessionfinish(self) -> None:
        """Write both files; a worker leaves that to its controller."""
        if self._is_worker or not self._rows:
            return
        rows, page = self._files
        known: list[Row] = []
        if rows.exists():
            known = json.loads(rows.read_text("utf-8"))
        found = merged(known, self._rows)
        rows.write_text(f"{json.dumps(found, indent=1)}\n", "utf-8")
        page.write_text(page_of(found), "utf-8")


def first_line(report: pytest.TestReport) -> str:
    """What failed first, without this machine's paths."""
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line[:2] == "E "]
    line = next(iter(lines), "it failed").replace(f"{ROOT}/", "")
    return re.sub(r"/(?:tmp|home|root|work)/\S*", "…", line)[:LONGEST_WHY]


def merged(known: Iterable[Row], new: Mapping[str, Row]) -> list[Row]:
    """The rows in order; those of tests that are gone are left out."""
    rows = {row["test"]: row for row in known} | new
    return [rows[name] for name in sorted(rows) if is_there(name)]


def is_there(test: str) -> bool:
    """Whether a test of this name still exists."""
    file, _, name = test.partition("::")
    function = name.partition("[")[0]
    return (ROOT / file).exists() and f"def {function}(" in (ROOT / file).read_text("utf-8")


def page_of(rows: Iterable[Row]) -> str:
    """The page, by packages."""
    lines = [(packages_of(row), row["test"], _line(row)) for row in rows]
    return HEAD + "".join(line for *_, line in sorted(lines))


def packages_of(row: Row) -> str:
    """Names and versions, as the page has them."""
    return ", ".join(f"{name} {version}" for name, version in row["packages"].items())


def _line(row: Row) -> str:
    file, _, name = row["test"].partition("::")
    function, _, case = name.removeprefix("test_").partition("[")
    what = function.replace("_", " ")
    if case:
        what += f" ({case.removesuffix(']')})"
    result = row["result"]
    if row["why"]:
        result += f": `{row['why'].replace('`', '').replace('|', '/')}`"
    cell = what.replace("|", "/")
    return f"| {packages_of(row)} | [{cell}](../{file}) | {result} | {row['ran']} |\n"
