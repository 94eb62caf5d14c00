"""An environment file that is broken: the sentence, the place, the end of the traceback.

Owns: reading them off what the file's process wrote to stderr.
Never: runs a file.
"""

from __future__ import annotations

import re
from pathlib import Path

from halteres.config.discovery import EnvironmentBroken

TRACEBACK_LINES = 8

LINK = "https://errors.pydantic.dev"
"""pydantic ends its errors with a line that leads there, and says nothing."""


def broken(file: Path, interpreter: str, why: str, err: str = "") -> EnvironmentBroken:
    """The error for a file that could not be run, or said nothing usable; `err` is what it wrote to stderr."""
    line = _line_of(file, err)
    where = f"{file}:{line}" if line else str(file)
    return EnvironmentBroken(
        f"The environment file {where} is broken.",
        why,
        f"Run `{interpreter} {file} describe` to see the whole message.",
        file=str(file),
        line=line,
        traceback=_tail(err) if "Traceback" in err else None,
    )


def _line_of(file: Path, err: str) -> int | None:
    """The line of the file that a traceback, or a sentence of `describe`, names last."""
    name = re.escape(str(file))
    found = re.findall(rf'File "{name}", line (\d+)|{name}:(\d+)', err)
    return int(found[-1][0] or found[-1][1]) if found else None


def _tail(err: str) -> list[str]:
    return [line.rstrip() for line in err.splitlines() if line.strip() and LINK not in line][-TRACEBACK_LINES:]


def last_line(text: str) -> str:
    """What it said in the end."""
    lines = _tail(text)
    return lines[-1].strip().removeprefix("error: ")[:600] if lines else "it said nothing."
