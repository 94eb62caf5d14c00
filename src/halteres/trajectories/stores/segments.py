"""Tokens in append-only files: written once, read back by their place, unlinked as a whole.

An SQLite blob instead costs three to ten times the processor time of an append, and its checkpoints
hold everybody up for 70 to 230 ms (16x512 and 16x4096 groups).

    00000007.seg   [extent][extent][extent]      full: only read
    00000008.seg   [extent][extent]▒▒▒           ▒ written, but vouched for by nobody: overwritten,
                                                 or cut at start

An extent is vouched for by the rows that keep it. Nothing in the file marks it, so there is no
header and no recovery by reading: what nobody vouches for is not there. Whether anybody still wants
an extent, the rows say, too.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from isal import isal_zlib

SEGMENT_BYTES = 64 * 1024**2


class Extent(NamedTuple):
    """Where a text is."""

    segment: int  # number of the file
    start: int  # byte in it
    length: int  # bytes
    checksum: int  # CRC-32 of them


class Segments:
    """The files of one folder. One thread writes, any may read. Everything raises OSError where the
    disk fails.

    Args:
        folder: made where it is missing.
        vouched: numbers of the files that hold something; any other is unlinked.
        end: the byte behind the last extent in the newest of them; what is behind it is cut off.
        segment_bytes: from there on the next file is begun.
    """

    def __init__(
        self, folder: Path, vouched: Collection[int], end: int, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.folder, self._segment_bytes = folder, segment_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self.sizes = dict[int, int]()  # bytes of each file, by number
        for path in [path for path in folder.iterdir() if re.fullmatch(r"\d{8,}\.seg", path.name)]:
            if int(path.stem) in vouched:
                self.sizes[int(path.stem)] = path.stat().st_size
            else:
                path.unlink()
        self._file: int | None = None
        self._unsynced, self._is_new = False, False
        # newest: number of the file that is appended to
        self.newest, self._end = max(vouched, default=1), end
        size = self.sizes.get(self.newest, -1)
        if size > end:
            os.truncate(self._path(self.newest), end)
            self.sizes[self.newest] = end
        if vouched and size < end:  # something was lost; the gap stays as it is
            self._begin_next()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def append(self, texts: Sequence[bytes]) -> list[Extent]:
        """Write texts behind one another, all into one file. They survive the death of the process.

        Raises:
            OSError: the disk is full, or fails; whatever was written will be overwritten.
        """
        if not texts:
            return []
        if self._end >= self._segment_bytes:
            self._begin_next()
        start, extents = self._end, list[Extent]()
        for text in texts:
            extents.append(Extent(self.newest, start, len(text), isal_zlib.crc32(text)))
            start += len(text)
        file, self._unsynced = self._open(), True
        try:
            for text, extent in zip(texts, extents, strict=True):
                left, at = memoryview(text), extent.start
                while left:  # a disk or a signal may make a call take less than it was given
                    taken = os.pwrite(file, left, at)
                    left, at = left[taken:], at + taken
        except OSError:
            self._cut()
            raise
        self._end = start
        self.sizes[self.newest] = max(start, self.sizes.get(self.newest, 0))
        return extents

    def take_back(self, extents: Sequence[Extent]) -> None:
        """Nobody will vouch for what the last `append` gave: the next overwrites it."""
        if extents:
            self._end = extents[0].start
            self._cut()

    def sync(self) -> None:
        """What was appended survives the loss of power, too."""
        if not self._unsynced:
            return
        if sys.platform == "darwin":  # whose fsync leaves data in the disk's own memory
            fcntl.fcntl(self._open(), fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(self._open())
        if self._is_new:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._unsynced = self._is_new = False

    def read(self, extents: Sequence[Extent]) -> list[bytes | None]:
        """The texts; None for one that is lost: its file is gone or too short, or holds something
        else.
        """
        files: dict[int, int | None] = {}
        try:
            for number in {extent.segment for extent in extents}:
                try:
                    files[number] = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    files[number] = None
            return [_read(files[extent.segment], extent) for extent in extents]
        finally:
            for file in files.values():
                if file is not None:
                    os.close(file)

    def unlink(self, number: int) -> None:
        """Remove a file that is not appended to."""
        self._path(number).unlink(missing_ok=True)
        del self.sizes[number]

    def close(self) -> None:
        """Let go of the file being written."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.seg"

    def _cut(self) -> None:
        """On a full disk others need the room behind the end of the open file."""
        if self._file is not None:
            with suppress(OSError):
                os.truncate(self._file, self._end)

    def _begin_next(self) -> None:
        self.close()
        self.newest, self._end, self._unsynced = self.newest + 1, 0, False

    def _open(self) -> int:
        if self._file is None:
            path = self._path(self.newest)
            self._is_new = not path.exists()
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._file


def _read(file: int | None, extent: Extent) -> bytes | None:
    if file is None:
        return None
    text = b""
    while len(text) < extent.length:
        more = os.pread(file, extent.length - len(text), extent.start + len(text))
        if not more:
            return None
        text += more
    return text if isal_zlib.crc32(text) == extent.checksum else None
