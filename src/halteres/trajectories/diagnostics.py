"""What is told to whoever polls or looks: /status, /status-env, /metrics, and why there is no
batch, in sentences.

Sequences in open batches (offered, leased, come back) count as queued: they wait for the trainer as
much as the rest.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from halteres.observe.prometheus import Metric, text_of
from halteres.trajectories import batch_selection, batches
from halteres.trajectories.environments import Environment
from halteres.trajectories.posted_group import LARGEST_ENV_ID
from halteres.trajectories.records import OPEN, Standing
from halteres.trajectories.schema import EnvStatus, Status
from halteres.trajectories.state import State

Reason = dict[str, Any]

# environments poll ten times a second; one that is silent for longer is worth a word
SILENT_S = 5.0
MOST_NAMED = 5  # environments that a sentence names
# how long a trainer asks in vain, with a whole batch of sequences queued, before the log says why
PATIENCE_S = 30.0
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

_log = logging.getLogger(__name__)

# -- what environments poll


def status(state: State) -> Status:
    """GET /status: the step, and groups that wait."""
    num_out = sum(len(batch.groups) for batch in state.out.values())
    return Status(current_step=state.durable_step, queue_size=len(state.queue) + num_out)


def is_paused(state: State) -> bool:
    """Whether rollouts started now would be of no use.

    On-policy: the trainer works on a batch, or one lies ready. Otherwise: more waits than the
    operator wants, and the trainer can take some of it; where it cannot, what it lacks may be just
    what an environment is about to make.
    """
    if state.max_staleness == 0 and (state.run.parked or state.out or batches.is_ready(state)):
        return True
    return is_full(state) and (bool(state.out) or batches.is_ready(state))


def is_full(state: State) -> bool:
    """Whether as much waits as the operator allows: so many batches, or three quarters of the
    bytes.
    """
    most, waiting = state.rules.max_queue_batches, state.queue.num_sequences + state.num_out.total()
    if most is not None and state.run.batch_size > 0 and waiting >= most * state.run.batch_size:
        return True
    return state.num_bytes * 4 >= state.rules.max_queue_bytes * 3


def status_env(state: State, env: Environment) -> EnvStatus:
    """GET /status-env: rule 2.6 of the original; a pause as a worker limit of 0. `allowance` is
    ours.
    """
    queue, batch_size, now = state.queue, state.run.batch_size, state.clock()
    weight = state.envs.weight_of(env, now)
    if state.run.registration is None or is_paused(state):
        return idle(state, weight)
    waiting = queue.sequences_of_env + state.num_out
    own, sizes_out = waiting.pop(env.id, 0), (size for size, num in state.sizes_out.items() if num)
    largest = max(1, queue.largest(), max(sizes_out, default=0))
    group_size = max(env.group_size or largest, queue.largest(env.id))
    shares = {other.id: other.min_share for other in state.envs.live(now)}
    others = 0
    if largest > 1:
        for other_id, num in waiting.items():
            share = shares.get(other_id, 0.0) if other_id is not None else 0.0
            others += max(0, math.ceil(num / largest) * largest - int(batch_size * share))
    return EnvStatus(
        current_step=state.durable_step,
        queue_size=(own + others) // group_size,
        unallocated_fraction=1.0 - min(1.0, sum(shares.values())),
        self_queue_size=own // group_size,
        max_group_size=largest,
        env_weight=weight,
        allowance=allowance(state, env),
    )


def idle(state: State, weight: float = 1.0) -> EnvStatus:
    """The answer that makes any client pause."""
    return EnvStatus(current_step=state.durable_step, env_weight=weight)


def allowance(state: State, env: Environment) -> int:
    """Groups the environment may have in flight, so that the next batch is filled and not
    overfilled.

    What the batch lacks is divided among the environments that poll, rounded up: exact for one;
    with E of them at most E - 1 groups too many are promised at one time. Where the queue holds
    enough sequences that do not add up, each may add one group. A `max_staleness` of K > 1 lets as
    many batches lie ready as make K versions.
    """
    run = state.run
    if run.registration is None or is_paused(state):
        return 0
    size = env.group_size or state.queue.largest(env.id) or state.queue.largest()
    if size == 0:
        return 1  # adopted: its first group will tell
    num_batches = max(1, (state.max_staleness or 1) // run.registration.updates_per_batch)
    # What the trainer will take before a group that is started now; one leased batch is being
    # trained on.
    leased = sum(
        batch.num_sequences for batch in state.out.values() if batch.standing is Standing.LEASED
    )
    ahead = state.queue.num_sequences + state.num_out.total() - min(leased, run.batch_size)
    missing = run.batch_size * num_batches - ahead
    polling = state.envs.polling(state.clock())
    if missing >= size:
        return min(missing // size, math.ceil(missing / (size * max(1, len(polling)))))
    useful = batch_selection.can_ever_add_up(
        {other.group_size for other in (*polling, env)}, run.batch_size
    )
    return 1 if useful and not batches.is_ready(state) else 0


# -- metrics


def metrics_text(state: State) -> str:
    """GET /metrics. Groups received and set aside are those of this run, repeated ones those since
    this server started: such a counter begins anew, which Prometheus takes for a restart. Batches
    handed out are those of all runs.
    """
    queue, now, num_set_aside = state.queue, state.clock(), sum(state.set_aside.values())
    standings = Counter(batch.standing for batch in state.out.values())
    oldest = next(iter(state.waiting.values()), None)
    age_s = 0.0 if oldest is None else max(0.0, now - oldest.received_at)
    num_received = state.num_accepted + num_set_aside
    counters = (
        ("groups_received_total", "Groups of this run, those set aside among them.", num_received),
        (
            "groups_repeated_total",
            "Groups that came again with their key since the start.",
            state.num_duplicates,
        ),
        (
            "batches_handed_out_total",
            "Batches of all runs, offered or leased, repeats too.",
            state.last_delivery,
        ),
    )
    gauges = (
        ("step", "The run's step: batches delivered, and what it began with.", state.run.step),
        (
            "registered",
            "1 where a trainer has registered.",
            int(state.run.registration is not None),
        ),
        ("paused", "1 while the trainer works on an on-policy batch.", int(state.run.parked)),
        ("queued_groups", "Groups that wait for a batch.", len(queue)),
        ("queued_sequences", "Their sequences.", queue.num_sequences),
        (
            "out_sequences",
            "Sequences in batches that are not delivered yet.",
            state.num_out.total(),
        ),
        ("waiting_bytes", "Bytes of groups queued, buffered, or in such batches.", state.num_bytes),
        ("oldest_seconds", "How long the oldest of these groups has waited.", age_s),
        ("environments_live", "Environments heard of lately.", len(state.envs.live(now))),
    )
    useless, unsettled = (
        dict(state.set_aside),
        {each.value: standings[each] for each in sorted(OPEN)},
    )
    metrics = (
        *(Metric.one(name, "counter", words, figure) for name, words, figure in counters),
        Metric(
            "groups_set_aside_total",
            "counter",
            "Groups of this run that no batch will have.",
            useless,
            "reason",
        ),
        *(Metric.one(name, "gauge", words, figure) for name, words, figure in gauges),
        Metric(
            "open_batches", "gauge", "Batches that are not delivered yet.", unsettled, "standing"
        ),
    )
    return text_of(metrics, "halteres_trajectories_")


# -- why there is no batch


def report(state: State) -> dict[str, Any]:
    """What waits, who sent it, and what the next batch still lacks."""
    queue, now = state.queue, state.clock()
    ready = batches.is_ready(state)
    heads = [next(iter(fifo.values())) for _, _, fifo in queue.fifos()]
    out = [state.waiting[group_id] for batch in state.out.values() for group_id in batch.groups]
    buffered = [group for env in state.envs.by_id.values() for group in env.buffer.groups.values()]
    oldest = min((group.received_at for group in (*heads, *out, *buffered)), default=None)
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
        "oldest_s": None if oldest is None else round(max(0.0, now - oldest), 3),
        "batches_out": Counter(str(batch.standing) for batch in state.out.values()),
        "groups_accepted": state.num_accepted,
        "duplicates": state.num_duplicates,
        "set_aside": dict(state.set_aside),
        "flagged": {code: num for code, num in state.flagged.items() if num},
        "parked": state.run.parked,
        "first_group_at": state.first_group_at,
    }


def _environment(state: State, env: Environment, now: float) -> dict[str, Any]:
    return {
        "env_id": env.id,
        "name": env.record.name,
        "connected": env.is_live(now),
        "last_seen_s": round(max(0.0, now - env.last_seen), 3),
        "group_size": env.group_size,
        "queued": state.queue.groups_of_env[env.id],
        "buffered": env.buffer.num_sequences,
        "accepted": env.num_accepted,
        "duplicates": env.num_duplicates,
        "rejected": env.num_set_aside,
        "last_rejection": env.last_rejection or None,
        "min_share": env.min_share,
        "weight": round(state.envs.weight_of(env, now), 4),
    }


def reasons(state: State) -> Iterator[Reason]:
    """What stands between the queue and the next batch, the most likely cause first."""
    run, queue = state.run, state.queue
    if run.registration is None:
        yield _reason(
            "not_registered", "No trainer has registered; start one, or wait until it does."
        )
        return
    if not run.started:
        yield _reason(
            "not_started",
            "The trainer has not asked for a batch yet; environments register once it does.",
        )
    if run.parked and state.max_staleness == 0:
        yield _reason(
            "paused",
            "The trainer works on the last batch; environments go on when it asks for another.",
        )
    leased = [
        batch
        for batch in state.out.values()
        if batch.standing is Standing.LEASED and batch.expires_at
    ]
    if leased and queue.num_sequences < run.batch_size:
        next_s = max(0.0, min(batch.expires_at or 0.0 for batch in leased) - state.clock())
        who = "1 batch is" if len(leased) == 1 else f"{len(leased)} batches are"
        text = (
            f"{who} with a trainer that has not acknowledged it; the next lease ends in "
            f"{next_s:.0f} s."
        )
        yield _reason("all_leased", text, batches=len(leased), next_s=round(next_s, 1))
    if is_full(state):
        text = "As much waits as this server may keep"
        if batches.is_ready(state):
            text += "; environments pause until a trainer takes some."
        else:
            text += (
                ", and it makes no batch: --max-queue-batches or --max-queue-bytes is too low "
                "for what comes."
            )
        yield _reason("queue_full", text)
    yield from _shortfall(state)
    yield from _crowded_out(state)
    yield from _useless_or_buffered(state)


def _shortfall(state: State) -> Iterator[Reason]:
    have, need, now = state.queue.num_sequences, state.run.batch_size, state.clock()
    live = state.envs.live(now)
    sizes = sorted(
        {env.group_size for env in live if env.group_size} | set(state.queue.num_by_size)
    )
    if sizes and not batch_selection.can_ever_add_up(sizes, need):
        several = " and ".join(map(str, sizes))
        text = (
            f"Groups of {several} sequences never add up to a batch of {need}; choose sizes "
            "that do."
        )
        yield _reason("size_cannot_pack", text, sizes=sizes, batch=need)
    elif have < need:
        text = f"{have} of {need} sequences are queued."
        if not live:
            text += " No environment is connected"
            if last := max(state.envs.by_id.values(), key=lambda env: env.last_seen, default=None):
                silent_s = now - last.last_seen
                text += f"; '{last.record.name}' was the last to be heard of, {silent_s:.0f} s ago"
            text += "."
        yield _reason("too_few_sequences", text, have=have, need=need)
    elif not batch_selection.can_add_up(state.queue.num_by_size, need):
        text = (
            f"{have} sequences are queued, but no choice of their groups has exactly {need}; "
            "more groups will do."
        )
        yield _reason("size_cannot_pack", text, sizes=sorted(state.queue.num_by_size), batch=need)
    if (starved := batches.starved(state)) is None:
        return
    env = state.envs.by_id[starved.env_id]
    lacks = (
        "none queued that fits a batch now" if state.queue.groups_of_env[env.id] else "none queued"
    )
    text = (
        f"Environment '{env.record.name}' asked for {starved.need} sequences of every batch "
        f"and has {lacks}."
    )
    if (silent_s := now - env.last_seen) > SILENT_S:
        left_s = max(0.0, env.timeout_s - silent_s)
        text += f" It was heard of {silent_s:.0f} s ago; in {left_s:.0f} s it loses its share."
    since_s = round(env.starves_for(now), 1)
    yield _reason(
        "min_allocation_unmet", text, env_id=env.id, have=0, need=starved.need, since_s=since_s
    )


def _crowded_out(state: State) -> Iterator[Reason]:
    """Whose groups wait for ever beside minimum shares that are a whole batch; the batches
    themselves go on.
    """
    minima, batch_size, taken = batches.minima(state), state.run.batch_size, 0
    for each in minima:  # what a minimum takes where it has enough: whole groups, of those that fit
        size = max(1, state.envs.by_id[each.env_id].group_size)
        taken += min(math.ceil(each.need / size), batch_size // size) * size
    env_ids = sorted(each.env_id for each in minima)
    num_others = len(state.queue) - sum(state.queue.groups_of_env[env_id] for env_id in env_ids)
    if not minima or not num_others or taken < batch_size:
        return
    if any(group.env_id not in env_ids for group in batches.choose(state) or ()):
        return  # sizes that do not add up without them
    names = ", ".join(
        f"'{state.envs.by_id[env_id].record.name}'" for env_id in env_ids[:MOST_NAMED]
    )
    if len(env_ids) > MOST_NAMED:
        names += f" and {len(env_ids) - MOST_NAMED} more"
    text = (
        f"The minimum shares of {names} are together a whole batch of {batch_size}: "
        f"other groups ({num_others} queued) are taken only where theirs are too few; lower the "
        "shares."
    )
    yield _reason("shares_fill_batch", text, env_ids=env_ids, groups=num_others, batch=batch_size)


def _useless_or_buffered(state: State) -> Iterator[Reason]:
    batch_size = state.run.batch_size
    for env in state.envs.live(state.clock()):
        if env.group_size > batch_size:
            text = (
                f"Environment '{env.record.name}' makes groups of {env.group_size} sequences, and "
                "a batch has "
                f"{batch_size}: none of them can be served."
            )
            yield _reason(
                "group_exceeds_batch", text, env_id=env.id, size=env.group_size, batch=batch_size
            )
    for env in state.envs.by_id.values():
        if num := env.buffer.num_sequences:
            text = (
                f"Environment '{env.record.name}' sent {num} sequences in groups smaller than its "
                f"{env.group_size}; they wait until they make a whole group."
            )
            yield _reason("buffered", text, env_id=env.id, sequences=num)
    for code, num in state.set_aside.items():
        if num > 0:
            groups = "1 group was" if num == 1 else f"{num} groups were"
            yield _reason(code, f"{groups} set aside: {_MEANINGS.get(code, code)}.", groups=num)


def _reason(code: str, sentence: str, **facts: Any) -> Reason:
    return {"code": code, "sentence": sentence, **facts}


class NoBatchWarning:
    """Notes every answer to a question for a batch; after a while without one the log says why,
    once per cause.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._logged: set[str] = set()  # codes

    def answered(self, state: State, *, empty: bool) -> None:
        """A question was answered, with a batch or without."""
        if not empty or state.queue.num_sequences < state.run.batch_size:
            self._since = None
            self._logged.clear()
            return
        now = state.clock()
        if self._since is None:
            self._since = now
        if now - self._since < PATIENCE_S:
            return
        reason = next(reasons(state), None)
        if reason is not None and reason["code"] not in self._logged:
            self._logged.add(reason["code"])
            _log.warning("No batch for %.0f s: %s", PATIENCE_S, reason["sentence"])
