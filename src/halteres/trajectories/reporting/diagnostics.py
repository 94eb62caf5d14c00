"""Why there is no batch, in sentences.

Owns: the answer of /v1/diagnostics.
Never: changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halteres.trajectories.forming import packing
from halteres.trajectories.intake.environments import Environment
from halteres.trajectories.state import State

Reason = dict[str, Any]


def report(state: State) -> dict[str, Any]:
    """What waits, who sent it, and what the next batch still lacks."""
    queue = state.queue
    ready = state.batch_is_ready()
    return {
        "registered": state.run.registration is not None,
        "step": state.run.step,
        "batch_ready": ready,
        "reasons": [] if ready and not state.run.parked else list(reasons(state)),
        "environments": [_environment(state, env) for env in state.envs.by_id.values()],
        "queued_groups": len(queue),
        "queued_sequences": queue.num_sequences,
        "groups_accepted": state.num_accepted,
        "set_aside": dict(state.set_aside),
        "parked": state.run.parked,
        "first_group_at": state.first_group_at,
    }


def reasons(state: State) -> Iterator[Reason]:
    """What stands between the queue and the next batch, the most likely cause first."""
    if state.run.registration is None:
        yield _reason("not_registered", "No trainer has registered; start one, or wait until it does.")
        return
    if not state.run.started:
        yield _reason("not_started", "The trainer has not asked for a batch yet; environments register once it does.")
    if state.run.parked:
        yield _reason("paused", "The trainer works on the last batch; environments go on when it asks for another.")
    yield from _shortfall(state)
    yield from _minimum(state)
    yield from _buffered(state)
    yield from _set_aside(state)


def _shortfall(state: State) -> Iterator[Reason]:
    have, need = state.queue.num_sequences, state.run.batch_size
    live = [env for env in state.envs.live(state.clock()) if env.group_size]
    sizes = sorted({env.group_size for env in live} | set(state.queue.num_by_size))
    if sizes and not packing.can_ever_add_up(sizes, need):
        text = f"Groups of {_either(sizes)} sequences never add up to a batch of {need}; choose sizes that do."
        yield _reason("size_cannot_pack", text, sizes=sizes, batch=need)
    elif have < need:
        text = f"{have} of {need} sequences are queued."
        if not live:
            text += " No environment is connected."
        yield _reason("too_few_sequences", text, have=have, need=need)
    elif not packing.can_add_up(state.queue.num_by_size, need):
        text = f"{have} sequences are queued, but no choice of their groups has exactly {need}; more groups will do."
        yield _reason("size_cannot_pack", text, sizes=sorted(state.queue.num_by_size), batch=need)


def _minimum(state: State) -> Iterator[Reason]:
    unmet = packing.unmet(state.queue, state.minima())
    if unmet:
        name = state.envs.by_id[unmet.env_id].record.name
        text = f"Environment '{name}' asked for {unmet.need} sequences of every batch and has none queued."
        yield _reason("min_allocation_unmet", text, env_id=unmet.env_id, have=0, need=unmet.need)


def _buffered(state: State) -> Iterator[Reason]:
    for env in state.envs.by_id.values():
        if env.buffer:
            text = (
                f"Environment '{env.record.name}' sent {env.buffered_sequences} sequences in groups smaller than its "
                f"{env.group_size}; they wait until they make a whole group."
            )
            yield _reason("buffered", text, env_id=env.id, sequences=env.buffered_sequences)


def _set_aside(state: State) -> Iterator[Reason]:
    for code, num in state.set_aside.items():
        groups = "1 group was" if num == 1 else f"{num} groups were"
        yield _reason(code, f"{groups} set aside: {_MEANINGS.get(code, code)}.", groups=num)


_MEANINGS = {
    "stale": "sampled by weights too old for the trainer's bound",
    "ahead": "sampled by weights newer than the trainer's, which went back to a checkpoint",
    "group_exceeds_batch": "larger than a whole batch",
    "not_finite": "with a number that is NaN or infinite",
    "lengths": "with arrays that differ in length",
    "empty": "without tokens",
    "env_id": "naming an impossible environment",
    "policy_version": "with versions that do not fit the sequences",
    "text": "with text that is no valid Unicode",
}


def _environment(state: State, env: Environment) -> dict[str, Any]:
    return {
        "env_id": env.id,
        "name": env.record.name,
        "connected": env.is_live(state.clock()),
        "last_seen_s": round(max(0.0, state.clock() - env.last_seen), 3),
        "group_size": env.group_size,
        "queued": state.queue.num_groups_of(env.id),
        "buffered": env.buffered_sequences,
        "accepted": env.num_accepted,
        "rejected": env.num_set_aside,
    }


def _reason(code: str, sentence: str, **facts: Any) -> Reason:
    return {"code": code, "sentence": sentence, **facts}


def _either(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes))
