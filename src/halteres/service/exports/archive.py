"""Archives: a folder as one tar, written while it is sent.

Owns: the tar's bytes and its size, which is known before the first of them.
Never: keeps an archive on disk; names anything outside its folder.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from halteres.errors import NotFound

COMPLETE = "checkpoint_complete"
"""An empty file at the end of an archive, by which SDKs up to 0.35 know that it is whole."""

CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    stream: BinaryIO
    size: int
    modified_at: float

    def header(self) -> bytes:
        info = tarfile.TarInfo(self.name)
        info.size, info.mtime, info.mode = self.size, int(self.modified_at), 0o644
        return info.tobuf(tarfile.USTAR_FORMAT)


class Archive:
    """A tar of open files; it is sent even if their names are removed meanwhile. Close it, or read it to its end.

    Raises:
        NotFound: one of them is gone.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        with ExitStack() as opened:
            try:
                self._members = [_member(name, opened.enter_context(file.open("rb"))) for name, file in files.items()]
            except OSError as error:
                raise NotFound("The checkpoint was just deleted.", f"{error.strerror}.") from error
            self._opened = opened.pop_all()

    @property
    def size(self) -> int:
        """Bytes."""
        blocks = sum(1 + -(-member.size // tarfile.BLOCKSIZE) for member in self._members)
        return (blocks + 3) * tarfile.BLOCKSIZE  # the mark's header, and two empty blocks

    def chunks(self) -> Iterator[bytes]:
        """The bytes, in order."""
        with self._opened:
            for member in self._members:
                yield member.header()
                while chunk := member.stream.read(CHUNK_BYTES):
                    yield chunk
                yield bytes(-member.size % tarfile.BLOCKSIZE)
            yield tarfile.TarInfo(COMPLETE).tobuf(tarfile.USTAR_FORMAT) + bytes(2 * tarfile.BLOCKSIZE)

    def close(self) -> None:
        """Close what was not sent."""
        self._opened.close()


def _member(name: str, stream: BinaryIO) -> _Member:
    size = stream.seek(0, 2)
    stream.seek(0)
    return _Member(name, stream, size, Path(stream.name).stat().st_mtime)
