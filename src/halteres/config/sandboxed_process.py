"""Running somebody else's program so that it cannot harm us: no secrets, a deadline, its output bounded, its children
ended with it, and all of them with us."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from halteres.config import environ
from halteres.process import Child

MOST_OUTPUT = 4 * 1024 * 1024  # bytes that are kept of the end of each stream: answers and tracebacks come last

LAST_WORDS_S = 1.0
"""How long a stream may stay open once the program has ended: somebody who escaped its group may hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended, and what it said."""

    code: int
    out: str
    err: str


def run_caught(command: Sequence[str], folder: Path, within_s: float, keys: Sequence[str] = ()) -> Ended:
    """Run to the end, in a process group of its own that is killed afterwards. TimeoutError after the deadline.

    Args:
        keys: names of the secret variables of ours that it may have.
    """
    pipe = subprocess.PIPE
    child = Child(command, environment=environ.with_keys(*keys), folder=folder, stdout=pipe, stderr=pipe)
    streams = [_Stream(stream) for stream in (child.process.stdout, child.process.stderr) if stream is not None]
    try:
        code = child.exit.result(within_s)
    except TimeoutError:
        raise TimeoutError(f"not within {within_s:g} s") from None
    finally:
        child.kill()
    out, err = (stream.text() for stream in streams)
    return Ended(code=code, out=out, err=err)


class _Stream:
    """One stream of a program, read on a thread."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._kept = stream, bytearray()
        self._thread = threading.Thread(target=self._read, name="output of a sandboxed process", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """What was said until now, once the program has ended."""
        self._thread.join(LAST_WORDS_S)
        return bytes(self._kept).decode(errors="replace")

    def _read(self) -> None:
        with self._stream as stream:
            while piece := os.read(stream.fileno(), 65536):
                self._kept += piece
                del self._kept[:-MOST_OUTPUT]
