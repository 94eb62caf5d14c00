"""Groups: the sessions of one task, posted to the trajectory server once.

    gathering ──▶ pending ──▶ posted      two rollouts or more were scored
        └───────────────────▶ dropped     fewer were, or the server refuses the group

What is pending is in the table, and its body is made of nodes that are in the journal: after
a restart the same body is posted under the same key, `gateway:GROUP`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from halteres.clients.retries import Retries
from halteres.clients.trajectories import (
    EnvironmentClient,
    KeyReused,
    UnknownEnvironment,
)
from halteres.errors import InvalidData, NotReady
from halteres.process import steady_time
from halteres.service.durable.journal import GATEWAY_GROUPS, Journal
from halteres.service.gateway.branches import Branches, BranchTurn
from halteres.service.gateway.sessions import GatewaySession, Verdict
from halteres.service.keys import Tenant

GroupState = Literal["gathering", "pending", "posted", "dropped"]

LEAST_ROLLOUTS = 2
"""Of a group: one alone has nothing to be compared with."""

ENVIRONMENT = "gateway"
"""The environment's name at the trajectory server."""

REGISTERED_WITHIN_S = 60.0

SEND = Retries.for_seconds(30.0)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class SessionGroup:
    """The sessions of one task."""

    name: str
    tenant: Tenant
    run: str | None
    size: int  # sessions
    deadline_at: float | None = None  # unix s; None: as long as one of its sessions may be open
    created_at: float = field(default_factory=steady_time)  # unix s
    state: GroupState = "gathering"
    why: str = ""  # of a group that was dropped, or that the server set aside

    def is_due(self, sessions: Sequence[GatewaySession], now: float) -> bool:
        """Whether nothing more is waited for."""
        deadline_at = self.deadline_at
        if deadline_at is None:
            deadline_at = max(session.expires_at for session in sessions)
        if now >= deadline_at:
            return True
        return len(sessions) >= self.size and all(one.state != "open" for one in sessions)


class Groups:
    """The groups of one state directory that are not forgotten."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[str, SessionGroup] = {}

    async def load(self) -> None:
        """Read those that the journal has."""
        for row in await self._journal.rows(GATEWAY_GROUPS):
            self._known[row["name"]] = SessionGroup(**row)

    def in_state(self, state: GroupState) -> list[SessionGroup]:
        """Oldest first."""
        return [group for group in self._known.values() if group.state == state]

    def get(self, name: str) -> SessionGroup | None:
        """The group of this name."""
        return self._known.get(name)

    async def add(self, group: SessionGroup) -> None:
        """A new group; it is in the table when this returns."""
        await self._journal.put(GATEWAY_GROUPS, group)
        self._known.setdefault(group.name, group)

    async def move(self, group: SessionGroup, state: GroupState, why: str = "") -> None:
        """Write down what became of a group."""
        before = (group.state, group.why)
        group.state, group.why = state, why
        try:
            await self._journal.put(GATEWAY_GROUPS, group)
        except BaseException:
            group.state, group.why = before
            raise

    async def forget(self, group: SessionGroup) -> None:
        """Delete a group, whose sessions are gone."""
        await self._journal.change(
            GATEWAY_GROUPS.delete().where(GATEWAY_GROUPS.c.name == group.name)
        )
        self._known.pop(group.name, None)


# A group as the trajectory server takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """One session that has a reward."""

    branches: Branches
    verdict: Verdict


def turn_rewards(branches: Branches, verdict: Verdict) -> list[tuple[BranchTurn, float]]:
    """The turns in order of time, each with its own reward; what a score has beyond those is paid
    with the last turn by the trainer.
    """
    rewards = verdict.turn_rewards or [0.0] * len(branches.turns)
    return list(zip(branches.turns, rewards, strict=True))


def body_of(rollouts: Sequence[ScoredRollout]) -> dict[str, Any]:
    """The body of POST /scored_data without `env_id`: S sequences of all rollouts. `episodes` and
    `spans` are there where a rollout has several sequences or turns.
    """
    tokens: list[list[int]] = []
    body: dict[str, Any] = {
        "tokens": tokens,
        "masks": [],
        "scores": [],
        "inference_logprobs": [],
        "policy_version": [],
    }
    episodes: list[int] = []
    spans: list[tuple[int, int, int, float]] = []
    for number, rollout in enumerate(rollouts):
        first = len(tokens)
        for place, branch in enumerate(rollout.branches.branches):
            own = [one.node for one in rollout.branches.turns if one.sequence == place]
            tokens.append(branch.tokens)
            body["masks"].append(branch.masks)
            body["scores"].append(rollout.verdict.reward)
            body["inference_logprobs"].append(branch.logprobs)
            body["policy_version"].append(
                [min(node.version_min for node in own), max(node.version_max for node in own)]
            )
            episodes.append(number)
        for turn, reward in turn_rewards(rollout.branches, rollout.verdict):
            spans.append((first + turn.sequence, turn.start, turn.stop, reward))
    if len(spans) > len(rollouts):
        body |= {"episodes": episodes, "spans": spans}
    return body


# Posting


class GroupPoster:
    """Posts groups to one trajectory server, where it is an environment of its own."""

    def __init__(self, url: str, context_length: Callable[[], int | None]) -> None:
        self._client = EnvironmentClient(url, SEND)
        self._context_length = context_length
        self._env_id: int | None = None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def post(self, group: str, body: Mapping[str, Any]) -> str:
        """Deliver one group; returns why the server set it aside, or nothing.

        Raises:
            InvalidData: the server refuses the group.
            NotReady: the server is away, or waits for its trainer.
        """
        key = f"gateway:{group}"
        for _ in range(2):
            env_id = await self._registered()
            try:
                posted = await self._client.post({**body, "env_id": env_id}, key=key)
            except KeyReused:
                # An earlier life of the service has posted it, as another environment.
                return ""
            except UnknownEnvironment:
                self._env_id = None
                continue
            return posted.set_aside or ""
        raise NotReady("The trajectory server forgot this environment again and again.")

    async def _registered(self) -> int:
        if self._env_id is None:
            context = self._context_length()
            if context is None:
                raise NotReady("The engine is starting.")
            # A group smaller than this would wait there for more of it.
            registered = await self._client.register_env(
                name=ENVIRONMENT,
                group_size=LEAST_ROLLOUTS,
                max_token_length=context,
                deadline_s=REGISTERED_WITHIN_S,
            )
            self._env_id = registered.env_id
        return self._env_id


def checked_reward(value: float, name: str) -> float:
    """A reward that is a number. InvalidData: it is NaN or infinite."""
    if math.isfinite(value):
        return value
    raise InvalidData(f"`{name}` is {value}.", "A reward is a finite number.", param=name)
