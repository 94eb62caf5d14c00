"""The newest SDK on the package index, tried before anybody upgrades.

Owns: finding the newest release, the table of green and red, the list of methods that nobody here
has met. Never: changes what is installed in our own environment.

    scripts/probe-sdk [VERSION]      exit code 0 where every step is ok, 1 otherwise
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from halteres.models import TINY, builtin_path

from .runs import ROOT, Outcome, drive, environment
from .serving import serving

PAGE = ROOT / "docs" / "compatibility.md"

LISTING = """
import inspect, tinker
for client in [getattr(tinker, name) for name in dir(tinker) if name.endswith("Client") and name[0].isupper()]:
    for name, _ in inspect.getmembers(client):
        if not name.startswith("_"):
            print(f"{client.__name__}.{name}")
"""
"""Prints the public methods of the SDK in whichever interpreter runs it."""


def newest() -> str:
    """The newest release that pip would install.

    Raises:
        RuntimeError: the index cannot be asked, or its answer cannot be read.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "index",
        "versions",
        "tinker",
    ]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"^tinker \(([^)]+)\)", asked.stdout, re.MULTILINE)
    if asked.returncode or not found:
        raise RuntimeError(
            f"pip could not tell the newest tinker:\n{(asked.stderr or asked.stdout)[-1000:]}"
        )
    return found.group(1)


def unknown_methods(python: str) -> tuple[list[str], list[str]]:
    """Public methods of that SDK which docs/compatibility.md does not list, and those it lists that
    the SDK lacks.
    """
    asked = subprocess.run(
        [python, "-W", "ignore", "-c", LISTING], capture_output=True, text=True, check=True
    )
    theirs = set(asked.stdout.split())
    ours = set(re.findall(r"^\| `(\w+\.\w+)` \|", PAGE.read_text(), re.MULTILINE))
    return sorted(theirs - ours), sorted(ours - theirs)


def table(outcome: Outcome, *, coloured: bool) -> str:
    """One line per step, green or red."""
    lines: list[str] = []
    for step in outcome.steps:
        colour, word = ("32", "green") if step["ok"] else ("31", "RED")
        mark = f"\033[{colour}m{word:5}\033[0m" if coloured else f"{word:5}"
        error = "" if step["ok"] else f"\n      {step['error']}"
        lines.append(f"{mark} {step['seconds']:6.2f} s  {step['name']}{error}")
    return "\n".join(lines)


def main() -> int:
    """Try one SDK; the newest where none is named."""
    parser = argparse.ArgumentParser(
        prog="scripts/probe-sdk", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "version", nargs="?", help="of tinker; default: the newest on the package index"
    )
    sdk = parser.parse_args().version or newest()
    python, folder = environment(sdk), builtin_path(TINY)
    assert folder is not None
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch)) as service:
        outcome = drive(
            python, service.url, model=TINY, folder=folder, report=Path(scratch) / "report.json"
        )
    new, gone = unknown_methods(python)
    failed = outcome.failed
    told = [f"tinker {outcome.sdk}", table(outcome, coloured=sys.stdout.isatty())]
    told += [f"new     {method}: docs/compatibility.md does not know it" for method in new]
    told += [f"gone    {method}" for method in gone]
    told.append(
        f"tinker {outcome.sdk} is {'RED' if failed else 'green'}: {len(failed)} of "
        f"{len(outcome.steps)} fail."
    )
    sys.stdout.write("\n".join(told) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
