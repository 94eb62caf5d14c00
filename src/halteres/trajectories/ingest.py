"""Posted groups: where each one goes (queue, buffer, set aside with a reason), and which came before.

Nothing that fits the schema is refused, but in strict mode: what cannot train anybody is kept apart, and said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from halteres.errors import Conflict
from halteres.trajectories.environments import Environment
from halteres.trajectories.group_checks import Problem, exceeds_batch, stale
from halteres.trajectories.posted_group import Scored
from halteres.trajectories.records import GroupArrived, GroupRecord, Place
from halteres.trajectories.schema import Unprocessable
from halteres.trajectories.state import State


def reject_reason(state: State, scored: Scored) -> Problem | None:
    """What keeps a group that is posted now out of every batch."""
    run, bound, version = state.run, state.max_staleness, state.run.known_version
    if run.registration and scored.size > run.batch_size:
        return exceeds_batch(scored.size, run.batch_size)
    if scored.versions is None:
        return _untagged() if state.rules.require_version else None
    if bound is None or version is None or version - scored.versions[0] <= bound:
        return None
    return stale(scored.versions[0], version, bound)


def too_far(group: GroupRecord, version: int | None, bound: int | None) -> Problem:
    """The problem of a group that waited until it was too old, or that a trainer went back behind."""
    asked, lag = version or 0, bound or 0
    low, high = group.versions or (asked, asked)
    if low < asked - lag:
        return stale(low, asked, lag)
    return Problem("ahead", f"Sampled by version {high}; the trainer is at {asked}, and allows a distance of {lag}.")


def _untagged() -> Problem:
    return Problem("untagged", "The group carries no policy_version, and this server asks for one.")


@dataclass(frozen=True, slots=True)
class Content:
    """A posted group and what it is known by, for at least `window_s` and less than twice that."""

    group: Scored
    name: str
    window_s: float

    @classmethod
    def of(cls, group: Scored, window_s: float) -> Self:
        """What a group is known by."""
        digest = hashlib.blake2b(group.element, digest_size=16)
        name = f"content-{group.env_id}-{digest.hexdigest()}"
        if group.key is None:  # the same content, however it was written down
            group = replace(group, fingerprint=int.from_bytes(digest.digest()[:7]))
        return cls(group, name, window_s)

    def keys(self, now: float) -> tuple[str, str]:
        """The key it would get at this time, and the one it may have got before."""
        window = int(now // self.window_s)
        return f"{self.name}-{window}", f"{self.name}-{window - 1}"

    def keyed(self, state: State) -> Scored:
        """The group with a key: its own, that of its earlier arrival, or a new one."""
        if self.group.key is not None:
            return self.group
        new, earlier = self.keys(state.clock())
        return replace(self.group, key=earlier if state.known(earlier) else new)


class KeyReused(Conflict):
    """An Idempotency-Key came back with another body."""

    status = 409


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What happened to a posted group."""

    place: Place
    buffered: int = 0  # sequences still buffered for its environment
    problem: Problem | None = None


def accept_all(state: State, groups: Sequence[Scored]) -> list[Verdict]:
    """Take posted groups in, all or none.

    Raises:
        KeyReused: a key came before with another body, in an earlier request or in this one; nothing was taken.
        Unprocessable: in strict mode, a group that no batch can hold; nothing was taken.
    """
    _check_keys(state, groups)
    problems = [scored.problem or reject_reason(state, scored) for scored in groups]
    if state.rules.validation == "strict":
        _refuse(state, groups, problems)
    return [_accept(state, scored, problem) for scored, problem in zip(groups, problems, strict=True)]


def _check_keys(state: State, groups: Sequence[Scored]) -> None:
    seen: dict[str, int] = {}
    for group in groups:
        if group.key is None:
            continue
        known = state.known(group.key)
        first = known.fingerprint if known else seen.setdefault(group.key, group.fingerprint)
        if first != group.fingerprint:
            raise KeyReused(
                f"The Idempotency-Key '{group.key}' was used before.",
                "It came with another body.",
                "Make a new key for every group, and keep it for its retries.",
            )


def _refuse(state: State, groups: Sequence[Scored], problems: Sequence[Problem | None]) -> None:
    """Strict mode. A group that came before keeps its first answer."""
    refused = [(at, problem) for at, problem in enumerate(problems) if problem and not state.known(groups[at].key)]
    for at, problem in refused:
        _note_rejection(state, groups[at], problem)
    if refused:
        raise Unprocessable(
            [
                {"type": problem.code, "loc": ["body"] if len(groups) == 1 else ["body", at], "msg": problem.why}
                for at, problem in refused
            ]
        )


def _note_rejection(state: State, scored: Scored, problem: Problem) -> None:
    """Let diagnostics say why an environment's last group was of no use."""
    env = state.envs.by_id.get(-1 if scored.env_id is None else scored.env_id)
    if env is not None:
        env.last_rejection = problem.why


def _accept(state: State, scored: Scored, problem: Problem | None) -> Verdict:
    if (known := state.known(scored.key)) is not None:
        _count_duplicate(state, scored)
        return msgspec.json.decode(known.verdict, type=Verdict)
    env = None if scored.problem or scored.env_id is None else state.note_seen(scored.env_id, polls=False)
    if env is not None and env.group_size == 0 and problem is None:
        state.save_env(replace(env.record, adopted_size=scored.size))
    place = Place.SET_ASIDE if problem else _place(scored, env)
    group = _record(state, scored, place, problem)
    parts, left = _completed(group, env)
    verdict = Verdict(place=place, buffered=left, problem=problem)
    if scored.key is not None:
        group = replace(group, verdict=msgspec.json.encode(verdict))
    state.do(GroupArrived(group, scored.element))
    for part in parts:
        state.put(state.waiting[part.id], Place.QUEUED)
    if problem:
        _note_rejection(state, scored, problem)
    return verdict


def _count_duplicate(state: State, scored: Scored) -> None:
    state.num_duplicates += 1
    env = state.envs.by_id.get(-1 if scored.env_id is None else scored.env_id)
    if env is not None:
        env.num_duplicates += 1


def _place(scored: Scored, env: Environment | None) -> Place:
    """Smaller than its environment's registered group: it waits for the rest. A larger one is whole."""
    is_part = env is not None and env.record.registration is not None and scored.size < env.group_size
    return Place.BUFFERED if is_part else Place.QUEUED


def _record(state: State, scored: Scored, place: Place, problem: Problem | None) -> GroupRecord:
    said = problem or scored.flaw
    return GroupRecord(
        id=state.last_group + 1,
        env_id=scored.env_id,
        size=scored.size,
        num_bytes=len(scored.element),
        received_at=state.clock(),
        place=place,
        position=state.next_position() if place is Place.QUEUED else 0,
        versions=scored.versions,
        reason=said.code if said else None,
        why=said.why if said else None,
        key=scored.key,
        fingerprint=scored.fingerprint,
    )


def _completed(group: GroupRecord, env: Environment | None) -> tuple[list[GroupRecord], int]:
    """The parts that make a whole group with this one, and the sequences that stay buffered."""
    if env is None:
        return [], 0
    if group.place is not Place.BUFFERED:
        return [], env.buffered_sequences
    parts = env.buffer.completed_by(group, env.group_size)
    return parts, env.buffered_sequences + group.size - sum(part.size for part in parts)
