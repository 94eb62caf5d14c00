"""The processes of one run: its roles, each ended with all that it started; the engine, which is a
grandchild; and the process that forwards metrics to W&B, trackio and TensorBoard.

What an exit means is decided elsewhere (`controller`). A child gets no secrets but the given ones,
and what it prints goes through a pipe on which known values become `***`. A thread empties the
pipe, so that no child waits for its supervisor; its last lines are in the log once its exit is
known.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from halteres.config import environ
from halteres.config.settings import SinkName
from halteres.files import NOT_JSON, read_regular
from halteres.logins import STRUCK, unfinished_login, without_logins
from halteres.observe.sinks import FLUSH_WITHIN_S, Reports, SinkReport, read_reports
from halteres.process import GRACE_S, Child, Lifeline, alive, identity
from halteres.redaction import SHORTEST, Redactor
from halteres.runs.directory import RunDirectory, StateWriter
from halteres.runs.supervision.roles import STOP_ORDER, Role, RoleName
from halteres.short_texts import beginning

CHUNK_BYTES = 64 * 1024
PIPE_BYTES = 1024 * 1024
"""What a child may print ahead while we are busy (Linux's largest for everybody; its default is 64
KiB).
"""

EMPTIED_WITHIN_S = 1.0
"""How long a child that has ended is waited for by its log: another process may hold its output
open for ever.
"""

POLL_S = 0.1  # how often an engine, which is not our child, is looked at
# the state of a role that knows no signal, and was ended by ours
ENDED_WITH_RUN = "ended with the run"

ENGINE_EXIT_WITHIN_S = 2.0  # how long the service may take to say how its engine ended

SINKS = (sys.executable, "-m", "halteres.observe.sinks")

SINKS_END_WITHIN_S = FLUSH_WITHIN_S + 3
"""How long the forwarding process may take to end, once all is in metrics.jsonl; then it is
killed.
"""

SINKS_OPEN_WITHIN_S = 5.0


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    folder: Path,
    lifeline: Lifeline,
    descriptors: Sequence[int] = (),
    keys: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    stays_here: bool = False,
    answer: IO[bytes] | None = None,
) -> Child:
    """Start a command whose output is appended to `log`; OSError where that cannot be.

    `keys`: names of the secret variables of ours that it may have. `stays_here`: it talks to this
    machine alone, and gets no proxy. `answer`: a file for its stdout, which is then not for the
    log; no pipe, which a child that it leaves behind would hold open.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    emptied: Callable[[], object] | None = None
    try:
        secret_filter = SecretFilter(Redactor.of_this_process().secrets)
        output, emptied = _piped(output, secret_filter, log.stem)
        if stays_here:
            environment_for = environ.for_loopback
        else:
            environment_for = environ.with_keys
        own = {"PYTHONUNBUFFERED": "1", **variables}
        return Child(
            command,
            environment=environment_for(*keys, **own),
            folder=folder,
            lifeline=lifeline,
            descriptors=descriptors,
            stdout=answer or output,
            stderr=output,
            before_exit=emptied,
        )
    finally:
        os.close(output)


class SecretFilter:
    """Strikes values, and the passwords of addresses, out of a stream of bytes, however the stream
    is cut.

    What it holds back is the beginning of a value or of an address at the very end of what came so
    far, and nothing else.

    >>> secret_filter = SecretFilter(["sk-12345678"])
    >>> secret_filter.through(b"key=sk-12"), secret_filter.through(b"345678!"), secret_filter.rest()
    (b'key=', b'***!', b'')
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        values = {
            os.fsencode(secret).decode("latin-1") for secret in secrets if len(secret) >= SHORTEST
        }
        self._secrets = sorted(values, key=len, reverse=True)
        # Without secrets a pattern that matches nowhere: an empty one would match everywhere.
        self._pattern = re.compile("|".join(map(re.escape, self._secrets)) or r"(?!)")
        self._held = ""

    def through(self, data: bytes) -> bytes:
        """What may be written by now."""
        stream = self._held + data.decode("latin-1")  # one character for each byte
        cut = min(beginning(stream, self._secrets), unfinished_login(stream))
        for match in self._pattern.finditer(stream):
            if match.start() < cut:  # else it may be the beginning of a longer one
                cut = max(cut, match.end())
        self._held = stream[cut:]
        return self._struck(stream[:cut])

    def rest(self) -> bytes:
        """What was held back: nothing more comes."""
        held, self._held = self._held, ""
        if held:
            return self._struck(held)
        return b""

    def _struck(self, stream: str) -> bytes:
        return without_logins(self._pattern.sub(STRUCK, stream)).encode("latin-1")


def _piped(log: int, secret_filter: SecretFilter, name: str) -> tuple[int, Callable[[], object]]:
    """The end of a pipe for a child to write to, and a call that returns once all is in the log, or
    after EMPTIED_WITHIN_S.
    """
    reading, writing = os.pipe()
    if sys.platform == "linux":
        with suppress(OSError):  # this user's pipes may have used up their share
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def write(data: bytes) -> None:
        # what the disk will not have is lost: the child must not wait for room
        with suppress(OSError):
            while data:
                data = data[os.write(log, data) :]

    def empty() -> None:
        """Read until the last writer is gone."""
        while data := os.read(reading, CHUNK_BYTES):
            write(secret_filter.through(data))
        write(secret_filter.rest())
        os.close(reading)
        os.close(log)

    thread = threading.Thread(target=empty, name=f"log of {name}", daemon=True)
    thread.start()
    return writing, lambda: thread.join(EMPTIED_WITHIN_S)


@dataclass(frozen=True, slots=True)
class Exited:
    """A role's process ended."""

    role: Role
    code: int  # negative: killed by that signal
    was_ready: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """A role answered its probe."""

    role: Role


