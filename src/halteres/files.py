"""Replacing a file whole, linking one, reading one that may be damaged, no regular file, or none at
all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

# how much of a file's end is looked at: a log line is short, a log may be long
TAIL_BYTES = 64 * 1024
MOST_BYTES = 256 * 1024 * 1024  # a larger file is none that is read whole
SMALL_BYTES = 32 * 1024 * 1024
"""Of a config, a template, an index: the index of a model of 100,000 tensors has 10 MB."""

MOST_DEPTH = 64
"""Of objects and lists in each other. A config has four; Python's own code fails at a thousand."""

# what decoding a damaged text raises
NOT_JSON: Final = (msgspec.MsgspecError, ValueError, RecursionError)

PIECE_BYTES = 1024 * 1024  # of a file that is hashed, in memory at once

T = TypeVar("T")


class UnreadableFile(ValueError):
    """A small file that cannot be used; the text names it and says why."""


def open_regular(file: Path, *, linked: bool = True) -> BinaryIO:
    """Open a file to read. OSError where it is none: to open a FIFO would wait for whoever writes
    into it.

    Args:
        linked: whether the file may be a symbolic link, as those of a Hugging Face cache are.
    """
    if not linked and file.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(file))
    no_link = 0 if linked else os.O_NOFOLLOW
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | no_link)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(file))


def read_regular(file: Path, most: int = MOST_BYTES, *, linked: bool = True) -> bytes:
    """What a file holds. OSError where it is no regular file, or holds more than `most` bytes."""
    with open_regular(file, linked=linked) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it holds more than {most} bytes", str(file))
    return content


def read_json(file: Path, of: type[T], *, linked: bool = True) -> T:
    """The JSON of a small file that others may have written, as a value of this type; a byte order
    mark is passed over.

    Raises:
        UnreadableFile: it is missing, no regular file, too large, no JSON, nested too deeply, or of
            another form.
    """
    content = _small(file, linked=linked)
    try:
        value: Any = json.loads(content)
    except RecursionError:
        raise UnreadableFile(f"{file} is nested too deeply") from None
    except ValueError as error:
        raise UnreadableFile(f"{file} is no JSON: {error}") from error
    _check_depth(value, file)
    try:
        return msgspec.convert(value, type=of)
    except msgspec.ValidationError as error:
        raise UnreadableFile(f"{file} has another form: {error}") from error


def text_of_file(file: Path) -> str:
    """The text of a small file that others may have written, its lines ended as Python ends them.

    Raises:
        UnreadableFile: as `read_json`, or it is not UTF-8.
    """
    try:
        text = _small(file, linked=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{file} is not UTF-8: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _small(file: Path, *, linked: bool) -> bytes:
    try:
        return read_regular(file, SMALL_BYTES, linked=linked)
    except FileNotFoundError:
        raise UnreadableFile(f"{file} is missing") from None
    except OSError as error:
        raise UnreadableFile(f"{file} cannot be read: {error.strerror}") from error


def _check_depth(value: object, file: Path) -> None:
    """Level by level, so that the check itself does not recurse."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise UnreadableFile(f"{file} is nested too deeply")
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = inner


def sha256_of(file: Path) -> str | None:
    """Of a file's content, in hex; None where it cannot be read."""
    try:
        with open_regular(file) as stream:
            digest = hashlib.sha256()
            for piece in iter(partial(stream.read, PIECE_BYTES), b""):
                digest.update(piece)
            return digest.hexdigest()
    except OSError:
        return None


def lines_of(stream: BinaryIO, longest: int) -> Iterator[bytes]:
    """The lines from here on, without those that are longer than so many bytes: no more than one is
    in memory.
    """
    while line := stream.readline(longest):
        if line.endswith(b"\n") or len(line) < longest:
            yield line
        else:
            while (line := stream.readline(longest)) and not line.endswith(b"\n"):
                pass


def replace_file(file: Path, content: bytes, *, private: bool = False) -> None:
    """Write beside the file, then rename over it: a reader sees the old or the new, never half. A
    `private` one its owner alone may read, from its first byte on.

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
    """A path beside `file`, of its suffix, for somebody else to write; renamed over `file` if the
    block succeeds.
    """
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
    """The last lines of a text file, of what stands after `since` bytes; none where there is no
    file.
    """
    try:
        with open_regular(file) as stream:
            end = stream.seek(0, 2)
            # it may have been cut meanwhile
            stream.seek(max(since if since <= end else 0, end - TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
