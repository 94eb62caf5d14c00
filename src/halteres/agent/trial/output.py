"""What a child process prints: its beginning and its end, however much it is.

Owns: the pipe it comes through, how much is kept, that what is said again is told once, the log file of one model.
Never: keeps a secret of this process; waits for ever on a pipe that outlives whom it was given to.

The pipe is ours, and none of asyncio's: `process.wait` returns once those are closed (CPython 3.11), which a child that
the process left behind may keep from happening.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from halteres.redaction import Redactor

KEPT_HEAD, KEPT_TAIL = 32 * 1024, 64 * 1024  # bytes
RULE = "=" * 60
_TIME = re.compile(r"^\d{4}-\d\d-\d\d[T ][\d:.,]+ ?")  # before a line of a log


class Output:
    """One stream of a child, read to its end."""

    def __init__(self) -> None:
        self._head, self._tail, self._size = b"", deque[bytes](), 0
        self._reading: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def pipe(self) -> Iterator[int]:
        """The end that a child writes to, read from now on; start the child inside. OSError: there can be no pipe."""
        reading, writing = os.pipe()
        self._reading = asyncio.create_task(self._read(reading), name="output")
        try:
            yield writing
        finally:
            os.close(writing)

    async def ended(self, within_s: float) -> None:
        """Return once nothing more comes, or after so long: who left the child's group may hold the pipe open."""
        if self._reading is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reading, within_s)

    async def _read(self, reading: int) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", buffering=0)
        )
        try:
            while chunk := await stream.read(KEPT_HEAD):
                self._keep(chunk)
        finally:
            transport.close()

    def _keep(self, chunk: bytes) -> None:
        self._size += len(chunk)
        room = KEPT_HEAD - len(self._head)
        self._head += chunk[:room]
        self._tail.append(chunk[room:])
        while sum(map(len, self._tail)) - len(self._tail[0]) > KEPT_TAIL:
            self._tail.popleft()

    @property
    def text(self) -> str:
        """What was printed, without its middle where it was much, and without secrets."""
        tail = b"".join(self._tail)
        cut = self._size - len(self._head) - len(tail)
        parts = (self._head, f"\n... {cut} bytes ...\n".encode() if cut else b"", tail)
        return Redactor.of_this_process().text(b"".join(parts).decode(errors="replace"))


def folded(text: str) -> str:
    """The text with lines that only repeat the one before, but for the time, counted.

    >>> folded("2026-01-01 10:00:00,001 It failed.\\n2026-01-01 10:00:00,002 It failed.\\nSo.")
    '2026-01-01 10:00:00,001 It failed. (2 times)\\nSo.'
    """
    told: list[str] = []
    for _, lines in groupby(text.split("\n"), key=lambda line: _TIME.sub("", line)):
        first, *again = lines
        told.append(f"{first} ({len(again) + 1} times)" if first and again else first)
    return "\n".join(told)


def write_log(file: Path, command: Sequence[str], folder: Path, code: int, out: str, err: str) -> None:
    """The log of one model's environment, in the seeds' form."""
    head = f"Command: {' '.join(command)}\nWorking dir: {folder}\nReturn code: {code}\n"
    file.write_text(Redactor.of_this_process().text(head) + _section("STDOUT", out) + _section("STDERR", err))


def _section(title: str, text: str) -> str:
    return f"\n{RULE}\n{title}:\n{RULE}\n{text or '(empty)'}\n"
