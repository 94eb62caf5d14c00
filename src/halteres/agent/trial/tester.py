"""The process that tests an environment: each model in turn, by the environment's own `process` in a child process.

Models of this machine come one after another, those of the endpoint side by side; what goes wrong with one never
reaches another. A child cannot outlive the tester, has bounded memory, files and output, and is ended at its deadline.
Each model's end is written to its ended.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec

from halteres.agent.trial.environment_config import command_of, variables_of
from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.outcome import ODD_ANSWERS, Ended, Fault, Traffic, read_outcome
from halteres.agent.trial.relay import Destination, Relay, Upstream, relaying
from halteres.agent.trial.request import COMPLETIONS_PER_ROLLOUT, REMOTE_AT_ONCE, Candidate, Request
from halteres.agent.trial.scoring import odd_scores
from halteres.config import environ
from halteres.errors import HalteresError, NotFound, ServerError, boundary
from halteres.process import Lifeline, die_with_parent
from halteres.redaction import Redactor
from halteres.rewards.components import secret_variables
from halteres.runs.directory import find_run
from halteres.runs.reading.failures import how, reason
from halteres.runs.servers import Server, served, service_arguments

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


_SAID = re.compile(r"(?:error: |.* (?:ERROR|CRITICAL) \S+: )(.+)")
LONGEST = 400  # characters of a cause


def timed_out(within_s: float, unanswered: int, hung_at: str) -> tuple[str, str, Fault]:
    """It was ended at its deadline."""
    limit = f"{within_s / 60:g} minutes" if within_s >= 60 else f"{within_s:g} s"
    what = f"Process timed out after {limit}"
    if unanswered:
        return what, f"The model was too slow: {unanswered} requests had no answer yet.", "model"
    why = f"It hung in {hung_at}." if hung_at else "It neither asked the model for anything nor ended."
    return what, why, "environment"


def exited(code: int, traffic: Traffic, stderr: str) -> tuple[str, str, Fault]:
    """It ended by itself before it was through; code is negative for a signal."""
    what = f"Process {how(code)}"
    if traffic.over == "budget":
        return what, f"{traffic.last_error} Does its scorer ever give a score?", "environment"
    if traffic.over == "model" or (traffic.last_error and not traffic.completions):
        return what, traffic.last_error, "model"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [said[1] for line in lines if (said := _SAID.match(line))]
    return what, (errors[-1] if errors else reason(lines, code))[:LONGEST], "environment"


def hung_at(file: str, stacks: str) -> str:
    """The innermost place in the environment's file, of the stacks that Python dumps at SIGABRT; "" if none."""
    found = re.search(rf'File "{re.escape(file)}", line (\d+) in (\S+)', stacks)
    return f"{found[2]} ({file.rpartition('/')[2]}:{found[1]})" if found else ""


