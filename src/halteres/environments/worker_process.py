"""A child process that is asked one thing at a time and killed, with all that it started, when it
takes too long.

Both sides speak lines of JSON. The child's first line says that it is ready, or why it cannot be.
Time is the parent's, so nothing in the child can put its limit off; a late or broken answer is
none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from halteres.config import environ
from halteres.errors import EnvironmentFailed
from halteres.process import Child

GYM_WORKER = Path(__file__).with_name("gym_worker.py")

START_S = 120.0
"""How long another package may take to be imported, and its data set or environment to be made."""

LONGEST_ANSWER = 1 << 20
"""Bytes of one line from the child."""


class WorkerTimedOut(EnvironmentFailed):
    """No answer within the limit; the worker was killed."""

    code = "scorer_timeout"


class WorkerLost(EnvironmentFailed):
    """The worker ended, or said what is no JSON."""

    code = "worker_lost"


class WorkerRefused(EnvironmentFailed):
    """The worker's code raised."""

    code = "scorer_error"


def gym_worker(
    kind: Literal["reasoning", "text"], *arguments: str, python: str | None = None
) -> WorkerProcess:
    """A worker that runs another package's environment (`gym_worker`), by a Python that has the
    package.
    """
    return WorkerProcess(
        (python or sys.executable, str(GYM_WORKER), kind, *arguments), start_within_s=START_S
    )


class WorkerProcess:
    """One child, started with the first question and anew with the next one after it was killed."""

    _reader: asyncio.StreamReader  # of the child, while there is one
    _writer: asyncio.StreamWriter

    def __init__(self, command: Sequence[str], *, start_within_s: float) -> None:
        self._command, self._start_within_s = tuple(command), start_within_s
        self._child: Child | None = None
        self._turn = asyncio.Lock()

    async def ask(self, question: Mapping[str, Any], within_s: float) -> Mapping[str, Any]:
        """The child's answer; a child that has to be started first is given the time for that, too.

        Raises:
            WorkerTimedOut: it took longer than the limit, or did not become ready in time.
            WorkerLost: it ended.
            WorkerRefused: its code raised. It is not used again after that.
        """
        async with self._turn:
            if self._child is None:
                # unlike a pipe's, our end can be closed whoever holds theirs
                ours, theirs = socket.socketpair()
                with theirs:
                    self._reader, self._writer = await asyncio.open_connection(
                        sock=ours, limit=LONGEST_ANSWER
                    )
                    end, environment = theirs.fileno(), environ.for_sandboxed()
                    self._child = Child(
                        self._command, environment=environment, stdin=end, stdout=end
                    )
                await self._answer(self._start_within_s)
            self._writer.write(json.dumps(question).encode() + b"\n")
            return await self._answer(within_s)

    def kill(self) -> None:
        """End the child and all that it started, at once."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            self._writer.transport.abort()

    async def _answer(self, within_s: float) -> Mapping[str, Any]:
        """The next line; a child that does not give one is killed."""
        try:
            async with asyncio.timeout(within_s):
                line = await self._reader.readline()
            answer: Any = None
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
            if not isinstance(answer, dict):
                what = (
                    f"The worker wrote {line[:80]!r}, which is no object."
                    if line
                    else "The worker ended."
                )
                raise WorkerLost(what)
            if "error" in answer:
                raise WorkerRefused(str(answer["error"]))
            return answer
        except BaseException as error:  # cancellation, too
            self.kill()
            if isinstance(error, TimeoutError):
                raise WorkerTimedOut(
                    "No answer came in time.", f"The limit is {within_s:g} s."
                ) from error
            # the child ended as it was asked; a line without an end
            if isinstance(error, OSError | ValueError):
                raise WorkerLost("The worker ended.", f"{error}.") from error
            raise
