"""Following a JSON-lines file that others append to.

Owns: the place up to which a file was read.
Never: blocks, or gives a line twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Tail:
    """Whole lines of a file, each once."""

    file: Path
    offset: int = 0

    def fresh(self) -> list[dict[str, Any]]:
        """Rows appended since the last look; an unfinished or broken line is left out."""
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [row for line in whole.splitlines() if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
