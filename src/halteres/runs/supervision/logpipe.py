"""Children of a supervisor: started with no secrets but those named, and with a log that holds none.

What a child prints goes through a pipe, and known values become `***` on their way. A thread empties the pipe, so that
no child waits for whatever else its supervisor does; its last words are in the log once its exit is known. Where
nothing is secret, the child gets the log file itself. If the supervisor dies, its children, which end then too, find
their output closed: Python's logging bears that. A log that grows without end loses its beginning, and ends no child.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO

from halteres.config import environ
from halteres.process import Child, Lifeline
from halteres.redaction import SHORTEST, STRUCK

LOG_BYTES, KEPT_BYTES = 64 * 1024 * 1024, 16 * 1024 * 1024
"""What a log may grow to, and what is then kept of it: the newest."""

CHUNK_BYTES = 64 * 1024
PIPE_BYTES = 1024 * 1024
"""What a child may print ahead while we are busy (Linux's largest for everybody; its default is 64 KiB)."""

EMPTIED_WITHIN_S = 1.0
"""How long a child that has ended is waited for by its log: another process may hold its output open for ever."""


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    folder: Path,
    lifeline: Lifeline,
    descriptors: Sequence[int] = (),
    keys: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    answer: IO[bytes] | None = None,
) -> Child:
    """Start a command whose output is appended to `log`; OSError where that cannot be.

    Args:
        keys: names of the secret variables of ours that it may have.
        answer: a file for its stdout, which is then not for the log. No pipe: a child that it leaves behind would keep
            that open, and its exit from being known.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    emptied: Callable[[], object] | None = None
    try:
        strainer = Strainer(environ.secrets().values())
        if not strainer.idle:
            output, emptied = _piped(output, strainer, log.stem)
        return Child(
            command,
            environment=environ.with_keys(*keys, PYTHONUNBUFFERED="1", **variables),
            folder=folder,
            lifeline=lifeline,
            descriptors=descriptors,
            stdout=answer or output,
            stderr=output,
            before_exit=emptied,
        )
    finally:
        os.close(output)


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
        self._held = b""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to strike out."""
        return not self._secrets

    def through(self, data: bytes) -> bytes:
        """What may be written by now."""
        if self.idle:
            return data
        stream = self._held + data
        written, at, cut = list[bytes](), 0, len(stream) - self._beginning_at_the_end(stream)
        for match in self._pattern.finditer(stream):
            if match.start() >= cut:
                break  # it may be the beginning of a longer one
            written += [stream[at : match.start()], STRUCK.encode()]
            at = match.end()
        cut = max(cut, at)
        self._held = stream[cut:]
        return b"".join((*written, stream[at:cut]))

    def rest(self) -> bytes:
        """What was held back: nothing more comes."""
        held, self._held = self._held, b""
        return held if self.idle else self._pattern.sub(STRUCK.encode(), held)

    def _beginning_at_the_end(self, stream: bytes) -> int:
        """Length of the longest end of the stream that a value begins with."""
        longest = 0
        for secret in self._secrets:
            at = stream.find(secret[:1], max(0, len(stream) - len(secret) + 1))
            while at >= 0 and not secret.startswith(stream[at:]):
                at = stream.find(secret[:1], at + 1)
            longest = max(longest, len(stream) - at if at >= 0 else 0)
        return longest


def _piped(log: int, strainer: Strainer, name: str) -> tuple[int, Callable[[], object]]:
    """The end of a pipe for a child to write to, and a call that returns once all is in the log, or after
    EMPTIED_WITHIN_S."""
    reading, writing = os.pipe()
    if sys.platform == "linux":
        with suppress(OSError):  # this user's pipes may have used up their share
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def write(data: bytes) -> None:
        with suppress(OSError):  # what the disk will not have is lost: the child must not wait for room
            while data:
                data = data[os.write(log, data) :]

    def empty() -> None:
        """Read until the last writer is gone."""
        while data := os.read(reading, CHUNK_BYTES):
            write(strainer.through(data))
        write(strainer.rest())
        os.close(reading)
        os.close(log)

    thread = threading.Thread(target=empty, name=f"log of {name}", daemon=True)
    thread.start()
    return writing, lambda: thread.join(EMPTIED_WITHIN_S)


def cut_logs(folder: Path) -> None:
    """Of every log in this folder that has grown too large, keep the end. Whoever writes it appends, and goes on; what
    comes in between the reading and the cutting is lost."""
    for log in folder.glob("*.log"):
        with suppress(OSError):  # a disk that takes nothing: the next look tries again
            if log.stat().st_size <= LOG_BYTES:
                continue
            with log.open("rb+") as stream:
                size = stream.seek(-KEPT_BYTES, os.SEEK_END) + KEPT_BYTES
                kept = stream.read().partition(b"\n")[2]  # whole lines
                stream.truncate(0)
            with log.open("ab", buffering=0) as appending:
                appending.write(b"[%d bytes of this log were cut away]\n" % (size - len(kept)) + kept)
