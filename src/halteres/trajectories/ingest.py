"""Posted groups: where each one goes (queue, buffer, set aside with a reason), and which came
before.

Nothing that fits the schema is refused, but in strict mode: what cannot train anybody is set aside,
with a reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from halteres.errors import Conflict
from halteres.trajectories.posted_group import Problem, Scored, exceeds_batch, stale
from halteres.trajectories.records import GroupArrived, GroupRecord, Place
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
    # In strict mode they are refused; a group that came before keeps its first answer.
    refused = [
        (at, problem)
        for at, problem in enumerate(problems)
        if problem and not state.known(groups[at].key)
    ]
    if refused and state.rules.validation == "strict":
        for at, problem in refused:
            if (env := state.envs.get(groups[at].env_id)) is not None:
                env.last_rejection = problem.why
        paths = (["body"] if len(groups) == 1 else ["body", at] for at, _ in refused)
        details = zip(paths, (problem for _, problem in refused), strict=True)
        raise Unprocessable(
            [{"type": problem.code, "loc": path, "msg": problem.why} for path, problem in details]
        )
    return [
        _accept(state, scored, problem) for scored, problem in zip(groups, problems, strict=True)
    ]


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
    window, found = int(state.clock() // state.rules.same_content_s), list[Scored]()
    for group, (name, fingerprint) in zip(groups, contents, strict=True):
        if group.key is None:
            before = f"{name}-{window - 1}"
            key = before if state.known(before) else f"{name}-{window}"
            group = replace(group, key=key, fingerprint=fingerprint)
        found.append(group)
    return found


def _reject_reason(state: State, scored: Scored) -> Problem | None:
    """What keeps a group that is posted now out of every batch."""
    run, bound, version = state.run, state.max_staleness, state.run.known_version
    if run.registration and scored.size > run.batch_size:
        return exceeds_batch(scored.size, run.batch_size)
    if scored.versions is None:
        why = "The group carries no policy_version, and this server asks for one."
        return Problem("untagged", why) if state.rules.require_version else None
    if bound is None or version is None or version - scored.versions[0] <= bound:
        return None
    return stale(scored.versions[0], version, bound)


def _check_keys(state: State, groups: Sequence[Scored]) -> None:
    seen: dict[str, int] = {}
    for group in groups:
        if group.key is None:
            continue
        known = state.known(group.key)
        first = known.fingerprint if known else seen.setdefault(group.key, group.fingerprint)
        if first != group.fingerprint:
            next = "Make a new key for every group, and keep it for its retries."
            raise KeyReused(
                f"The Idempotency-Key '{group.key}' was used before.",
                "It came with another body.",
                next,
            )


def _accept(state: State, scored: Scored, problem: Problem | None) -> Verdict:
    if (known := state.known(scored.key)) is not None:
        state.num_duplicates += 1
        if (env := state.envs.get(scored.env_id)) is not None:
            env.num_duplicates += 1
        return msgspec.json.decode(known.verdict, type=Verdict)
    env = (
        None
        if scored.problem or scored.env_id is None
        else state.note_seen(scored.env_id, polls=False)
    )
    if env is not None and env.group_size == 0 and problem is None:
        state.save_env(replace(env.record, adopted_size=scored.size))
    # Smaller than its environment's registered group: it waits for the rest. A larger one is whole.
    is_part = (
        env is not None and env.record.registration is not None and scored.size < env.group_size
    )
    place = Place.SET_ASIDE if problem else Place.BUFFERED if is_part else Place.QUEUED
    flaw = problem or scored.flaw
    group = GroupRecord(
        id=state.last_group + 1,
        env_id=scored.env_id,
        size=scored.size,
        num_bytes=len(scored.element),
        received_at=state.clock(),
        place=place,
        position=state.last_position + 1 if place is Place.QUEUED else 0,
        versions=scored.versions,
        reason=flaw.code if flaw else None,
        why=flaw.why if flaw else None,
        key=scored.key,
        fingerprint=scored.fingerprint,
    )
    parts, buffered = list[GroupRecord](), env.buffer.num_sequences if env else 0
    if env is not None and place is Place.BUFFERED:
        parts = env.buffer.completed_by(group, env.group_size)
        buffered += group.size - sum(part.size for part in parts)
    verdict = Verdict(place=place, buffered=buffered, problem=problem)
    if scored.key is not None:
        group = replace(group, verdict=msgspec.json.encode(verdict))
    state.do(GroupArrived(group, scored.element))
    for part in parts:
        state.put(state.waiting[part.id], Place.QUEUED)
    if problem and (env := state.envs.get(scored.env_id)) is not None:
        env.last_rejection = problem.why
    return verdict
