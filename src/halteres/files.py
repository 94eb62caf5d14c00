"""Replacing a file whole, linking one, reading one that may be damaged, no regular file, or none at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

TAIL_BYTES = 64 * 1024  # how much of a file's end is looked at: a log line is short, a log may be long
MOST_BYTES = 256 * 1024 * 1024  # a larger file is none that is read whole
NOT_JSON: Final = (msgspec.MsgspecError, ValueError, RecursionError)  # what decoding a damaged text raises


def open_regular(file: Path) -> BinaryIO:
    """Open a file to read. OSError where it is none: to open a FIFO would wait for whoever writes into it."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(file))


def read_regular(file: Path, most: int = MOST_BYTES) -> bytes:
    """What a file holds. OSError where it is no regular file, or holds more than `most` bytes."""
    with open_regular(file) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it holds more than {most} bytes", str(file))
    return content


def lines_of(stream: BinaryIO, longest: int) -> Iterator[bytes]:
    """The lines from here on, without those that are longer than so many bytes: no more than one is in memory."""
    while line := stream.readline(longest):
        if line.endswith(b"\n") or len(line) < longest:
            yield line
        else:
            while (line := stream.readline(longest)) and not line.endswith(b"\n"):
                pass


def replace_file(file: Path, content: bytes, *, private: bool = False) -> None:
    """Write beside the file, then rename over it: a reader sees the old or the new, never half. A `private` one its
    owner alone may read, from its first byte on.

    Raises:
        OSError: the folder is not there, not ours to write, or full; the file is then as it was.
    """
    with replacing(file) as beside:
        if private:
            os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
            beside.chmod(0o600)
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
        with open_regular(file) as stream:
            end = stream.seek(0, 2)
            stream.seek(max(since if since <= end else 0, end - TAIL_BYTES))  # it may have been cut meanwhile
            return stream.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
