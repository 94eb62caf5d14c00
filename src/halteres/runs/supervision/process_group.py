"""The processes of one run, together: each is started when what it needs is ready, and ended with all that it started.

What an exit means is decided elsewhere (`controller`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halteres.process import Lifeline
from halteres.runs.identity import alive
from halteres.runs.supervision.children import GRACE_S, Child, spawn
from halteres.runs.supervision.engine_watch import gone
from halteres.runs.supervision.roles import STOP_ORDER, Role, RoleName, until_ready
from halteres.runs.supervision.state_writer import StateWriter


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


Report = Exited | Ready | TooSlow


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

    async def start(self) -> None:
        """Start every role."""
        for role in self.roles:
            await self.start_role(role)

    async def start_role(self, role: Role) -> None:
        """Start one role; its readiness and its exit will be reported."""
        self.ready.discard(role.name)
        child = await spawn(
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
        facts = {**child.who, "pgid": child.pid, "port": port, "exit": None, "state": "running"}
        self.writer.process(role.name, **facts)
        self._watches[role.name] = asyncio.create_task(self._watch(role, child), name=f"watch {role.name}")

    async def restart(self, role: Role) -> bool:
        """Start a dead role again, if it may be; False when its restarts are used up."""
        used = self._restarts.get(role.name, 0)
        if used >= role.restarts:
            return False
        self._restarts[role.name] = used + 1
        self.writer.event("restart", role=role.name, attempt=used + 1, of=role.restarts)
        await self.start_role(role)
        return True

    async def end_role(self, name: RoleName, at_most_s: float = GRACE_S) -> None:
        """End one role: asked first, killed after its grace. Its exit is recorded and not reported."""
        if watch := self._watches.pop(name, None):
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if child := self._children.get(name):
            grace_s = next(role.grace_s for role in self.roles if role.name == name)
            self._record_exit(name, await child.end(min(grace_s, at_most_s)))

    async def end(self, at_most_s: float = GRACE_S) -> None:
        """End all roles, those first that depend on others; each gets its grace, but `at_most_s`."""
        for name in STOP_ORDER:
            await self.end_role(name, at_most_s)
        await self._end_engine()

    def exit_code(self, name: RoleName) -> int | None:
        """How a role ended; None while it runs, or if it was never started."""
        child = self._children.get(name)
        return child.exit_code if child else None

    async def _watch(self, role: Role, child: Child) -> None:
        """Report readiness, then the exit; whichever comes first."""
        probe = asyncio.create_task(asyncio.wait_for(until_ready(role.ready), role.ready_within_s))
        try:
            await asyncio.wait((probe, child.exited), return_when=asyncio.FIRST_COMPLETED)
            if not child.exited.done():
                in_time = probe.exception() is None
                if in_time:
                    self.ready.add(role.name)
                await self.reports.put(Ready(role) if in_time else TooSlow(role))
            code = await asyncio.shield(child.exited)
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        self._record_exit(role.name, code)
        await self.reports.put(Exited(role, code, role.name in self.ready))

    def _record_exit(self, name: RoleName, code: int) -> None:
        if self.writer.state.processes.get(name, {}).get("exit") is None:
            self.writer.process(name, exit=code, state=f"exited ({code})")
            self.writer.event("process_exit", role=name, code=code)

    async def _end_engine(self) -> None:
        """The engine is the service's child; should it have outlived it, end it too."""
        engine = self.writer.state.processes.get("engine")
        if engine and engine.get("exit") is None:
            await end_process(engine, GRACE_S)
            self.writer.process("engine", exit=0, state="exited with its service")


async def end_process(who: Mapping[str, Any], grace_s: float) -> None:
    """End a process that is not our child: wait for it, then SIGKILL. Its identity guards against a reused pid."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(gone(who), grace_s)
    if alive(who):
        os.kill(who["pid"], signal.SIGKILL)