GRACE_S = 2.0
TOLD = 1000  # characters of its output that an answer holds (seed 002)
LARGEST_FILE = 4 * 1024**3  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    """One candidate at its place."""

    command: Sequence[str]
    environment_file: str
    folder: Path  # where it runs: the environment's working directory
    log: Path
    variables: Mapping[str, str]
    keys: Sequence[str]  # names of the secret variables that it is given
    upstream: Upstream  # to its model
    within_s: float
    lifeline: Lifeline

    async def take(self) -> Ended:
        """Run the command to its end, or to the deadline. OSError: it cannot be started."""
        began = time.monotonic()
        out, err = Output(), Output()
        with out.pipe() as stdout, err.pipe() as stderr:
            process = await self._start(stdout, stderr)
        try:
            unanswered = await self._until_over(process)
        finally:
            code = await _end(process)
            await asyncio.gather(out.ended(GRACE_S), err.ended(GRACE_S))
        write_log(self.log, self.command, self.folder, code, out.text, err.text)
        seconds, traffic = time.monotonic() - began, self.upstream.traffic
        if code == 0 and unanswered is None:
            return Ended(seconds=seconds, traffic=traffic)
        if unanswered is None:
            error, why, fault = exited(code, traffic, err.text)
        else:
            error, why, fault = timed_out(self.within_s, unanswered, hung_at(self.environment_file, err.text))
        said = {"stdout": folded(out.text)[-TOLD:], "stderr": folded(err.text)[-TOLD:]}
        return Ended(error=error, why=why, fault=fault, seconds=seconds, traffic=traffic, **said)

    async def _until_over(self, process: asyncio.subprocess.Process) -> int | None:
        """Until it has ended, or its model has for good: None. At the deadline, how many requests have no answer."""
        over = self.upstream.over
        waits = [asyncio.create_task(wait) for wait in (over.wait(), process.wait())]
        try:
            await asyncio.wait(waits, timeout=self.within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if over.is_set():
            await _ended(process, GRACE_S)  # some clients repeat for minutes what nobody will answer
        if over.is_set() or process.returncode is not None:
            return None
        unanswered = self.upstream.traffic.in_flight
        if not unanswered:
            process.send_signal(signal.SIGABRT)  # its last words are where it hangs
            await _ended(process, GRACE_S)
        return unanswered

    async def _start(self, stdout: int, stderr: int) -> asyncio.subprocess.Process:
        lifeline = {"HALTERES_LIFELINE_FD": str(self.lifeline.read_end)}
        python = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        return await asyncio.create_subprocess_exec(
            *self.command,
            cwd=self.folder,
            env=environ.with_keys(*self.keys, **lifeline, **python, **self.variables),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(self.lifeline.read_end,),
            process_group=0,
            preexec_fn=_bounded,
        )


async def _ended(process: asyncio.subprocess.Process, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), within_s)
    return process.returncode is not None


