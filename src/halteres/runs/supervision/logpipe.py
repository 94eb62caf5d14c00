"""Logs without secrets: what a child prints goes through a pipe, and known values become `***` on their way.

Owns: what a child gets for its standard output, the thread that empties it, what of a stream must wait for its next
bytes.
Never: decides what is secret; makes a child wait longer than the log's disk does; ends one because a log is full; lets
a log grow without end.

A child gets the log file itself where nothing is known to be secret. Otherwise it gets a pipe, emptied by a thread of
its own, so that no child waits for whatever else its supervisor does. The pipe ends with its last writer, so a child's
last words are in the log once `emptied` returns. If the supervisor dies, its children, which end then too, find their
output closed: Python's logging bears that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from halteres.config import environ
from halteres.redaction import SHORTEST, STRUCK

LOG_BYTES, KEPT_BYTES = 64 * 1024 * 1024, 16 * 1024 * 1024
"""What a log may grow to, and what is then kept of it: the newest."""

CHUNK_BYTES = 64 * 1024
PIPE_BYTES = 1024 * 1024
"""What a child may print ahead while we are busy (Linux's largest for everybody; its default is 64 KiB)."""

EMPTIED_WITHIN_S = 1.0
"""How long a child that has ended is waited for by its log: another process may hold its output open for ever."""


class Strainer:
    """Strikes values out of a stream of bytes, however the stream is cut.

    What it holds back is the beginning of a value at the very end of what came so far: less than the longest value,
    and nothing of what cannot become one.

    >>> strainer = Strainer(["sk-12345678"])
    >>> strainer.through(b"key=sk-12"), strainer.through(b"345678!"), strainer.rest()
    (b'key=', b'***!', b'')
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        values = {os.fsencode(secret) for secret in secrets if len(secret) >= SHORTEST}
        self._secrets = sorted(values, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._secrets)))
        self._longest = max(map(len, self._secrets), default=0)
        self._held = b""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to strike out."""
        return not self._secrets

    def through(self, data: bytes) -> bytes:
        """What can be told by now."""
        if self.idle:
            return data
        stream = self._held + data
        told, at, cut = [], 0, len(stream) - self._opening(stream)
        for match in self._pattern.finditer(stream):
            if match.start() >= cut:
                break  # it may be the beginning of a longer one
            told += [stream[at : match.start()], STRUCK.encode()]
            at = match.end()
        cut = max(cut, at)
        self._held = stream[cut:]
        return b"".join((*told, stream[at:cut]))

    def rest(self) -> bytes:
        """What was held back: nothing more comes."""
        held, self._held = self._held, b""
        return held if self.idle else self._pattern.sub(STRUCK.encode(), held)

    def _opening(self, stream: bytes) -> int:
        """Length of the longest end of the stream that a value begins with."""
        end = stream[max(0, len(stream) - self._longest + 1) :]
        return max((_overlap(end, secret) for secret in self._secrets), default=0)


def _overlap(end: bytes, secret: bytes) -> int:
    at = end.find(secret[:1], max(0, len(end) - len(secret) + 1))
    while at >= 0:
        if secret.startswith(end[at:]):
            return len(end) - at
        at = end.find(secret[:1], at + 1)
    return 0


@dataclass(frozen=True, slots=True)
class Output:
    """Where a child's output goes."""

    descriptor: int  # what the child writes to; ours to close once it has it
    thread: threading.Thread | None = None  # empties the pipe, where there is one

    async def emptied(self) -> None:
        """Return once all that was written is in the log, or after EMPTIED_WITHIN_S."""
        if self.thread is not None and self.thread.is_alive():
            await asyncio.to_thread(self.thread.join, EMPTIED_WITHIN_S)


@contextmanager
def output_to(log: Path) -> Iterator[Output]:
    """An output whose bytes are appended to `log` without this process's secrets; start the child inside.

    Raises:
        OSError: the log cannot be opened, or no pipe can be made.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    strainer = Strainer(environ.secrets().values())
    output = Output(sink) if strainer.idle else _piped(sink, strainer, log.stem)
    try:
        yield output
    finally:
        os.close(output.descriptor)


def _piped(sink: int, strainer: Strainer, name: str) -> Output:
    try:
        reading, writing = os.pipe()
    except OSError:
        os.close(sink)
        raise
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # this user's pipes may have used up their share
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    thread = threading.Thread(target=_empty, args=(reading, sink, strainer), name=f"log of {name}", daemon=True)
    thread.start()
    return Output(writing, thread)


def _empty(reading: int, sink: int, strainer: Strainer) -> None:
    """Read until the last writer is gone. What the disk will not have is lost: the child must not wait for room."""
    try:
        while data := os.read(reading, CHUNK_BYTES):
            _write(sink, strainer.through(data))
        _write(sink, strainer.rest())
    finally:
        os.close(reading)
        os.close(sink)


def _write(sink: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(sink, data) :]


def cut_logs(folder: Path) -> None:
    """Of every log in this folder that has grown too large, keep the end. Whoever writes it appends, and goes on; what
    comes in between the reading and the cutting is lost."""
    for log in folder.glob("*.log"):
        with contextlib.suppress(OSError):  # a disk that takes nothing: the next look tries again
            if log.stat().st_size > LOG_BYTES:
                _cut(log)


def _cut(log: Path) -> None:
    with log.open("rb+") as stream:
        size = stream.seek(-KEPT_BYTES, os.SEEK_END) + KEPT_BYTES
        kept = stream.read().partition(b"\n")[2]  # whole lines
        stream.truncate(0)
    with log.open("ab", buffering=0) as appending:
        appending.write(b"[%d bytes of this log were cut away]\n" % (size - len(kept)) + kept)
