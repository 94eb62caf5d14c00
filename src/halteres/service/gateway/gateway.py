"""The gateway of one service: sessions, their calls, and the groups that they make.

A session that gets no last reward ends at its time; one that is over can be read for a day.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from halteres.errors import (
    Conflict,
    HalteresError,
    InvalidData,
    NotReady,
    ServerError,
    boundary,
)
from halteres.process import steady_time
from halteres.service.gateway.branches import Branches, branches_of
from halteres.service.gateway.capture import SessionCapture
from halteres.service.gateway.groups import (
    LEAST_ROLLOUTS,
    GroupPoster,
    Groups,
    ScoredRollout,
    SessionGroup,
    body_of,
)
from halteres.service.gateway.sessions import (
    GatewaySession,
    GatewaySessions,
    Opened,
    Opening,
    SessionOver,
    SessionState,
    Verdict,
)
from halteres.service.inference.requests import Capture
from halteres.service.keys import Tenant
from halteres.service.limits import LONG
from halteres.service.service import Service

KEEP_S, FULL_KEEP_S = 24 * 3600.0, 600.0
"""How long a session that is over can be read; and how long where the journal is too large."""

FORGET_S = 30.0
"""Between two looks at what is old."""

TICK_S = 1.0
"""Between two looks at what is over."""

POST_AGAIN_S = 5.0
"""Between two attempts to post what is pending."""

MOST_CAPTURES = 256
"""Sessions whose calls are in memory beside those that are open."""

NOTHING_SAMPLED = "nothing_sampled"
"""The code of a session that ended with a reward, and without a turn that could be trained on."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdmittedSession:
    """A session that a request belongs to (`inference.requests.CapturedSession`)."""

    gateway: Gateway
    session: GatewaySession

    @property
    def tenant(self) -> Tenant:
        """Whose it is."""
        return self.session.tenant

    @property
    def run(self) -> str | None:
        """The run that it samples from; None: the base model."""
        return self.session.opening.run

    @property
    def policy_name(self) -> str:
        """The run that it samples from, or the base model."""
        return self.session.policy_name

    async def call(self, path: str, headers: Mapping[str, str], body: bytes) -> Capture:
        """A call that comes now."""
        capture = await self.gateway.capture_of(self.session)
        return await capture.call(path, headers, body)


