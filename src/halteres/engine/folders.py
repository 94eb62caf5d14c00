"""Folders that are written whole or not at all.

Owns: writing a checkpoint folder beside its place and renaming it.
Never: knows what is inside.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halteres.errors import ServerError


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """A temporary sibling to write in; it takes the place of `folder` when the block ends well, else it vanishes.

    Raises:
        ServerError: the disk is full or the place cannot be written; whatever stood there before still stands.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            yield temporary
            _replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ServerError(
            f"The folder {folder} could not be written.",
            f"{error.strerror or error}.",
            "Free space or make the place writable, then save again.",
        ) from error


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _replace(temporary: Path, folder: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    folder.rename(aside / "old")
    temporary.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)
