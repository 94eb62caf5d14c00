"""A child process that is asked one thing at a time and killed, with all that it started, when it
takes too long.

Both sides speak lines of JSON. The child's first line says that it is ready, or why it cannot be;
each answer repeats its question's id, so that nothing said before a question is an answer to it.
Time is the parent's, so nothing in the child can put its limit off. An answer that does not come is
an error with a name of its own, and costs the child its life.

    EnvironmentFailed
    ├── WorkerTimedOut       scorer_timeout   no answer within the limit
    ├── WorkerOutOfMemory    scorer_memory    more memory than the limit
    ├── WorkerExited         scorer_exited    ended while it was asked
    ├── WorkerSaidTooMuch    scorer_output    printed or answered too much, or what is no answer
    ├── WorkerRefused        scorer_error     raised
    └── WorkerLost           worker_lost      not started, or not in time, or killed because the
                                              machine had no memory left: no fault of what it ran
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from halteres.config import environ
from halteres.environments.scratch_folders import make_folder, remove_folder
from halteres.errors import EnvironmentFailed
from halteres.process import Child
from halteres.redaction import printable

LONGEST_ANSWER = 1 << 20
"""Bytes of one line from the child."""

MOST_SHOWN = 64 << 10
"""Bytes printed since a question that go on to this process's standard error."""

LONGEST_ERROR = 4000
"""Characters of what a child says of its failure."""

LONGEST_TAIL = 2000
"""Bytes printed last, which say why a child could not be started."""

EXITS_WITHIN_S = 1.0
"""A child that has closed its connection is ending; after this it is ended."""

STANDARD_ERROR = 2

VMSTAT = Path("/proc/vmstat")


class WorkerTimedOut(EnvironmentFailed):
    """No answer within the limit; the worker was killed."""

    code = "scorer_timeout"


class WorkerOutOfMemory(EnvironmentFailed):
    """It wanted more memory than its limit."""

    code = "scorer_memory"


class WorkerExited(EnvironmentFailed):
    """The worker ended while it was asked: `os._exit`, `sys.exit`, a signal."""

    code = "scorer_exited"


class WorkerSaidTooMuch(EnvironmentFailed):
    """It printed or wrote more than its limit, or answered what is no answer."""

    code = "scorer_output"


class WorkerRefused(EnvironmentFailed):
    """The worker's code raised."""

    code = "scorer_error"


class WorkerLost(EnvironmentFailed):
    """The worker could not be started, or was ended from outside, also for the machine's memory."""

    code = "worker_lost"


SAID = {
    kind.code: kind for kind in (WorkerOutOfMemory, WorkerExited, WorkerSaidTooMuch, WorkerLost)
}
"""What a child says of itself; anything else is `WorkerRefused`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What one worker may use. None: no limit."""

    memory_bytes: int | None = 2 << 30  # of address space, each of its processes
    # of its life, which ends in order when it was busy for half of that
    cpu_s: int | None = 600
    # each file that it writes, its scratch folder in a cage, and what it prints for one question
    file_bytes: int = 16 << 20
    open_files: int | None = 256
    processes: int = 32  # and threads, in a cage alone
    calls: int | None = 1000  # it is replaced after so many answers


NO_LIMITS = WorkerLimits(
    memory_bytes=None, cpu_s=None, file_bytes=1 << 40, open_files=None, calls=None
)
"""For a package that this user trusts. (No disk has room for such a file.)"""