class Gateway:
    """All sessions of one service."""

    def __init__(self, service: Service) -> None:
        self._journal, self._tokenizer = service.journal, service.tokenizer
        self._threads, self._fleet = service.threads, service.fleet
        self._allowances = service.options.limits
        self._trajectory_server = service.options.trajectory_server
        self.sessions = GatewaySessions(service.journal, service.options.limits, service.base.name)
        self.groups = Groups(service.journal)
        self._captures: dict[str, SessionCapture] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        # What is decided of sessions and groups is decided one after another.
        self._deciding = asyncio.Lock()
        self._pending = asyncio.Event()
        self._journal_bytes = service.options.journal_bytes
        self._looked_at = 0.0  # unix s: for what is old

    async def load(self) -> None:
        """Read what the journal has of sessions and groups."""
        await self.sessions.load()
        await self.groups.load()
        if self.groups.in_state("pending"):
            self._pending.set()

    def admitted(self, path: str, key: str | None) -> AdmittedSession | None:
        """As `GatewaySessions.admitted`."""
        session = self.sessions.admitted(path, key)
        if session is None:
            return None
        return AdmittedSession(self, session)

    async def capture_of(self, session: GatewaySession) -> SessionCapture:
        """The calls of a session, read from the journal where they are not in memory."""
        async with self._loading.setdefault(session.id, asyncio.Lock()):
            capture = self._captures.get(session.id)
            if capture is None:
                limits = self._allowances.of(session.tenant)
                capture = SessionCapture(session, self._journal, self._tokenizer, limits)
                await capture.load()
                self._captures[session.id] = capture
        return capture

    async def in_thread(self, tenant: Tenant, size: int, make: Callable[[], T]) -> T:
        """What takes long to make, when it is the tenant's turn."""
        return await self._threads.run(tenant, size, make)

    async def branches_of(self, session: GatewaySession) -> Branches:
        """What is trained on of a session, as far as it has come."""
        capture = await self.capture_of(session)
        size = LONG * (len(capture.history.nodes) > 1)
        return await self._threads.run(session.tenant, size, lambda: branches_of(capture.history))

    # What a program's owner asks

    async def open(
        self, tenant: Tenant, opening: Opening, ttl_s: float, group_deadline_s: float | None
    ) -> Opened:
        """Open a session, and its group with the first one.

        Raises:
            Conflict: the group is over, has all its sessions, or another size, run or owner.
            InvalidData: a group without a size, or where no trajectory server is known.
            LimitReached: the tenant has as many open sessions as it may have.
        """
        async with self._deciding:
            self.sessions.check_room(tenant, steady_time())
            if opening.group is not None:
                await self._join(opening.group, tenant, opening, group_deadline_s)
            opened = await self.sessions.open(tenant, opening, ttl_s)
        limits = self._allowances.of(tenant)
        self._captures[opened.session.id] = SessionCapture(
            opened.session, self._journal, self._tokenizer, limits
        )
        return opened

    async def _join(
        self, name: str, tenant: Tenant, opening: Opening, group_deadline_s: float | None
    ) -> None:
        if self._trajectory_server is None:
            raise InvalidData(
                "`group` is of no use here.",
                "This service knows no trajectory server that a group could be posted to.",
                "Start it with --trajectory-server URL; or leave `group` out, and read "
                "/gateway/sessions/SESSION/sequences.",
                param="group",
            )
        size = opening.group_size
        if size is None:
            raise InvalidData("A session with a `group` needs a `group_size`.", param="group_size")
        group = self.groups.get(name)
        if group is None:
            deadline_at = None
            if group_deadline_s is not None:
                deadline_at = steady_time() + group_deadline_s
            group = SessionGroup(
                name=name, tenant=tenant, run=opening.run, size=size, deadline_at=deadline_at
            )
            await self.groups.add(group)
            return
        if (group.tenant, group.run, group.size) != (tenant, opening.run, size):
            raise Conflict(
                f"The group '{name}' is another one.",
                "Its sessions were opened with another run or group_size, or by another tenant.",
                "Give every task's group a name of its own.",
            )
        if group.state != "gathering":
            raise Conflict(f"The group '{name}' is over.", "It was posted, or dropped.")
        if len(self.sessions.of_group(name)) >= group.size:
            raise Conflict(f"The group '{name}' has its {group.size} sessions already.")

    async def judge(self, session: GatewaySession, verdict: Verdict, *, done: bool) -> None:
        """Take a session's reward, or its error; `done`: nothing follows.

        Raises:
            SessionOver: it has another one already, or its time was over.
            InvalidData: there are not as many rewards of turns as turns.
        """
        if session.state != "open" and _posted(session.verdict) == verdict:
            return
        if not session.is_open(steady_time()):
            raise _too_late(session)
        if verdict.code is None and not done:
            await self._write_down(session, verdict, "open")
            return
        session.is_closing = True
        try:
            await (await self.capture_of(session)).settled()
            state: SessionState = "failed"
            if verdict.code is None:
                state, verdict = await self._last_reward(session, verdict)
            await self._write_down(session, verdict, state)
        finally:
            session.is_closing = False
        if session.group is not None:
            async with self._deciding:
                await self._close_if_due(session.group, steady_time())

    async def _write_down(
        self, session: GatewaySession, verdict: Verdict, state: SessionState
    ) -> None:
        async with self._deciding:
            if session.state != "open":
                raise _too_late(session)
            await self.sessions.judge(session, verdict, state)

    async def _last_reward(
        self, session: GatewaySession, verdict: Verdict
    ) -> tuple[SessionState, Verdict]:
        branches = await self.branches_of(session)
        given = verdict.turn_rewards
        if given is not None and len(given) != len(branches.turns):
            raise InvalidData(
                f"`turn_rewards` has {len(given)} rewards.",
                f"The session has {len(branches.turns)} turns that are trained on.",
                "GET /gateway/sessions/SESSION/sequences lists them.",
                param="turn_rewards",
            )
        if not branches.turns:
            return "failed", _nothing_trained(verdict, branches)
        return "scored", verdict

    # What time asks

    async def tick_for_ever(self) -> None:
        """End what is over, again and again, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                with boundary(ServerError, "The gateway's clock"):
                    await self.tick(steady_time())
            except HalteresError as error:
                log.warning("What is over in the gateway could not be ended: %s", error)

    async def tick(self, now: float) -> None:
        """End the sessions whose time is over, close the groups that wait for nothing more, forget
        what is old.
        """
        async with self._deciding:
            await self._end_what_is_over(now)
            await self._forget(now)

    async def _end_what_is_over(self, now: float) -> None:
        for session in self.sessions.all():
            is_over = now >= session.expires_at and not session.is_closing
            if session.state == "open" and is_over:
                await self.sessions.expire(session)
        for group in self.groups.in_state("gathering"):
            await self._close_if_due(group.name, now)

    async def _close_if_due(self, name: str, now: float) -> None:
        group, sessions = self.groups.get(name), self.sessions.of_group(name)
        if group is None or group.state != "gathering":
            return
        if not sessions:
            # Its first session could not be written.
            await self.groups.forget(group)
            return
        if not group.is_due(sessions, now) or any(one.is_closing for one in sessions):
            return
        for session in sessions:
            if session.state == "open":
                await self.sessions.expire(session)
        num_scored = sum(session.state == "scored" for session in sessions)
        if num_scored >= LEAST_ROLLOUTS:
            await self.groups.move(group, "pending")
            self._pending.set()
            return
        why = f"{num_scored} of {group.size} sessions were scored; {LEAST_ROLLOUTS} are needed."
        log.warning("The group '%s' of the gateway is dropped: %s", name, why)
        await self.groups.move(group, "dropped", why)

    async def _forget(self, now: float) -> None:
        if now < self._looked_at + FORGET_S:
            return
        self._looked_at, keep_s = now, KEEP_S
        if await self._journal.used_bytes() > self._journal_bytes:
            keep_s = FULL_KEEP_S
        for session in self.sessions.all():
            group = None if session.group is None else self.groups.get(session.group)
            is_waiting = group is not None and group.state in ("gathering", "pending")
            if session.finished_at is None or session.finished_at > now - keep_s or is_waiting:
                continue
            await self.sessions.forget(session)
            self._captures.pop(session.id, None)
            self._loading.pop(session.id, None)
            if group is not None and not self.sessions.of_group(group.name):
                await self.groups.forget(group)
        over = [one for one in self._captures.values() if one.session.state != "open"]
        for capture in over[: max(0, len(over) - MOST_CAPTURES)]:
            del self._captures[capture.session.id]

    async def post_for_ever(self) -> None:
        """Post groups as they become pending, until cancelled."""
        if self._trajectory_server is None:
            return
        poster = GroupPoster(self._trajectory_server, lambda: self._fleet.known_context)
        try:
            while True:
                await self._pending.wait()
                self._pending.clear()
                if not await self._post_pending(poster):
                    await asyncio.sleep(POST_AGAIN_S)
                    self._pending.set()
        finally:
            await poster.close()

    async def _post_pending(self, poster: GroupPoster) -> bool:
        """Post what is pending, oldest first; False where some of it has to wait."""
        is_all_posted = True
        for group in self.groups.in_state("pending"):
            try:
                with boundary(ServerError, "Posting a group"):
                    rollouts = await self._rollouts_of(group)
                    set_aside = await poster.post(group.name, body_of(rollouts))
                await self.groups.move(group, "posted", set_aside)
            except InvalidData as error:
                log.error("The group '%s' of the gateway is refused: %s", group.name, error)
                await self.groups.move(group, "dropped", error.sentence)
            except NotReady as error:
                log.warning("The group '%s' of the gateway waits: %s", group.name, error)
                return False
            except HalteresError as error:
                log.error("The group '%s' of the gateway waits: %s", group.name, error)
                is_all_posted = False
            else:
                if set_aside:
                    log.warning("The group '%s' was set aside: %s", group.name, set_aside)
        return is_all_posted

    async def _rollouts_of(self, group: SessionGroup) -> list[ScoredRollout]:
        rollouts = list[ScoredRollout]()
        for session in self.sessions.of_group(group.name):
            if session.state == "scored" and session.verdict is not None:
                branches = await self.branches_of(session)
                rollouts.append(ScoredRollout(branches=branches, verdict=session.verdict))
        return rollouts

    # What there is to read

    async def facts_of(self, session: GatewaySession) -> dict[str, Any]:
        """A session's own figures, without its nodes."""
        facts: dict[str, Any] = {
            "session": session.id,
            "state": session.state,
            "run": session.opening.run,
            "task": session.opening.task,
            "metadata": session.opening.metadata,
            "expires": session.expires_at,
            "interrupted": session.was_interrupted,
        }
        group = None if session.group is None else self.groups.get(session.group)
        if group is not None:
            facts["group"] = {
                "name": group.name,
                "size": group.size,
                "sessions": len(self.sessions.of_group(group.name)),
                "state": group.state,
                "why": group.why,
            }
        verdict = session.verdict
        if verdict is not None and verdict.code is None:
            facts |= {"reward": verdict.reward, "rewards": verdict.rewards}
        if verdict is not None and verdict.code is not None:
            facts |= {"reward": None, "rewards": {}}
            facts["failure"] = {"code": verdict.code, "why": verdict.why}
        return facts


