"""Why there is no batch, in sentences: the answer of /v1/diagnostics, and a line in the log after a while."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from halteres.trajectories import batches, packing
from halteres.trajectories.environments import Environment
from halteres.trajectories.group_checks import LARGEST_ENV_ID
from halteres.trajectories.records import Standing
from halteres.trajectories.state import State
from halteres.trajectories.status import is_full

Reason = dict[str, Any]

SILENT_S = 5.0
"""Environments poll ten times a second; one that is silent for longer is worth a word."""

MOST_NAMED = 5
"""Environments that a sentence names."""

_MEANINGS = {
    "stale": "sampled by weights too old for the trainer's bound",
    "ahead": "sampled by weights too new for the trainer, which may have gone back to a checkpoint",
    "group_exceeds_batch": "larger than a whole batch",
    "not_finite": "with a number that is NaN or infinite",
    "lengths": "with arrays that differ in length",
    "empty": "without tokens",
    "env_id": f"with an env_id that no server gives (they are from 0 to {LARGEST_ENV_ID - 1})",
    "policy_version": "with versions that do not fit the sequences",
    "episodes": "with episodes that do not fit the sequences",
    "spans": "with spans outside their sequences",
    "untagged": "without the policy_version that this server asks for",
    "text": "with text that is no valid Unicode",
    "tokens_lost": "whose tokens cannot be read from the disk any more",
}

PATIENCE_S = 30.0
"""How long a trainer asks in vain, with a whole batch of sequences queued, before the log says why."""

_log = logging.getLogger(__name__)


def report(state: State) -> dict[str, Any]:
    """What waits, who sent it, and what the next batch still lacks."""
    queue, now = state.queue, state.clock()
    ready = batches.is_ready(state)
    found = list(_crowded_out(state) if ready and not state.run.parked else reasons(state))
    return {
        "registered": state.run.registration is not None,
        "step": state.run.step,
        "batch_ready": ready,
        "why": " ".join(reason["sentence"] for reason in found[:1]),
        "reasons": found,
        "environments": [_environment(state, env, now) for env in state.envs.by_id.values()],
        "queued_groups": len(queue),
        "queued_sequences": queue.num_sequences,
        "waiting_bytes": state.num_bytes,
        "oldest_s": _age(state, now),
        "batches_out": Counter(str(batch.standing) for batch in state.out.values()),
        "groups_accepted": state.num_accepted,
        "duplicates": state.num_duplicates,
        "set_aside": dict(state.set_aside),
        "flagged": {code: num for code, num in state.flagged.items() if num},
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
    if state.run.parked and state.max_staleness == 0:
        yield _reason("paused", "The trainer works on the last batch; environments go on when it asks for another.")
    yield from _leased(state)
    yield from _full(state)
    yield from _shortfall(state)
    yield from _minimum(state)
    yield from _crowded_out(state)
    yield from _too_large(state)
    yield from _buffered(state)
    yield from _set_aside(state)


def _leased(state: State) -> Iterator[Reason]:
    leased = [batch for batch in state.out.values() if batch.standing is Standing.LEASED and batch.expires_at]
    if leased and state.queue.num_sequences < state.run.batch_size:
        next_s = max(0.0, min(batch.expires_at or 0.0 for batch in leased) - state.clock())
        batches = "1 batch is" if len(leased) == 1 else f"{len(leased)} batches are"
        text = f"{batches} with a trainer that has not acknowledged it; the next lease ends in {next_s:.0f} s."
        yield _reason("all_leased", text, batches=len(leased), next_s=round(next_s, 1))


def _shortfall(state: State) -> Iterator[Reason]:
    have, need = state.queue.num_sequences, state.run.batch_size
    live = [env for env in state.envs.live(state.clock()) if env.group_size]
    sizes = sorted({env.group_size for env in live} | set(state.queue.num_by_size))
    if sizes and not packing.can_ever_add_up(sizes, need):
        text = f"Groups of {_either(sizes)} sequences never add up to a batch of {need}; choose sizes that do."
        yield _reason("size_cannot_pack", text, sizes=sizes, batch=need)
    elif have < need:
        text = f"{have} of {need} sequences are queued.{_silence(state)}"
        yield _reason("too_few_sequences", text, have=have, need=need)
    elif not packing.can_add_up(state.queue.num_by_size, need):
        text = f"{have} sequences are queued, but no choice of their groups has exactly {need}; more groups will do."
        yield _reason("size_cannot_pack", text, sizes=sorted(state.queue.num_by_size), batch=need)


def _too_large(state: State) -> Iterator[Reason]:
    for env in state.envs.live(state.clock()):
        if env.group_size > state.run.batch_size:
            text = (
                f"Environment '{env.record.name}' makes groups of {env.group_size} sequences, and a batch has "
                f"{state.run.batch_size}: none of them can be served."
            )
            yield _reason("group_exceeds_batch", text, env_id=env.id, size=env.group_size, batch=state.run.batch_size)


def _silence(state: State) -> str:
    """Who should send groups, and does not."""
    now = state.clock()
    if state.envs.live(now):
        return ""
    if not state.envs.by_id:
        return " No environment is connected."
    last = max(state.envs.by_id.values(), key=lambda env: env.last_seen)
    name, silent_s = last.record.name, now - last.last_seen
    return f" No environment is connected; '{name}' was the last to be heard of, {silent_s:.0f} s ago."


def _minimum(state: State) -> Iterator[Reason]:
    starved = batches.starved(state)
    if starved is None:
        return
    env, now = state.envs.by_id[starved.env_id], state.clock()
    lacks = "none queued that fits a batch now" if state.queue.num_groups_of(env.id) else "none queued"
    text = f"Environment '{env.record.name}' asked for {starved.need} sequences of every batch and has {lacks}."
    if now - env.last_seen > SILENT_S:
        left_s = max(0.0, env.timeout_s - (now - env.last_seen))
        text += f" It was heard of {now - env.last_seen:.0f} s ago; in {left_s:.0f} s it loses its share."
    since_s = round(env.starves_for(now), 1)
    yield _reason("min_allocation_unmet", text, env_id=env.id, have=0, need=starved.need, since_s=since_s)


def _crowded_out(state: State) -> Iterator[Reason]:
    """Whose groups wait for ever beside minimum shares that are a whole batch; the batches themselves go on."""
    asked, batch_size = batches.minima(state), state.run.batch_size
    env_ids = {each.env_id for each in asked}
    num_others = len(state.queue) - sum(map(state.queue.num_groups_of, env_ids))
    if not asked or not num_others or sum(_given(each, state) for each in asked) < batch_size:
        return
    if any(group.env_id not in env_ids for group in batches.choose(state) or ()):
        return  # sizes that do not add up without them
    text = (
        f"The minimum shares of {_named(sorted(env_ids), state)} are together a whole batch of {batch_size}: "
        f"other groups ({num_others} queued) are taken only where theirs are too few; lower the shares."
    )
    yield _reason("shares_fill_batch", text, env_ids=sorted(env_ids), groups=num_others, batch=batch_size)


def _given(minimum: packing.Minimum, state: State) -> int:
    """Sequences of a batch that an environment's minimum takes where it has enough: whole groups, of those that fit."""
    size = max(1, state.envs.by_id[minimum.env_id].group_size)
    return min(math.ceil(minimum.need / size), state.run.batch_size // size) * size


def _named(env_ids: list[int], state: State) -> str:
    """Environments by name; a few of many."""
    names = [f"'{state.envs.by_id[env_id].record.name}'" for env_id in env_ids[:MOST_NAMED]]
    return ", ".join(names) + (f" and {len(env_ids) - MOST_NAMED} more" if len(env_ids) > MOST_NAMED else "")


def _full(state: State) -> Iterator[Reason]:
    if is_full(state):
        text = "As much waits as this server may keep"
        if batches.is_ready(state):
            text += "; environments pause until a trainer takes some."
        else:
            text += ", and it makes no batch: --max-queue-batches or --max-queue-bytes is too low for what comes."
        yield _reason("queue_full", text)


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
        if num > 0:
            groups = "1 group was" if num == 1 else f"{num} groups were"
            yield _reason(code, f"{groups} set aside: {_MEANINGS.get(code, code)}.", groups=num)


def _age(state: State, now: float) -> float | None:
    """Seconds that the oldest group has waited: the first of a lane, or one that is out or buffered."""
    heads = [next(iter(lane.values())) for _, _, lane in state.queue.lanes()]
    out = [state.waiting[group_id] for batch in state.out.values() for group_id in batch.groups]
    buffered = [group for env in state.envs.by_id.values() for group in env.buffer]
    oldest = min((group.received_at for group in (*heads, *out, *buffered)), default=None)
    return None if oldest is None else round(max(0.0, now - oldest), 3)


def _environment(state: State, env: Environment, now: float) -> dict[str, Any]:
    return {
        "env_id": env.id,
        "name": env.record.name,
        "connected": env.is_live(now),
        "last_seen_s": round(max(0.0, now - env.last_seen), 3),
        "group_size": env.group_size,
        "queued": state.queue.num_groups_of(env.id),
        "buffered": env.buffered_sequences,
        "accepted": env.num_accepted,
        "duplicates": env.num_duplicates,
        "rejected": env.num_set_aside,
        "last_rejection": env.last_rejection or None,
        "min_share": env.min_share,
        "weight": round(state.envs.weight_of(env, now), 4),
    }


def _reason(code: str, sentence: str, **facts: Any) -> Reason:
    return {"code": code, "sentence": sentence, **facts}


def _either(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes))


class NoBatchWarning:
    """Notes every answer to a question for a batch."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said: set[str] = set()

    def answered(self, state: State, *, empty: bool) -> None:
        """A question was answered, with a batch or without."""
        if not empty or state.queue.num_sequences < state.run.batch_size:
            self._since = None
            self._said.clear()
            return
        now = state.clock()
        self._since = now if self._since is None else self._since
        if now - self._since >= PATIENCE_S:
            self._say(state)

    def _say(self, state: State) -> None:
        reason = next(reasons(state), None)
        if reason is not None and reason["code"] not in self._said:
            self._said.add(reason["code"])
            _log.warning("No batch for %.0f s: %s", PATIENCE_S, reason["sentence"])