class WorkerProcess:
    """One child, started with the first question and anew with the next one after it was killed."""

    _reader: asyncio.StreamReader  # of the child, while there is one
    _writer: asyncio.StreamWriter
    _printed: _Printed

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_within_s: float,
        limits: WorkerLimits = NO_LIMITS,
        environment: Mapping[str, str] | None = None,
        opening: Mapping[str, Any] | None = None,
    ) -> None:
        """Remember how to start it.

        Args:
            opening: what it is told before it is ready, and other users are not to read.
            limits: those that are this side's to hold: what it prints, and when it is replaced.
            environment: its variables; by default ours without secrets. `TMPDIR` is a folder of its
                own, which is removed after its end.
        """
        self._command, self._start_within_s = tuple(command), start_within_s
        self._limits, self._environment, self._opening = limits, environment, opening
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        self._num_answers, self._busy_s, self._num_killed_before = 0, 0.0, 0

    @property
    def is_running(self) -> bool:
        """Whether there is a child that the next question need not wait for."""
        return self._child is not None and self._child.exit_code is None

    @property
    def is_ready(self) -> bool:
        """Whether it would answer at once."""
        return self.is_running and not self._turn.locked()

    async def start(self) -> None:
        """Have a child that is ready.

        Raises:
            WorkerLost: it could not be started, or was not ready in time.
            WorkerRefused: its code raised.
        """
        async with self._turn:
            if not self.is_running:
                await self._start()

    async def ask(self, question: Mapping[str, Any], within_s: float) -> Mapping[str, Any]:
        """The child's answer; a child that has to be started first is given the time for that, too.

        After an error the child is gone.

        Raises:
            WorkerTimedOut: it took longer than the limit.
            WorkerOutOfMemory, WorkerExited, WorkerSaidTooMuch, WorkerRefused: what its code did.
            WorkerLost: it could not be started, was not ready in time, or was killed because the
                machine had no memory left.
        """
        async with self._turn:
            if not self.is_running:
                await self._start()
            number = secrets.token_hex(8)
            self._printed.num_bytes = 0
            self._writer.write(json.dumps({**question, "id": number}).encode() + b"\n")
            began = time.monotonic()
            answer = await self._answer(within_s, number)
            self._num_answers += 1
            self._busy_s += time.monotonic() - began
            if self._is_worn() or answer.get("leaves_processes"):
                self.kill()
            return answer

    def kill(self) -> None:
        """End the child and all that it started, at once."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            self._writer.transport.abort()
            self._printed.close()

    def _is_worn(self) -> bool:
        calls, cpu_s = self._limits.calls, self._limits.cpu_s
        had_its_calls = calls is not None and self._num_answers >= calls
        return had_its_calls or (cpu_s is not None and self._busy_s > cpu_s / 2)

    async def _start(self) -> None:
        self.kill()
        self._num_answers, self._busy_s = 0, 0.0
        self._num_killed_before = _num_killed_for_memory()
        try:
            await self._open_child()
        except OSError as error:
            # no such program, no room among the temporary files, too many open files
            raise WorkerLost("The worker could not be started.", f"{error}.") from error
        if self._opening is not None:
            self._writer.write(json.dumps(self._opening).encode() + b"\n")
        await self._answer(self._start_within_s, None)

    async def _open_child(self) -> None:
        # unlike a pipe's, our end can be closed whoever holds theirs
        ours, theirs = socket.socketpair()
        listening, printing = socket.socketpair()
        with theirs, printing:
            self._reader, self._writer = await asyncio.open_connection(
                sock=ours, limit=LONGEST_ANSWER
            )
            most = self._limits.file_bytes
            _, self._printed = await asyncio.get_running_loop().create_connection(
                lambda: _Printed(most, self.kill), sock=listening
            )
            environment = self._environment
            if environment is None:
                environment = environ.for_sandboxed()
            scratch = ""
            try:
                scratch = make_folder()
                self._child = Child(
                    self._command,
                    environment={**environment, "TMPDIR": scratch},
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=printing.fileno(),
                    before_exit=lambda: remove_folder(scratch),
                )
            except OSError:
                if scratch:
                    remove_folder(scratch)
                self._writer.transport.abort()
                self._printed.close()
                raise

    async def _answer(self, within_s: float, number: str | None) -> Mapping[str, Any]:
        """The next line, which repeats the question's number, or is the first; a child that does
        not give one is killed.
        """
        try:
            async with asyncio.timeout(within_s):
                line = await self._next_line()
            if not line.endswith(b"\n"):
                await self._raise_ended(was_asked=number is not None)
            return _read(line, number)
        except BaseException as error:  # cancellation, too
            self.kill()
            if not isinstance(error, TimeoutError):
                raise
            limit = f"The limit is {within_s:g} s."
            if number is None:
                raise WorkerLost("The worker was not ready in time.", limit) from error
            raise WorkerTimedOut("No answer came in time.", limit) from error

    async def _next_line(self) -> bytes:
        """Without an end of line where the child has ended."""
        try:
            return await self._reader.readline()
        except ValueError as error:
            raise WorkerSaidTooMuch(
                "The worker's answer is too long.", f"The limit is {LONGEST_ANSWER} bytes."
            ) from error
        except OSError:
            return b""

    async def _raise_ended(self, was_asked: bool) -> NoReturn:
        """Say how it ended."""
        child, printed = self._child, self._printed
        if printed.is_too_much:
            raise WorkerSaidTooMuch(
                "The worker printed too much.", f"The limit is {self._limits.file_bytes} bytes."
            )
        if child is None:
            raise WorkerLost("The worker was ended from outside.")
        code: int | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXITS_WITHIN_S):
                code = await asyncio.wrap_future(child.exit)
        end = _end(code)
        if not was_asked:
            raise WorkerLost("The worker ended as it started.", printed.last_words() or f"{end}.")
        if end == "SIGKILL" and _num_killed_for_memory() != self._num_killed_before:
            raise WorkerLost("The worker was killed.", "The machine had no memory left.")
        if end == "SIGXCPU":
            raise WorkerTimedOut(
                "The worker computed for too long.", f"The limit is {self._limits.cpu_s} CPU s."
            )
        raise WorkerExited("The worker ended as it was asked.", f"{end}.")


class _Printed(asyncio.Protocol):
    """What a child prints: the beginning goes on to our own standard error, too much ends it."""

    def __init__(self, most: int, end: Callable[[], None]) -> None:
        self.num_bytes = 0  # since the last question
        self.is_too_much = False
        self._most, self._end, self._tail = most, end, b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        room = max(0, MOST_SHOWN - self.num_bytes)
        # a model may have written it: a terminal gets no commands
        shown = printable(data[:room].decode(errors="replace")).encode()
        self.num_bytes += len(data)
        self._tail = (self._tail + data)[-LONGEST_TAIL:]
        if shown:
            with contextlib.suppress(OSError):
                os.write(STANDARD_ERROR, shown)
        if self.num_bytes > self._most:
            self.is_too_much = True
            self._end()

    def last_words(self) -> str:
        """Its last lines."""
        return printable(self._tail.decode(errors="replace")).strip()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _read(line: bytes, number: str | None) -> Mapping[str, Any]:
    """An answer from its line."""
    answer: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(answer, dict) or answer.pop("id", None) != number:
        what = f"The worker wrote {line[:80]!r}, which is no answer to its question."
        if number is None:
            raise WorkerLost(what)
        raise WorkerSaidTooMuch(what)
    if "error" in answer:
        kind = SAID.get(str(answer.get("code")), WorkerRefused)
        raise kind(printable(str(answer["error"])[:LONGEST_ERROR]))
    return answer


def _refuse_constant(name: str) -> NoReturn:
    """NaN and the infinities are no JSON."""
    raise ValueError(name)


def _end(code: int | None) -> str:
    """How a process ended, by its exit code; in a cage 128 and the number of a signal."""
    if code is None:
        return "It closed its connection"
    number = code - 128 if code > 128 else -code
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"Its exit code is {code}"


def _num_killed_for_memory() -> int:
    """Processes that the kernel has killed since boot because there was no memory left."""
    with contextlib.suppress(OSError):
        for line in VMSTAT.read_text(encoding="utf-8").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
