"""What a child process prints: its beginning and its end, however much it is.

Owns: how much is kept, the log file of one model.
Never: keeps a secret of this process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from halteres.redaction import Redactor

KEPT_HEAD, KEPT_TAIL = 32 * 1024, 64 * 1024  # bytes
RULE = "=" * 60


class Output:
    """One stream of a child, read to its end."""

    def __init__(self) -> None:
        self._head, self._tail, self._size = b"", deque[bytes](), 0

    async def drain(self, stream: asyncio.StreamReader | None) -> None:
        """Read until the stream ends."""
        while stream and (chunk := await stream.read(KEPT_HEAD)):
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


def write_log(file: Path, command: Sequence[str], folder: Path, code: int, out: str, err: str) -> None:
    """The log of one model's environment, in the seeds' form."""
    head = f"Command: {' '.join(command)}\nWorking dir: {folder}\nReturn code: {code}\n"
    file.write_text(Redactor.of_this_process().text(head) + _section("STDOUT", out) + _section("STDERR", err))


def _section(title: str, text: str) -> str:
    return f"\n{RULE}\n{title}:\n{RULE}\n{text or '(empty)'}\n"