def _too_late(session: GatewaySession) -> SessionOver:
    next_step = "Open another session for the task."
    return SessionOver("The reward came too late.", session.end, next_step)


def _posted(verdict: Verdict | None) -> Verdict | None:
    """What was posted, of a verdict that the session's end has changed."""
    if verdict is None or verdict.code != NOTHING_SAMPLED or verdict.reward is None:
        return verdict
    return msgspec.structs.replace(verdict, code=None, why="")


def _nothing_trained(posted: Verdict, branches: Branches) -> Verdict:
    """The end of a session without a turn to train on, by what its calls were. It keeps the reward
    that was posted, by which a repeated post is known again.
    """
    why = "Nothing was sampled in it that could be trained on."
    if branches.untrained:
        why += f" Its calls were: {', '.join(sorted(set(branches.untrained.values())))}."
    if "shaped" in branches.untrained.values():
        why += " Open it with train_shaped to train on what penalties and forms shaped."
    return msgspec.structs.replace(posted, code=NOTHING_SAMPLED, why=why)


@asynccontextmanager
async def gateway_over(service: Service) -> AsyncIterator[Gateway]:
    """The gateway of an open service, with its clock, while the block runs."""
    gateway = Gateway(service)
    await gateway.load()
    async with asyncio.TaskGroup() as tasks:
        timed = [
            tasks.create_task(gateway.tick_for_ever(), name="gateway's clock"),
            tasks.create_task(gateway.post_for_ever(), name="gateway's groups"),
        ]
        try:
            yield gateway
        finally:
            for task in timed:
                task.cancel()
