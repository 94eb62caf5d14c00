"""docs/works-with.md: what its rows say was run, and is made by nobody's hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from works_with import PAGE, ROWS, is_there, page_of

TESTS = Path(__file__).parents[1]

CONFTEST = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
import works_with

HERE = Path(__file__).parent
works_with.is_there = lambda test: (HERE / test.partition("::")[0]).exists()

def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    page = HERE / "page.md"
    config.pluginmanager.register(
        works_with.Recorder(HERE / "rows.json", page, is_worker=is_worker)
    )
"""

PROGRAMS = """
import subprocess, pytest
from pathlib import Path

def start(name):
    subprocess.run([Path(__file__).parent / ".venvs" / name / "bin" / "program"], check=True)

def test_it_answers():
    start("one-1")

@pytest.mark.parametrize("kind", ["a|b"])
def test_it_streams(kind):
    start("npm-two")
    answered = 41
    assert answered == 42

def test_nothing_is_started():
    pass

def test_it_is_skipped():
    start("one-1")
    pytest.skip("no network")
"""


def environment(folder: Path, *modules: tuple[str, str]) -> None:
    """One of .venvs with a program; of Python unless it has modules of npm."""
    (folder / "bin").mkdir(parents=True)
    for name, command in (("program", ":"), ("python", f'exec {sys.executable} "$@"')):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{command}\n", "utf-8")
        (folder / "bin" / name).chmod(0o755)
    if not modules:
        (folder / "requirements").write_text("pytest>=8 msgspec", "utf-8")
        return
    names = {name: "^1" for name, _ in modules}
    (folder / "package.json").write_text(json.dumps({"dependencies": names}), "utf-8")
    for name, version in modules:
        (folder / "node_modules" / name).mkdir(parents=True)
        file = folder / "node_modules" / name / "package.json"
        file.write_text(json.dumps({"version": version}), "utf-8")


def test_a_run_records_what_was_started_and_keeps_what_was_not_run(tmp_path: Path) -> None:
    """Also where workers run the tests; a skipped test is no green one, and loses no row."""
    environment(tmp_path / ".venvs" / "one-1")
    environment(tmp_path / ".venvs" / "npm-two", ("@of/two", "2.0.1"))
    (tmp_path / "conftest.py").write_text(CONFTEST, "utf-8")
    (tmp_path / "test_programs.py").write_text(PROGRAMS, "utf-8")
    before = {"packages": {"old": "1"}, "ran": "2026-01-02", "result": "green", "why": ""}
    rows = [
        {"test": "test_programs.py::test_it_is_skipped", **before},
        {"test": "test_gone.py::test_gone", **before},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "test_programs.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    green, skipped, red = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    assert skipped == rows[0]
    assert (green["test"], green["result"]) == ("test_programs.py::test_it_answers", "green")
    assert set(green["packages"]) == {"pytest", "msgspec"}
    assert (red["result"], red["packages"]) == ("red", {"@of/two": "2.0.1"})
    assert red["why"] == "assert 41 == 42"
    lines = (tmp_path / "page.md").read_text("utf-8").splitlines()
    [line] = [line for line in lines if "it streams" in line]
    assert line.startswith("| @of/two 2.0.1 | [it streams (a/b)](../test_programs.py) | red: `")


def test_the_page_says_what_was_recorded_of_tests_that_there_are() -> None:
    rows = json.loads(ROWS.read_text("utf-8"))
    assert PAGE.read_text("utf-8") == page_of(rows)
    assert [row["test"] for row in rows if not is_there(row["test"])] == []
