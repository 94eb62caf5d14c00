"""Gateway sessions: one episode of one program each, its key, its reward, and how it ends.

    open ──▶ scored    a reward was posted
        ├──▶ failed    an error was posted, or nothing was sampled that could be trained on
        └──▶ expired   its time is over

The session's id names it in a path, its key does where a program's paths are fixed; both are
secrets of 128 bits or more, of which the table keeps the id and a hash of the key.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from halteres.errors import Conflict, NotFound
from halteres.process import steady_time
from halteres.service.durable.journal import GATEWAY_SESSIONS, Journal
from halteres.service.keys import KeyOfSession, KeyRefused, Tenant, hash_of
from halteres.service.limits import Allowances

KEY_PREFIX = "hs-"

SessionState = Literal["open", "scored", "failed", "expired"]

_IN_PATH = re.compile(r"/g/([^/]*)(/|$)")
_OF_RUN = re.compile(r"/runs/([^/]+)/")


class SessionOver(Conflict):
    """A gateway session that has ended."""

    code, status = "session_over", 410


class SessionSampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a session samples, whatever its program asks for."""

    temperature: float = 1.0
    max_tokens: int | None = None  # of one answer at most; None: as the program asks
    seed: int | None = None  # of the first call, the others follow from it; None: each is drawn


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What a session was opened with."""

    run: str | None = None  # None: the base model
    # named weights, which answer in place of the run's policy (a tinker:// path, say)
    model: str | None = None
    task: Any = None  # JSON
    group: str | None = None
    group_size: int | None = None
    pin_policy: int | None = None  # the policy version of all its calls; None: the newest each time
    sampling: SessionSampling = SessionSampling()
    keep_reasoning: bool = False
    train_shaped: bool = False  # train on what was sampled under penalties or a grammar, too
    metadata: dict[str, Any] = {}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode was worth, or why it has no reward."""

    reward: float | None = None
    rewards: dict[str, float] = {}  # by name; the reward is their sum
    turn_rewards: list[float] | None = None  # of its turns, in order of time
    code: str | None = None  # of a failed rollout
    why: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class GatewaySession:
    """One episode."""

    id: str
    tenant: Tenant
    key_sha256: str
    opening: Opening
    base_name: str  # of the base model
    created_at: float  # unix s
    expires_at: float  # unix s
    state: SessionState = "open"
    verdict: Verdict | None = None
    finished_at: float | None = None  # unix s
    is_closing: bool = False  # its last reward is being written down
    # the service was started again while it was open: a call may have found none
    was_interrupted: bool = False

    @property
    def group(self) -> str | None:
        """The group that it is a rollout of."""
        return self.opening.group

    @property
    def policy_name(self) -> str:
        """The run that it samples from, or the base model; that, too, where weights by name answer
        in the run's place: it may have none.
        """
        if self.opening.model is not None:
            return self.base_name
        return self.opening.run or self.base_name

    def is_open(self, now: float) -> bool:
        """Whether it takes calls and a reward."""
        return self.state == "open" and now < self.expires_at and not self.is_closing

    def check_open(self, now: float) -> None:
        """Raise SessionOver where it is not."""
        if self.is_open(now):
            return
        what, next_step = "This gateway session is over.", "Open another one."
        raise SessionOver(what, self.end, next_step)

    @property
    def end(self) -> str:
        """How it ended, as a sentence."""
        if self.is_closing:
            return "A reward of it is being written down."
        if self.state == "scored":
            return "Its reward was posted."
        if self.state == "failed" and self.verdict is not None:
            return f"It failed ({self.verdict.code}): {self.verdict.why}"
        within_s = self.expires_at - self.created_at
        return f"Its time was over after {within_s:g} s, without a last reward."


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that was just opened; the text of its key is nowhere else."""

    session: GatewaySession
    key: str = field(repr=False)


class GatewaySessions:
    """All sessions of one state directory that are not forgotten."""

    def __init__(self, journal: Journal, allowances: Allowances, base_name: str) -> None:
        self._journal, self._allowances, self._base_name = journal, allowances, base_name
        self._known: dict[str, GatewaySession] = {}
        self._by_key: dict[str, GatewaySession] = {}

    async def load(self) -> None:
        """Read those that the journal has."""
        for row in await self._journal.rows(GATEWAY_SESSIONS):
            verdict = row["verdict"]
            self._enter(
                GatewaySession(
                    id=row["id"],
                    tenant=row["tenant"],
                    key_sha256=row["key_sha256"],
                    opening=msgspec.convert(row["opening"], Opening),
                    base_name=self._base_name,
                    created_at=row["created_at"],
                    expires_at=row["expires_at"],
                    state=row["state"],
                    verdict=None if verdict is None else msgspec.convert(verdict, Verdict),
                    finished_at=row["finished_at"],
                    was_interrupted=row["state"] == "open",
                )
            )

    def all(self) -> list[GatewaySession]:
        """Oldest first."""
        return list(self._known.values())

    def of_group(self, group: str) -> list[GatewaySession]:
        """The sessions of a group, oldest first."""
        return [one for one in self._known.values() if one.group == group]

    def find(self, session: str, tenant: Tenant) -> GatewaySession:
        """A tenant's session of this id."""
        found = self._known.get(session)
        if found is None or found.tenant != tenant:
            raise NotFound(
                "There is no such gateway session here.",
                "It was never opened, or ended long ago.",
                "POST /gateway/sessions opens one.",
            )
        return found

    def check_room(self, tenant: Tenant, now: float) -> None:
        """Raise LimitReached where a tenant has as many open sessions as it may have."""
        alive = sum(one.tenant == tenant and one.is_open(now) for one in self._known.values())
        self._allowances.of(tenant).check_alive("gateway_sessions", alive)

    async def open(self, tenant: Tenant, opening: Opening, ttl_s: float) -> Opened:
        """Open a session; it is in the table when this returns."""
        now, key = steady_time(), f"{KEY_PREFIX}{secrets.token_urlsafe(32)}"
        session = GatewaySession(
            id=f"s-{secrets.token_hex(16)}",
            tenant=tenant,
            key_sha256=hash_of(key),
            opening=opening,
            base_name=self._base_name,
            created_at=now,
            expires_at=now + ttl_s,
        )
        await self._write(session)
        self._enter(session)
        return Opened(session, key)

    async def judge(self, session: GatewaySession, verdict: Verdict, state: SessionState) -> None:
        """Write down what a session is worth so far, or in the end."""
        finished_at = None
        if state != "open":
            finished_at = steady_time()
        before = (session.state, session.verdict, session.finished_at)
        session.state, session.verdict, session.finished_at = state, verdict, finished_at
        try:
            await self._write(session)
        except BaseException:
            session.state, session.verdict, session.finished_at = before
            raise

    async def expire(self, session: GatewaySession) -> None:
        """End a session whose time is over. A reward that was not its last does not count."""
        why = "No reward came before its time was over."
        if session.verdict is not None:
            why = "Its reward was not posted with `done` before its time was over."
        await self.judge(session, Verdict(code="session_expired", why=why), "expired")

    async def forget(self, session: GatewaySession) -> None:
        """Delete a session; the journal then forgets its calls."""
        await self._journal.change(
            GATEWAY_SESSIONS.delete().where(GATEWAY_SESSIONS.c.id == session.id)
        )
        self._known.pop(session.id, None)
        self._by_key.pop(session.key_sha256, None)

    async def _write(self, session: GatewaySession) -> None:
        verdict = session.verdict
        await self._journal.put(
            GATEWAY_SESSIONS,
            session,
            opening=msgspec.to_builtins(session.opening),
            verdict=None if verdict is None else msgspec.to_builtins(verdict),
        )

    def _enter(self, session: GatewaySession) -> None:
        self._known[session.id] = self._by_key[session.key_sha256] = session

    # Who may come in

    def admitted(self, path: str, key: str | None) -> GatewaySession | None:
        """The session that a request for this path, with this key, belongs to; None where it
        belongs to none: it is then asked for a key as any other.

        Raises:
            KeyRefused: the key looks like a session's, and is none.
            KeyOfSession: the key is a session's, and opens nothing here.
        """
        of_key = None
        is_session_key = key is not None and key.startswith(KEY_PREFIX)
        if key is not None and is_session_key:
            of_key = self._by_key.get(hash_of(key))
        in_path = _IN_PATH.match(path)
        if in_path is not None:
            session = self._known.get(in_path[1])
            if session is None:
                return None
            if of_key is not None and of_key is not session:
                raise KeyOfSession(
                    "This key is another gateway session's.", next="Send this session's own."
                )
            return session
        if not is_session_key:
            return None
        if of_key is None:
            raise KeyRefused(
                "The key of this request is of no gateway session that is known here.",
                next="POST /gateway/sessions opens one.",
            )
        of_run = _OF_RUN.match(path)
        if of_run is not None and of_run[1] == of_key.opening.run:
            return of_key
        raise KeyOfSession(
            "A gateway session's key opens nothing but its session.",
            f"That is /g/SESSION/…{_or_run(of_key.opening)}.",
            "Use the base URL that the session was opened with.",
        )


def _or_run(opening: Opening) -> str:
    return "" if opening.run is None else f" and /runs/{opening.run}/…"


def named_rewards(rewards: Mapping[str, float]) -> float:
    """What the parts of a reward come to."""
    return sum(rewards.values())
