"""A child process that is asked one thing at a time and killed, with all that it started, when it takes too long.

Both sides speak lines of JSON. The child's first line says that it is ready, or why it cannot be. Time is the parent's,
so nothing in the child can put its limit off; a late or broken answer is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
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


def gym_worker(kind: Literal["reasoning", "text"], *arguments: str, python: str | None = None) -> WorkerProcess:
    """A worker that runs another package's environment (`gym_worker`), by a Python that has the package."""
    return WorkerProcess((python or sys.executable, str(GYM_WORKER), kind, *arguments), start_within_s=START_S)


class WorkerProcess:
    """One child, started when it is first asked and again after it was killed."""

    def __init__(self, command: Sequence[str], *, start_within_s: float) -> None:
        self._command, self._start_within_s = tuple(command), start_within_s
        self._child: Child | None = None
        self._output: socket.socket | None = None  # the child's; unlike a pipe's, its end can be shut whoever holds it
        self._turn = asyncio.Lock()

    async def ask(self, question: Mapping[str, Any], within_s: float) -> Mapping[str, Any]:
        """The child's answer; a child that has to be started first is given the time for that, too.

        Raises:
            WorkerTimedOut: it took longer than the limit, or did not become ready in time.
            WorkerLost: it ended.
            WorkerRefused: its code raised. It is not used again after that.
        """
        async with self._turn:
            child = self._child or await self._start()
            return await self._answer(child, question, within_s)

    def kill(self) -> None:
        """End the child and all that it started, at once."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        with contextlib.suppress(OSError):  # what was not written yet goes nowhere
            if child.process.stdin is not None:
                child.process.stdin.close()
        if self._output is not None:  # a thread that reads ends, though a grandchild may hold the other end
            with contextlib.suppress(OSError):
                self._output.shutdown(socket.SHUT_RDWR)
            self._output.close()
            self._output = None
        if child.process.stdout is not None and not self._turn.locked():  # else the thread that reads closes it
            child.process.stdout.close()

    async def _start(self) -> Child:
        self._output, theirs = socket.socketpair()
        with theirs:  # no secrets among its variables
            environment, stdout = environ.for_sandboxed(), theirs.fileno()
            child = Child(self._command, environment=environment, stdin=subprocess.PIPE, stdout=stdout)
        child.process.stdout = self._output.makefile("rb")
        self._child = child
        await self._answer(child, None, self._start_within_s)
        return child

    async def _answer(self, child: Child, question: Mapping[str, Any] | None, within_s: float) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(within_s):
                line = await asyncio.to_thread(_exchange, child, question)
            answer: Any = None
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
            if not isinstance(answer, dict):
                raise WorkerLost(
                    f"The worker wrote {line[:80]!r}, which is no object." if line else "The worker ended."
                )
            if "error" in answer:
                raise WorkerRefused(str(answer["error"]))
            return answer
        except BaseException as error:  # cancellation, too: the thread that reads ends with the child
            self.kill()
            if isinstance(error, TimeoutError):
                raise WorkerTimedOut("No answer came in time.", f"The limit is {within_s:g} s.") from error
            raise


def _exchange(child: Child, question: Mapping[str, Any] | None) -> bytes:
    """Write a line, if there is one to write, and read one; what was read until the child's end, where it ended."""
    if child.process.stdin is None or child.process.stdout is None:
        return b""
    if question is not None:
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.write(json.dumps(question).encode() + b"\n")
            child.process.stdin.flush()
    line = child.process.stdout.readline(LONGEST_ANSWER)
    if not line.endswith(b"\n"):
        child.process.stdout.close()
    return line