@dataclass(frozen=True, slots=True)
class TooSlow:
    """A role did not answer its probe in time."""

    role: Role


@dataclass(slots=True)
class RunProcesses:
    """Children by role; what happens to them is put into `reports`."""

    writer: StateWriter
    roles: tuple[Role, ...]
    lifeline: Lifeline
    reports: asyncio.Queue[Any]
    ready: set[RoleName] = field(default_factory=set)
    _children: dict[RoleName, Child] = field(default_factory=dict)
    _restarts: dict[RoleName, int] = field(default_factory=dict)
    _watches: dict[RoleName, asyncio.Task[None]] = field(default_factory=dict)

    def start(self) -> None:
        """Start every role; its readiness and its exit will be reported."""
        for role in self.roles:
            self._start(role)

    def _start(self, role: Role) -> None:
        self.ready.discard(role.name)
        if role.hang_watch:
            role.hang_watch.begin()
        child = spawn(
            role.command,
            log=self.writer.run.log(role.name),
            folder=role.folder or self.writer.run.path,
            lifeline=self.lifeline,
            descriptors=(role.listener.descriptor,) if role.listener else (),
            keys=role.keys,
            variables=role.variables,
            stays_here=role.stays_here,
        )
        self._children[role.name] = child
        port = None
        if role.listener:
            port = role.listener.port
        who = identity(child.pid)
        self.writer.process(role.name, **who, pgid=child.pid, port=port, exit=None, state="running")
        self._watches[role.name] = asyncio.create_task(
            self._watch(role, child), name=f"watch {role.name}"
        )

    def restart(self, role: Role, reason: str | None = None) -> bool:
        """Start a dead role again, if it may be; False when its restarts are used up. `reason`: the
        code of why it was ended, where we ended it.
        """
        used = self._restarts.get(role.name, 0)
        if used >= role.restarts:
            return False
        self._restarts[role.name] = used + 1
        why = {}
        if reason:
            why = {"reason": reason}
        self.writer.event("restart", role=role.name, attempt=used + 1, of=role.restarts, **why)
        self._start(role)
        return True

    def hung(self) -> Role | None:
        """Look at the roles that are asked for a heartbeat: the one that hangs, if any."""
        for role in self.roles:
            child, watch = self._children.get(role.name), role.hang_watch
            if watch is None or child is None or child.exit_code is not None:
                continue
            if watch.is_hung(self.writer.state.processes.get(role.name, {})):
                return role
        return None

    async def kill(self, name: RoleName) -> None:
        """Kill a role and all that it started; its exit is reported."""
        if child := self._children.get(name):
            await asyncio.to_thread(child.kill)

    async def end_role(self, name: RoleName, at_most_s: float = GRACE_S) -> None:
        """End one role: asked first, killed after its grace. Its exit is recorded and not
        reported.
        """
        if watch := self._watches.pop(name, None):
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if child := self._children.get(name):
            grace_s = next(role.grace_s for role in self.roles if role.name == name)
            code = await asyncio.to_thread(child.end, min(grace_s, at_most_s))
            self._record_exit(name, code, ENDED_WITH_RUN if code < 0 else "")

    async def end(self, at_most_s: float = GRACE_S) -> None:
        """End all roles, those first that depend on others; each gets its grace, but
        `at_most_s`.
        """
        for name in STOP_ORDER:
            await self.end_role(name, at_most_s)
        engine = self.writer.state.processes.get("engine")
        if engine and engine.get("exit") is None:  # the service's child, which has outlived it
            with suppress(TimeoutError):
                await asyncio.wait_for(_gone(engine), GRACE_S)
            if alive(engine):
                os.kill(engine["pid"], signal.SIGKILL)
            self.writer.process("engine", exit=0, state="exited with its service")

    def exit_code(self, name: RoleName) -> int | None:
        """How a role ended; None while it runs, or if it was never started."""
        child = self._children.get(name)
        if child:
            return child.exit_code
        return None

    async def _watch(self, role: Role, child: Child) -> None:
        async def until_ready() -> None:
            pause_s = 0.05
            async with asyncio.timeout(role.ready_within_s):
                while not await role.ready():
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 1.4, 0.5)

        exited = asyncio.wrap_future(child.exit)
        probe = asyncio.create_task(until_ready())
        try:
            await asyncio.wait((probe, exited), return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                in_time = probe.exception() is None
                if in_time:
                    self.ready.add(role.name)
                await self.reports.put(Ready(role) if in_time else TooSlow(role))
            code = await exited
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        self._record_exit(role.name, code)
        await self.reports.put(Exited(role, code, role.name in self.ready))

    def _record_exit(self, name: RoleName, code: int, state: str = "") -> None:
        if self.writer.state.processes.get(name, {}).get("exit") is None:
            self.writer.process(name, exit=code, state=state or f"exited ({code})")
            self.writer.event("process_exit", role=name, code=code)


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine's process ended though its service had not ended it."""

    code: int | None  # its exit code, negative for a signal; None: its service did not say


@dataclass(frozen=True, slots=True)
class EngineBack:
    """The service has started another engine."""

    engine: Mapping[str, Any]  # its entry for run.json


def engine_of(service_folder: Path) -> dict[str, Any] | None:
    """The engine's entry for run.json, from its service's service.json; None where that says
    nothing.
    """
    group = None
    try:
        pid = int(_read(service_folder / "service.json")["engine_pid"])
    except (KeyError, TypeError, ValueError):
        return None
    with suppress(ProcessLookupError):
        group = os.getpgid(pid)
    return {**identity(pid), "pgid": group, "port": None, "exit": None, "state": "running"}


async def engines(
    run: RunDirectory, engine: Mapping[str, Any]
) -> AsyncIterator[EngineGone | EngineBack]:
    """Every end of an engine, and the next one that its service starts once that is ready; without
    end.
    """
    folder = run.path / "service"
    while True:
        await _gone(engine)
        code, pid = None, engine["pid"]
        with suppress(TimeoutError):
            async with asyncio.timeout(ENGINE_EXIT_WITHIN_S):
                code = await engine_exit_code(folder, pid)
        yield EngineGone(code)
        while (another := engine_of(folder)) is None or another["pid"] == pid:  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(POLL_S)
        engine = another
        yield EngineBack(engine)


async def engine_exit_code(service_folder: Path, pid: int) -> int | None:
    """Of an engine that has ended, negative for a signal; returns once its service, its parent, has
    written it.
    """
    file = service_folder / "engine_exit.json"
    while (end := _read(file)).get("pid") != pid:  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(POLL_S)
    code = end.get("code")
    if isinstance(code, int):
        return code
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(file))
    except (OSError, *NOT_JSON):
        return {}
    if isinstance(found, dict):
        return found
    return {}


