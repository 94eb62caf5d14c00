"""Posted groups: where each one goes (queue, buffer, set aside with a reason), and which came
before.

Nothing that fits the schema is refused, but in strict mode: what cannot train anybody is set aside,
with a reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from halteres.errors import Conflict
from halteres.trajectories.environments import Environment
from halteres.trajectories.posted_group import Problem, Scored, exceeds_batch, stale
from halteres.trajectories.records import GroupArrived, GroupRecord, KnownKey, Place
from halteres.trajectories.schema import Unprocessable
from halteres.trajectories.state import State


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
        KeyReused: a key came before with another body, in an earlier request or in this one;
            nothing was taken.
        Unprocessable: in strict mode, a group that no batch can hold; nothing was taken.
    """
    _check_keys(state, groups)
    problems = [scored.problem or _reject_reason(state, scored) for scored in groups]
    if state.rules.validation == "strict":
        _refuse_unusable(state, groups, problems)
    return [
        _accept(state, scored, problem) for scored, problem in zip(groups, problems, strict=True)
    ]


def _refuse_unusable(
    state: State, groups: Sequence[Scored], problems: Sequence[Problem | None]
) -> None:
    """Raise Unprocessable where a group has a problem; one that came before keeps its first
    answer.
    """
    details: list[dict[str, Any]] = []
    for at, (group, problem) in enumerate(zip(groups, problems, strict=True)):
        if problem is None or state.known(group.key):
            continue
        env = state.envs.get(group.env_id)
        if env is not None:
            env.last_rejection = problem.why
        path: list[str | int] = ["body"]
        if len(groups) > 1:
            path.append(at)
        details.append({"type": problem.code, "loc": path, "msg": problem.why})
    if details:
        raise Unprocessable(details)


def content_of(group: Scored) -> tuple[str, int]:
    """What a group without a key is known by, and its fingerprint: the same content, however it was
    written down.
    """
    digest = hashlib.blake2b(group.element, digest_size=16)
    return f"content-{group.env_id}-{digest.hexdigest()}", int.from_bytes(digest.digest()[:7])


def keyed(
    state: State, groups: Sequence[Scored], contents: Sequence[tuple[str, int]]
) -> list[Scored]:
    """Groups without a key get one by their content, for the rules' window at least and less than
    twice that: that of the same content before, or a new one.
    """
    window = int(state.clock() // state.rules.same_content_s)
    found: list[Scored] = []
    for group, (name, fingerprint) in zip(groups, contents, strict=True):
        if group.key is None:
            key = f"{name}-{window - 1}"
            if not state.known(key):
                key = f"{name}-{window}"
            group = replace(group, key=key, fingerprint=fingerprint)
        found.append(group)
    return found


def _reject_reason(state: State, scored: Scored) -> Problem | None:
    """What keeps a group that is posted now out of every batch."""
    run, bound, version = state.run, state.max_staleness, state.run.known_version
    if run.registration and scored.size > run.batch_size:
        return exceeds_batch(scored.size, run.batch_size)
    if scored.versions is None:
        if not state.rules.require_version:
            return None
        why = "The group carries no policy_version, and this server asks for one."
        return Problem("untagged", why)
    if bound is None or version is None or version - scored.versions[0] <= bound:
        return None
    return stale(scored.versions[0], version, bound)


def _check_keys(state: State, groups: Sequence[Scored]) -> None:
    seen: dict[str, int] = {}
    for group in groups:
        if group.key is None:
            continue
        known = state.known(group.key)
        if known is not None:
            first = known.fingerprint
        else:
            first = seen.setdefault(group.key, group.fingerprint)
        if first != group.fingerprint:
            next = "Make a new key for every group, and keep it for its retries."
            raise KeyReused(
                f"The Idempotency-Key '{group.key}' was used before.",
                "It came with another body.",
                next,
            )


def _accept(state: State, scored: Scored, problem: Problem | None) -> Verdict:
    known = state.known(scored.key)
    if known is not None:
        return _repeated(state, scored, known)
    env = None
    if scored.env_id is not None and scored.problem is None:
        env = state.note_seen(scored.env_id, polls=False)
    if env is not None and env.group_size == 0 and problem is None:
        state.save_env(replace(env.record, adopted_size=scored.size))
    group = _new_record(state, scored, env, problem)
    parts: list[GroupRecord] = []
    buffered = 0
    if env is not None:
        buffered = env.buffer.num_sequences
        if group.place is Place.BUFFERED:
            parts = env.buffer.completed_by(group, env.group_size)
            buffered += group.size - sum(part.size for part in parts)
    verdict = Verdict(place=group.place, buffered=buffered, problem=problem)
    if scored.key is not None:
        group = replace(group, verdict=msgspec.json.encode(verdict))
    state.do(GroupArrived(group, scored.element))
    for part in parts:
        state.put(state.waiting[part.id], Place.QUEUED)
    # Its environment may be known without having sent anything that could be counted.
    env = state.envs.get(scored.env_id)
    if problem is not None and env is not None:
        env.last_rejection = problem.why
    return verdict


def _repeated(state: State, scored: Scored, known: KnownKey) -> Verdict:
    """The first answer to a group that came before."""
    state.num_duplicates += 1
    env = state.envs.get(scored.env_id)
    if env is not None:
        env.num_duplicates += 1
    return msgspec.json.decode(known.verdict, type=Verdict)


def _new_record(
    state: State, scored: Scored, env: Environment | None, problem: Problem | None
) -> GroupRecord:
    """The record of a group that is new, with the place it goes to."""
    place, position = Place.QUEUED, 0
    if problem is not None:
        place = Place.SET_ASIDE
    elif env is not None and env.record.registration is not None and scored.size < env.group_size:
        # Smaller than its environment's registered group: it waits for the rest. A larger one is
        # whole.
        place = Place.BUFFERED
    else:
        position = state.last_position + 1
    flaw = problem or scored.flaw
    reason = why = None
    if flaw is not None:
        reason, why = flaw.code, flaw.why
    return GroupRecord(
        id=state.last_group + 1,
        env_id=scored.env_id,
        size=scored.size,
        num_bytes=len(scored.element),
        received_at=state.clock(),
        place=place,
        position=position,
        versions=scored.versions,
        reason=reason,
        why=why,
        key=scored.key,
        fingerprint=scored.fingerprint,
    )
