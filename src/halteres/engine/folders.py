"""Folders that are written whole or not at all.

NAME                 the folder
.new-ID              being written, or waiting for its place
.old-ID/NAME         what stood there, from the first rename to the end of the second: if NAME is
                     missing, a writer was killed between the two, and `recover` puts this back
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from halteres.errors import ServerError
from halteres.files import linked

_NEW, _OLD = ".new-", ".old-"


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """A temporary sibling to write in; it takes the place of `folder` when the block ends well,
    else it vanishes.

    Raises:
        ServerError: the disk is full or the place cannot be written; whatever stood there before
            still stands.
    """
    temporary = waiting(folder, uuid.uuid4().hex)
    try:
        # as readable to others as any that this user makes; mkdtemp's are private
        temporary.mkdir(parents=True)
        try:
            yield temporary
            put(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def waiting(folder: Path, name: str) -> Path:
    """A sibling of `folder` to write in first; `put` gives it its place, or `recover` removes
    it.
    """
    return folder.with_name(f"{_NEW}{name}")


def put(temporary: Path, folder: Path) -> None:
    """Let a sibling that was written take the place of `folder`.

    Raises:
        ServerError: the place cannot be written; whatever stood there before still stands.
    """
    try:
        if not folder.exists():
            temporary.rename(folder)
            return
        old = folder.with_name(f"{_OLD}{uuid.uuid4().hex}")
        old.mkdir()
        folder.rename(old / folder.name)
        try:
            temporary.rename(folder)
        finally:
            if not folder.exists():
                with suppress(OSError):
                    (old / folder.name).rename(folder)
            if folder.exists():
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ServerError:
    return ServerError(
        f"The folder {folder} could not be written.",
        f"{error.strerror or error}.",
        "Free space or make the place writable, then save again.",
    )


def copy_linked(source: Path, target: Path, *, leave_out: str | None = None) -> None:
    """A second folder of the same files, linked where the disk can; they must never be written
    again.

    Raises:
        ServerError: as `written`; or `source` is gone.
    """
    with written(target) as place:
        for file in source.iterdir():
            if file.name != leave_out:
                linked(str(file), str(place / file.name))


def recover(parent: Path) -> None:
    """Put back what a killed writer moved away, and remove what it did not finish. Nobody may be
    writing below.
    """
    for old in parent.glob(f"{_OLD}*"):
        for folder in old.iterdir():
            if not (parent / folder.name).exists():
                folder.rename(parent / folder.name)
        shutil.rmtree(old, ignore_errors=True)
    for unfinished in parent.glob(f"{_NEW}*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def digest(folder: Path) -> str:
    """SHA-256 of the names and contents of its files. OSError where it cannot be read."""
    hashes = dict[str, bytes]()
    for file in folder.iterdir():
        with file.open("rb") as content:
            hashes[file.name] = hashlib.file_digest(content, "sha256").digest()
    return digest_of(hashes)


def digest_of(hashes: Mapping[str, bytes]) -> str:
    """`digest` of a folder with these files: by name, the SHA-256 of the content."""
    whole = hashlib.sha256()
    for name in sorted(hashes):
        whole.update(name.encode() + b"\0" + hashes[name])
    return whole.hexdigest()


def write_hashed(file: Path, pieces: Iterable[bytes | memoryview]) -> bytes:
    """Write a file piece by piece; returns the SHA-256 of its content, which is not read again."""
    sha256 = hashlib.sha256()
    with file.open("wb") as content:
        for piece in pieces:
            sha256.update(piece)
            content.write(piece)
    return sha256.digest()


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
