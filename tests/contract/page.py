"""docs/compatibility.md: what each public method of the SDK does here, which SDKs were tried, what
is demanded.

Owns: the page.
Never: holds a result of its own: everything in it was probed just before, or comes from the
manifest.

    scripts/compatibility            writes the page
    scripts/compatibility --check    exits with 1 if it would be another one
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from clients.sdk.runs import VERSIONS, Outcome, drive, environment
from clients.sdk.serving import serving

from halteres.models import TINY, builtin_path

from .probing import Row, rows
from .requirements import CHAPTERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"

HEAD = """# Compatibility with the Tinker SDK

Written by `make compatibility`, which calls every public method of the installed SDK (tinker {sdk}) against the service
with its built-in model, and drives the service with one SDK of every generation that differs on the wire. Do not edit.
"""


def rendered(methods: list[Row], outcomes: list[Outcome], sdk: str) -> str:
    """The page."""
    parts = [HEAD.format(sdk=sdk), _versions(outcomes), _methods(methods), _requirements()]
    return "\n".join(parts)


def _versions(outcomes: list[Outcome]) -> str:
    lines = [
        "## SDK versions",
        "",
        "A step is a thing that a user does with that SDK; the values that come back are checked: "
        "losses against their",
        "formulas, samples against their seeds, restored state against the run it was saved from",
        "(`tests/clients/sdk/program`). `make probe-sdk` does the same with the newest release on "
        "the package index.",
        "",
        "| tinker | steps | ok | what is not |",
        "|---|---|---|---|",
    ]
    for outcome in outcomes:
        failed = "; ".join(step["name"] for step in outcome.steps if not step["ok"])
        num_ok = sum(step["ok"] for step in outcome.steps)
        lines.append(f"| {outcome.sdk} | {len(outcome.steps)} | {num_ok} | {failed} |")
    return "\n".join([*lines, ""])


def _methods(methods: list[Row]) -> str:
    lines = [
        "## Public methods",
        "",
        "`works`: called, and answered. `refused`: answered with the sentence beside it. `in the "
        "client`: the SDK asks",
        "no server for it.",
        "",
        "| method | outcome | sentence |",
        "|---|---|---|",
    ]
    lines += [f"| `{row.method}` | {row.outcome} | {row.says} |" for row in methods]
    return "\n".join([*lines, ""])


def _requirements() -> str:
    lines = [
        "## What the protocol demands",
        "",
        "The manifest is `tests/contract`; every entry has a test.",
    ]
    for chapter, entries in CHAPTERS.items():
        lines += ["", f"### {chapter}", "", "| id | what | source |", "|---|---|---|"]
        for entry in entries:
            says = f"{entry.says}. **Not here:** {entry.gap}" if entry.gap else entry.says
            lines.append(f"| `{entry.id}` | {says} | {entry.source} |")
    return "\n".join([*lines, ""])


def generated() -> str:
    """Probe everything and render the page: about two minutes where the environments exist."""
    folder = builtin_path(TINY)
    assert folder is not None
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch)) as service:
        os.environ.update(
            TINKER_BASE_URL=service.url, TINKER_API_KEY="tml-page", TINKER_PROJECT_ID="a-project"
        )
        outcomes = [
            drive(
                environment(one),
                service.url,
                model=TINY,
                folder=folder,
                report=Path(scratch) / f"{one}.json",
            )
            for one in VERSIONS
        ]
        return rendered(rows(TINY, str(folder)), outcomes, version("tinker"))


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(
        prog="scripts/compatibility", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the committed page instead of writing it"
    )
    check = parser.parse_args().check
    page = generated()
    if not check:
        PAGE.write_text(page)
        sys.stderr.write(f"Written: {PAGE.relative_to(PAGE.parents[1])}\n")
        return 0
    if PAGE.is_file() and PAGE.read_text() == page:
        return 0
    sys.stderr.write(
        "docs/compatibility.md is not what is found now. Run `make compatibility` and look at the "
        "changes.\n"
    )
    return 1


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the SDK's threads are not waited for
