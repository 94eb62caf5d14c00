"""Small dealings with files that every room has.

Owns: replacing a file whole, linking one, reading the end of one.
Never: knows what a file means.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TAIL_BYTES = 64 * 1024
"""How much of a file's end is looked at: a log line is short, a log may be long."""


def replace_file(file: Path, content: bytes) -> None:
    """Write beside the file, then rename over it: a reader sees the old or the new, never half.

    Raises:
        OSError: the folder is not there, not ours to write, or full; the file is then as it was.
    """
    with replacing(file) as beside:
        beside.write_bytes(content)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path beside `file`, of its suffix, for somebody else to write; renamed over `file` if the block succeeds."""
    beside = file.with_name(f".{file.stem}.{os.getpid()}.{threading.get_ident()}{file.suffix}")
    try:
        yield beside
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def linked(source: str, target: str) -> str:
    """For `shutil.copytree`: a hard link, or a copy on another file system or one without links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def tail(file: Path, lines: int, since: int = 0) -> list[str]:
    """The last lines of a text file, of what stands after `since` bytes; none where there is no file."""
    try:
        with file.open("rb") as stream:
            end = stream.seek(0, 2)
            stream.seek(max(since if since <= end else 0, end - TAIL_BYTES))  # it may have been cut meanwhile
            return stream.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
