"""Tokens in append-only files: written once, read back by their place, unlinked as a whole.

An SQLite blob instead costs three to ten times the processor time of an append, and its checkpoints hold everybody up
for 70 to 230 ms (16x512 and 16x4096 groups).

    00000007.seg   [extent][extent][extent]      full: only read
    00000008.seg   [extent][extent]▒▒▒           ▒ written, but vouched for by nobody: overwritten, or cut at start

An extent is vouched for by the rows that keep it. Nothing in the file marks it, so there is no header and no recovery
by reading: what nobody vouches for is not there. Whether anybody still wants an extent, the rows say, too.
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
    """The files of one folder. One thread writes, any may read.

    Args:
        folder: made where it is missing.
        vouched: numbers of the files that hold something; any other is unlinked.
        end: the byte behind the last extent in the newest of them; what is behind it is cut off.
        segment_bytes: from there on the next file is begun.

    Raises:
        OSError: the folder cannot be read or written.
    """

    def __init__(self, folder: Path, vouched: Collection[int], end: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder, self._segment_bytes = folder, segment_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._sizes = _sizes_of(folder, vouched)  # bytes of each file
        self._file: int | None = None
        self._unsynced, self._is_new = False, False
        self._number, self._end = max(vouched, default=1), end
        if vouched and not self._cut():
            self._begin_next()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes.values())

    @property
    def numbers(self) -> set[int]:
        """Numbers of the files that are there."""
        return set(self._sizes)

    @property
    def newest(self) -> int:
        """Number of the file that is appended to."""
        return self._number

    @property
    def full(self) -> list[int]:
        """Numbers of the files that are not appended to, the oldest first."""
        return sorted(self._sizes.keys() - {self._number})

    def append(self, texts: Sequence[bytes]) -> list[Extent]:
        """Write texts behind one another, all into one file. They survive the death of the process.

        Raises:
            OSError: the disk is full, or fails; whatever was written will be overwritten.
        """
        if not texts:
            return []
        if self._end >= self._segment_bytes:
            self._begin_next()
        file, start = self._open(), self._end
        extents: list[Extent] = []
        for text in texts:
            extents.append(Extent(self._number, start, len(text), isal_zlib.crc32(text)))
            start += len(text)
        self._unsynced = True
        try:
            for text, extent in zip(texts, extents, strict=True):
                _write(file, text, extent.start)
        except OSError:
            self._cut_open_file()
            raise
        self._end = start
        self._sizes[self._number] = max(start, self._sizes.get(self._number, 0))
        return extents

    def take_back(self, extents: Sequence[Extent]) -> None:
        """Nobody will vouch for what the last `append` gave: the next overwrites it."""
        if extents:
            self._end = extents[0].start
            self._cut_open_file()

    def sync(self) -> None:
        """What was appended survives the loss of power, too.

        Raises:
            OSError: the disk fails.
        """
        if not self._unsynced:
            return
        _sync_data(self._open())
        if self._is_new:
            _sync_folder(self.folder)
        self._unsynced = self._is_new = False

    def read(self, extents: Sequence[Extent]) -> list[bytes | None]:
        """The texts; None for one that is lost: its file is gone or too short, or holds something else.

        Raises:
            OSError: the disk fails, or there are too many open files.
        """
        files: dict[int, int | None] = {}
        try:
            return [_read(self._reader(files, extent.segment), extent) for extent in extents]
        finally:
            for file in filter(None, files.values()):
                os.close(file)

    def unlink(self, number: int) -> None:
        """Remove a full file.

        Raises:
            OSError: it cannot be removed.
        """
        _path(self.folder, number).unlink(missing_ok=True)
        del self._sizes[number]

    def close(self) -> None:
        """Let go of the file being written."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _cut(self) -> bool:
        """Cut off what is behind the end. False: it is not reached, something was lost; the gap stays as it is."""
        size = self._sizes.get(self._number, -1)
        if size > self._end:
            os.truncate(_path(self.folder, self._number), self._end)
            self._sizes[self._number] = self._end
        return size >= self._end

    def _cut_open_file(self) -> None:
        """On a full disk others need the room behind its end."""
        if self._file is not None:
            with suppress(OSError):
                os.truncate(self._file, self._end)

    def _begin_next(self) -> None:
        self.close()
        self._number, self._end, self._unsynced = self._number + 1, 0, False

    def _open(self) -> int:
        if self._file is None:
            path = _path(self.folder, self._number)
            self._is_new = not path.exists()
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._file

    def _reader(self, files: dict[int, int | None], number: int) -> int | None:
        if number not in files:
            try:
                files[number] = os.open(_path(self.folder, number), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                files[number] = None
        return files[number]


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.seg"


def _sizes_of(folder: Path, vouched: Collection[int]) -> dict[int, int]:
    """Unlink what nobody vouches for; the sizes of what remains."""
    sizes: dict[int, int] = {}
    for path in [path for path in folder.iterdir() if re.fullmatch(r"\d{8,}\.seg", path.name)]:
        if int(path.stem) in vouched:
            sizes[int(path.stem)] = path.stat().st_size
        else:
            path.unlink()
    return sizes


def _write(file: int, text: bytes, at: int) -> None:
    """A disk or a signal may make a call take less than it was given."""
    left = memoryview(text)
    while left:
        taken = os.pwrite(file, left, at)
        left, at = left[taken:], at + taken


def _read(file: int | None, extent: Extent) -> bytes | None:
    if file is None:
        return None
    text = os.pread(file, extent.length, extent.start)
    while 0 < len(text) < extent.length:
        more = os.pread(file, extent.length - len(text), extent.start + len(text))
        if not more:
            return None
        text += more
    return text if isal_zlib.crc32(text) == extent.checksum and len(text) == extent.length else None


def _sync_data(file: int) -> None:
    if sys.platform == "darwin":  # whose fsync leaves data in the disk's own memory
        fcntl.fcntl(file, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(file)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
