"""Posted groups: where each one goes.

Owns: the verdict (queue, buffer, set aside), idempotency keys, buffers that become whole groups.
Never: refuses a group that fits the schema: what cannot train anybody is kept apart, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from halteres.errors import Conflict
from halteres.trajectories.intake.environments import Environment, complete
from halteres.trajectories.records import GroupArrived, GroupRecord, Place, Tally
from halteres.trajectories.state import State
from halteres.trajectories.wire.scored import Problem, Scored


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
    """
    known: dict[str, int] = {}
    for group in groups:
        if group.key is not None:
            fingerprint, _ = state.verdicts.get(group.key, (group.fingerprint, b""))
            if group.fingerprint != known.setdefault(group.key, fingerprint):
                raise _reused(group.key)
    return [_accept(state, group) for group in groups]


def _accept(state: State, scored: Scored) -> Verdict:
    if scored.key is not None and scored.key in state.verdicts:
        return msgspec.json.decode(state.verdicts[scored.key][1], type=Verdict)
    env = None if scored.problem or scored.env_id is None else state.hear(scored.env_id)
    problem = scored.problem or _misfit(state, scored)
    group = _record(state, scored, Place.SET_ASIDE if problem else _place(scored, env), problem)
    state.enter(group)
    parts = complete(env.buffer, env.group_size) if env and group.place is Place.BUFFERED else []
    left = env.buffered_sequences - sum(part.size for part in parts) if env else 0
    verdict = Verdict(place=group.place, buffered=left, problem=problem)
    _keep(state, group, scored, verdict)
    for part in parts:
        state.move(part, Place.QUEUED)
    return verdict


def _reused(key: str) -> KeyReused:
    return KeyReused(
        f"The Idempotency-Key '{key}' was used before.",
        "It came with another body.",
        "Make a new key for every group, and keep it for its retries.",
    )


def _misfit(state: State, scored: Scored) -> Problem | None:
    """Why a sound group can be in no batch of this run."""
    run = state.run
    if run.registration and scored.size > run.batch_size:
        return exceeds_batch(scored.size, run.batch_size)
    if run.max_staleness is None or run.asked_version is None or scored.versions is None:
        return None
    if run.asked_version - scored.versions[0] > run.max_staleness:
        return stale(scored.versions[0], run.asked_version, run.max_staleness)
    return None


def exceeds_batch(size: int, batch_size: int) -> Problem:
    """The problem of a group that no batch can hold."""
    return Problem("group_exceeds_batch", f"The group has {size} sequences, a batch {batch_size}.")


def stale(version: int, asked: int, max_staleness: int) -> Problem:
    """The problem of a group that came too late."""
    return Problem(
        "stale", f"Sampled by version {version}; the trainer is at {asked} and allows a lag of {max_staleness}."
    )


def _place(scored: Scored, env: Environment | None) -> Place:
    """Smaller than its environment's group: it waits for the rest. A larger one is whole."""
    return Place.BUFFERED if env and scored.size < env.group_size else Place.QUEUED


def _record(state: State, scored: Scored, place: Place, problem: Problem | None) -> GroupRecord:
    state.last_group += 1
    return GroupRecord(
        id=state.last_group,
        env_id=scored.env_id,
        size=scored.size,
        num_bytes=len(scored.element),
        received_at=state.clock(),
        place=place,
        position=state.next_position() if place is Place.QUEUED else 0,
        versions=scored.versions,
        reason=problem.code if problem else None,
        why=problem.why if problem else None,
        key=scored.key,
        fingerprint=scored.fingerprint,
    )


def _keep(state: State, group: GroupRecord, scored: Scored, verdict: Verdict) -> None:
    """Have the group remembered and counted, with its verdict if it may be asked for again."""
    encoded = b""
    if scored.key is not None:
        encoded = msgspec.json.encode(verdict)
        state.verdicts[scored.key] = scored.fingerprint, encoded
    state.changes.append(GroupArrived(replace(group, verdict=encoded), scored.element))
    state.count(Tally(env_id=group.env_id, place=group.place, reason=group.reason, num_groups=1))
    if state.first_group_at is None and group.place is not Place.SET_ASIDE:
        state.first_group_at = group.received_at
