"""The processes of one run: its roles, each ended with all that it started; the engine, which is a grandchild; and the
process that forwards metrics to W&B, trackio and TensorBoard.

What an exit means is decided elsewhere (`controller`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halteres.config.settings import SinkName
from halteres.files import NOT_JSON, read_regular
from halteres.observe.sinks import FLUSH_WITHIN_S, Reports, SinkReport, read_reports
from halteres.process import GRACE_S, Child, Lifeline, alive, identity
from halteres.runs.directory import RunDirectory
from halteres.runs.supervision.logpipe import spawn
from halteres.runs.supervision.roles import STOP_ORDER, Probe, Role, RoleName
from halteres.runs.supervision.state_writer import StateWriter

LOOK_EVERY_S = 0.1
"""How often an engine, which is not our child, is looked at."""

TOLD_WITHIN_S = 2.0
"""How long the service may take to say how its engine ended."""

SINKS = (sys.executable, "-m", "halteres.observe.sinks")

SINKS_END_WITHIN_S = FLUSH_WITHIN_S + 3
"""How long the forwarding process may take to end, once all is in metrics.jsonl; then it is killed."""

SINKS_OPEN_WITHIN_S = 5.0


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
class ProcessGroup:
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
        """Start every role."""
        for role in self.roles:
            self._start(role)

    def _start(self, role: Role) -> None:
        """Start one role; its readiness and its exit will be reported."""
        self.ready.discard(role.name)
        child = spawn(
            role.command,
            log=self.writer.run.log(role.name),
            folder=role.folder or self.writer.run.path,
            lifeline=self.lifeline,
            descriptors=(role.listener.descriptor,) if role.listener else (),
            keys=role.keys,
            variables=role.variables,
        )
        self._children[role.name] = child
        port = role.listener.port if role.listener else None
        who = identity(child.pid)
        self.writer.process(role.name, **who, pgid=child.pid, port=port, exit=None, state="running")
        self._watches[role.name] = asyncio.create_task(self._watch(role, child), name=f"watch {role.name}")

    def restart(self, role: Role) -> bool:
        """Start a dead role again, if it may be; False when its restarts are used up."""
        used = self._restarts.get(role.name, 0)
        if used >= role.restarts:
            return False
        self._restarts[role.name] = used + 1
        self.writer.event("restart", role=role.name, attempt=used + 1, of=role.restarts)
        self._start(role)
        return True

    async def end_role(self, name: RoleName, at_most_s: float = GRACE_S) -> None:
        """End one role: asked first, killed after its grace. Its exit is recorded and not reported."""
        if watch := self._watches.pop(name, None):
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if child := self._children.get(name):
            grace_s = next(role.grace_s for role in self.roles if role.name == name)
            self._record_exit(name, await asyncio.to_thread(child.end, min(grace_s, at_most_s)))

    async def end(self, at_most_s: float = GRACE_S) -> None:
        """End all roles, those first that depend on others; each gets its grace, but `at_most_s`."""
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
        return child.exit_code if child else None

    async def _watch(self, role: Role, child: Child) -> None:
        """Report readiness, then the exit; or the exit alone."""
        exited = asyncio.wrap_future(child.exit)
        probe = asyncio.create_task(asyncio.wait_for(_until(role.ready), role.ready_within_s))
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

    def _record_exit(self, name: RoleName, code: int) -> None:
        if self.writer.state.processes.get(name, {}).get("exit") is None:
            self.writer.process(name, exit=code, state=f"exited ({code})")
            self.writer.event("process_exit", role=name, code=code)


async def _until(probe: Probe) -> None:
    """Return once the probe says yes. The caller sets the deadline."""
    pause_s = 0.05
    while not await probe():
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.4, 0.5)


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine's process ended though its service had not ended it."""

    code: int | None  # its exit code, negative for a signal; None: its service did not say


@dataclass(frozen=True, slots=True)
class EngineBack:
    """The service has started another engine."""

    engine: Mapping[str, Any]  # its entry for run.json


def engine_of(service_folder: Path) -> dict[str, Any] | None:
    """The engine's entry for run.json, from its service's service.json; None where that says nothing."""
    try:
        pid = int(_read(service_folder / "service.json")["engine_pid"])
    except (KeyError, TypeError, ValueError):
        return None
    try:
        group = os.getpgid(pid)
    except ProcessLookupError:
        group = None
    return {**identity(pid), "pgid": group, "port": None, "exit": None, "state": "running"}


async def engines(run: RunDirectory, engine: Mapping[str, Any]) -> AsyncIterator[EngineGone | EngineBack]:
    """Every end of an engine, and the next one that its service starts once that is ready; without end."""
    folder = run.path / "service"
    while True:
        await _gone(engine)
        code = None
        with suppress(TimeoutError):
            async with asyncio.timeout(TOLD_WITHIN_S):
                code = await engine_exit_code(folder, engine["pid"])
        yield EngineGone(code)
        pid = engine["pid"]
        while (another := engine_of(folder)) is None or another["pid"] == pid:  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(LOOK_EVERY_S)
        engine = another
        yield EngineBack(engine)


async def engine_exit_code(service_folder: Path, pid: int) -> int | None:
    """Of an engine that has ended, negative for a signal; returns once its service, its parent, has written it."""
    file = service_folder / "engine_exit.json"
    while (end := _read(file)).get("pid") != pid:  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(LOOK_EVERY_S)
    code = end.get("code")
    return code if isinstance(code, int) else None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(file))
    except (OSError, *NOT_JSON):
        return {}
    return found if isinstance(found, dict) else {}


async def _gone(who: Mapping[str, Any]) -> None:
    """Return once this process, which is no child of ours, has ended."""
    while alive(who):  # noqa: ASYNC110 - nobody tells us of its end
        await asyncio.sleep(LOOK_EVERY_S)


class Forwarding:
    """The process that forwards metrics (`halteres.observe.sinks`), where there is a sink: no run depends on it.

    How a single sink is the process says itself; that it could not be started, or died, is said here.
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
        command, log, keys = (*SINKS, str(self._run.path)), self._run.log("sinks"), ("WANDB_API_KEY",)
        try:
            self._child = spawn(command, log=log, folder=self._run.path, lifeline=self._lifeline, keys=keys)
        except OSError as error:
            self._failed(f"The process that forwards metrics could not be started: {error.strerror or error}.")
        else:
            self._watch = asyncio.create_task(self._until_exit(self._child), name="sinks")

    async def end(self) -> None:
        """Let it finish, for a while."""
        child, watch = self._child, self._watch
        if child is None or watch is None:
            return
        with suppress(TimeoutError):
            # A run that ended early gives its sinks time: a process that is still importing dies of the signal.
            async with asyncio.timeout(SINKS_OPEN_WITHIN_S):
                while child.exit_code is None and any(  # noqa: ASYNC110 - a file tells nobody
                    report.state == "starting" for report in read_reports(self._run.path).values()
                ):
                    await asyncio.sleep(0.1)
        await asyncio.to_thread(child.end, SINKS_END_WITHIN_S)
        await watch

    async def _until_exit(self, child: Child) -> None:
        if code := await asyncio.wrap_future(child.exit):
            how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
            self._failed(f"The process that forwards metrics {how}. Its log is {self._run.log('sinks')}.")

    def _failed(self, why: str) -> None:
        for name, report in read_reports(self._run.path).items():
            if name in self._sinks and report.state != "failed" and not report.is_complete:
                Reports(self._run.path).failed(name, why)
