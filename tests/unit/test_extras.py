"""What users are told to install can be installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = [
    ROOT / "src",
    ROOT / "docs",
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks",
]
SUFFIXES = (".py", ".md", ".html", ".yaml")
# a name that is filled in at run time is not one
LINE = re.compile(r"pip install +(?!-)(\S*halteres\[[^{]\S*)")


def test_every_pip_line_names_extras_that_are_declared_and_is_safe_in_a_shell() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].keys()
    files = [
        file
        for place in PLACES
        for file in ([place] if place.is_file() else sorted(place.rglob("*")))
    ]
    told = [
        (file.relative_to(ROOT), line)
        for file in files
        if file.suffix in SUFFIXES
        for line in LINE.findall(file.read_text())
    ]
    assert len(told) >= 5
    for file, line in told:
        quoted = re.match(r"'halteres\[([\w,-]+)\]'", line)
        assert quoted, f"{file}: a shell may expand the brackets of {line}"
        assert set(quoted[1].split(",")) <= declared, f"{file}: {line}"