async def _gone(who: Mapping[str, Any]) -> None:
    """Return once this process, which is no child of ours, has ended."""
    while alive(who):  # noqa: ASYNC110 - nobody tells us of its end
        await asyncio.sleep(POLL_S)


class Forwarding:
    """The process that forwards metrics (`halteres.observe.sinks`), where there is a sink: no run
    depends on it. How a sink is the process reports itself; that it could not be started, or died,
    is reported here.
    """

    def __init__(self, run: RunDirectory, sinks: Sequence[SinkName], lifeline: Lifeline) -> None:
        self._run, self._sinks, self._lifeline = run, sinks, lifeline
        self._child: Child | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start it, where there is a sink."""
        if not self._sinks:
            return
        for name in self._sinks:
            Reports(self._run.path).put(name, SinkReport(state="starting"))
        command, log, keys = (
            (*SINKS, str(self._run.path)),
            self._run.log("sinks"),
            ("WANDB_API_KEY",),
        )
        try:
            self._child = spawn(
                command, log=log, folder=self._run.path, lifeline=self._lifeline, keys=keys
            )
        except OSError as error:
            self._failed(
                "The process that forwards metrics could not be started: "
                f"{error.strerror or error}."
            )
        else:
            self._watch = asyncio.create_task(self._report_death(self._child), name="sinks")

    async def end(self) -> None:
        """Let it finish, for a while."""
        child, watch = self._child, self._watch
        if child is None or watch is None:
            return
        with suppress(TimeoutError):
            # A run that ended early gives its sinks time: a process that is still importing dies of
            # the signal.
            async with asyncio.timeout(SINKS_OPEN_WITHIN_S):
                while child.exit_code is None and any(  # noqa: ASYNC110 - a file tells nobody
                    report.state == "starting" for report in read_reports(self._run.path).values()
                ):
                    await asyncio.sleep(0.1)
        await asyncio.to_thread(child.end, SINKS_END_WITHIN_S)
        await watch

    async def _report_death(self, child: Child) -> None:
        if code := await asyncio.wrap_future(child.exit):
            if code < 0:
                how = f"was ended by signal {-code}"
            else:
                how = f"exited with code {code}"
            self._failed(
                f"The process that forwards metrics {how}. Its log is {self._run.log('sinks')}."
            )

    def _failed(self, why: str) -> None:
        for name, report in read_reports(self._run.path).items():
            if name in self._sinks and report.state != "failed" and not report.is_complete:
                Reports(self._run.path).failed(name, why)