async def _end(process: asyncio.subprocess.Process) -> int:
    """SIGTERM where it still runs, then SIGKILL for its group; the exit code."""
    if process.returncode is None:
        process.terminate()
        await _ended(process, GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # what it started outlives it otherwise
    return await process.wait()


def _bounded() -> None:
    """In the child: it ends with us, writes no core, and fills no disk."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


LOCAL_REQUESTS, REMOTE_REQUESTS = 256, 16  # of one model, under way at once


class Tester:
    """One test, from its relay's first request to the last candidate's end."""

    def __init__(self, folder: TestFolder, request: Request, done: Callable[[], None] = lambda: None) -> None:
        """`done` is called once all is measured; services may still be closing then."""
        self._folder, self._asked, self._done = folder, request, done
        self._left, self._measured = {one.stem for one in request.candidates}, asyncio.Event()
        self._lifeline = Lifeline.open()
        self._places = asyncio.Semaphore(REMOTE_AT_ONCE)

    async def run(self) -> None:
        """Test every candidate."""
        local = [one for one in self._asked.candidates if one.is_local]
        remote = [one for one in self._asked.candidates if not one.is_local]
        try:
            async with relaying() as relay, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._locals(relay, local), name="models of this machine")
                for one in remote:
                    tasks.create_task(self._remote(relay, one), name=one.model)
                tasks.create_task(self._conclude(), name="the scorer")
        finally:
            self._lifeline.close()

    async def _conclude(self) -> None:
        """Try odd answers on a scorer that has scored anything: after the models, whose time is measured."""
        await self._measured.wait()
        if any(read_outcome(self._folder, self._asked, one).completions for one in self._asked.candidates):
            self._folder.write(ODD_ANSWERS, await asyncio.to_thread(odd_scores, self._asked))
        self._done()

    async def _remote(self, relay: Relay, one: Candidate) -> None:
        async with self._places:
            to = self._destination(one, environ.openrouter_url(), REMOTE_REQUESTS, environ.openrouter_key())
            await self._sit(one, *relay.open(to))

    async def _locals(self, relay: Relay, candidates: Iterable[Candidate]) -> None:
        for one in candidates:
            try:
                async with self._service(one) as service:
                    url = f"{service.url}/runs/{self._asked.test_id}/v1"
                    to = self._destination(one, url, LOCAL_REQUESTS, service.key)
                    await self._sit(one, *relay.open(to))
            except HalteresError as error:
                self._end(one, Ended(error=error.what, why=error.why, fault="model"))

    @asynccontextmanager
    async def _service(self, one: Candidate) -> AsyncIterator[Server]:
        """A service for one model: a new one, unless one was given."""
        if one.problem:
            raise NotFound(one.problem)
        if one.service_url:
            yield Server(url=one.service_url, key=environ.api_key())
            return
        stack, log, given_up = ExitStack(), self._folder.path / "service.log", threading.Event()
        owned = self._served(one, log, given_up)
        starting = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, owned))
        try:
            yield await asyncio.shield(starting)
        finally:
            given_up.set()
            await asyncio.gather(starting, return_exceptions=True)  # its thread goes on where the task is cancelled
            await asyncio.to_thread(stack.close)
            shutil.rmtree(log.with_suffix(""), ignore_errors=True)  # its state

    def _served(self, one: Candidate, log: Path, given_up: threading.Event) -> AbstractContextManager[Server]:
        """A service that has the model: for weights of a run its own, or one on its state."""
        if not one.run:
            return served(one.base, arguments=self._asked.service, log=log, given_up=given_up)
        run = find_run(one.run)
        inference = run.settings().inference
        return served(inference.model, run, arguments=service_arguments(inference), log=log, given_up=given_up)

    def _destination(self, one: Candidate, base_url: str, parallel: int, key: str | None = None) -> Destination:
        """An environment of ours is told the limits of answers; for another they are set on its requests."""
        asked = self._asked
        return Destination(
            base_url=base_url,
            model=one.base,
            ends_at=time.monotonic() + asked.model_within_s + GRACE_S,
            budget=COMPLETIONS_PER_ROLLOUT * asked.rollouts,
            max_tokens=asked.max_tokens if asked.is_foreign else None,
            temperature=asked.temperature if asked.is_foreign else None,
            key=key,
            parallel=parallel,
        )

    async def _sit(self, one: Candidate, address: str, upstream: Upstream) -> None:
        """One candidate's sitting; whatever happens is in its ended.json."""
        try:
            with boundary(ServerError, "The test"):
                sitting = Sitting(
                    command=command_of(self._folder, self._asked, one, address),
                    environment_file=self._asked.environment_file,
                    folder=Path(self._asked.working_directory),
                    log=self._folder.log(one),
                    variables=variables_of(one),
                    keys=secret_variables(self._asked.env),
                    upstream=upstream,
                    within_s=self._asked.model_within_s,
                    lifeline=self._lifeline,
                )
                self._end(one, self._looked_at(one, await sitting.take()))
        except HalteresError as error:
            self._end(one, Ended(error=error.what, why=error.why, fault="test", traffic=upstream.traffic))

    def _looked_at(self, one: Candidate, ended: Ended) -> Ended:
        """The ending; a process that ended well with less than was asked has not."""
        outcome = read_outcome(self._folder, self._asked, one)
        made, wanted = len(outcome.groups or outcome.responses), len(self._asked.prompts) or self._asked.num_steps
        if ended.error or made >= wanted:
            return ended
        what = f"Process exited with code 0 after {made} of {wanted} steps"
        if not outcome.output_file.exists():
            what = f"Output file not created: {outcome.output_file}"
        return msgspec.structs.replace(ended, error=what, why="Does its code end the process?", fault="environment")

    def _end(self, one: Candidate, ended: Ended) -> None:
        self._folder.work(one).mkdir(exist_ok=True)
        self._folder.write(f"{one.stem}/ended.json", ended)
        self._left.discard(one.stem)
        if not self._left:
            self._measured.set()
