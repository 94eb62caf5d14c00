"""What is told to whoever polls: /status-env (rule 2.6 of the original, the paused form, the allowance) and /metrics.

Sequences in open batches (offered, leased, come back) count as queued: they wait for the trainer as much as the rest.
Of the metrics, groups received and set aside are those of this run, repeated ones those since this server started:
such a counter begins anew, which Prometheus takes for a restart. Batches handed out are those of all runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from halteres.observe.prometheus import Metric, text_of
from halteres.trajectories import batches
from halteres.trajectories.environments import Environment
from halteres.trajectories.packing import can_ever_add_up
from halteres.trajectories.records import OPEN, Standing
from halteres.trajectories.state import State

PREFIX = "halteres_trajectories_"

_one = Metric.one


def status(state: State) -> dict[str, int]:
    """GET /status: the step, and groups that wait."""
    num_out = sum(len(batch.groups) for batch in state.out.values())
    return {"current_step": state.kept_step, "queue_size": len(state.queue) + num_out}


def is_paused(state: State) -> bool:
    """Whether rollouts started now would be of no use.

    On-policy: the trainer works on a batch, or one lies ready. Otherwise: more waits than the operator wants, and the
    trainer can take some of it; where it cannot, what it lacks may be just what an environment is about to make.
    """
    if state.max_staleness == 0 and (state.run.parked or state.out or batches.is_ready(state)):
        return True
    return is_full(state) and (bool(state.out) or batches.is_ready(state))


def is_full(state: State) -> bool:
    """Whether as much waits as the operator allows: so many batches, or three quarters of the bytes."""
    rules = state.rules
    if rules.max_queue_batches is not None and state.run.batch_size > 0:
        waiting = state.queue.num_sequences + state.num_sequences_out
        if waiting >= rules.max_queue_batches * state.run.batch_size:
            return True
    return state.num_bytes * 4 >= rules.max_queue_bytes * 3


def status_env(state: State, env: Environment) -> dict[str, Any]:
    """GET /status-env. `allowance` is ours; unmodified clients take a pause from a worker limit of 0."""
    now = state.clock()
    weight = state.envs.weight_of(env, now)
    if state.run.registration is None or is_paused(state):
        return idle(state, weight)
    figures = _queue_figures(state, env, now)
    return {"current_step": state.kept_step, **figures, "env_weight": weight, "allowance": allowance(state, env)}


def idle(state: State, weight: float = 1.0) -> dict[str, Any]:
    """The answer that makes any client pause."""
    return {
        "current_step": state.kept_step,
        "queue_size": 0,
        "unallocated_fraction": 0.0,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": weight,
        "allowance": 0,
    }


def allowance(state: State, env: Environment) -> int:
    """Groups the environment may have in flight, so that the next batch is filled and not overfilled.

    What the batch lacks is divided among the environments that poll, rounded up: exact for one; with E of them at most
    E - 1 groups too many are promised at one time. Where the queue holds enough sequences that do not add up, each may
    add one group. A `max_staleness` of K > 1 lets as many batches lie ready as make K versions.
    """
    run = state.run
    if run.registration is None or is_paused(state):
        return 0
    size = env.group_size or state.queue.largest_of(env.id) or state.queue.largest()
    if size == 0:
        return 1  # adopted: its first group will tell
    num_batches = max(1, (state.max_staleness or 1) // run.registration.updates_per_batch)
    missing = run.batch_size * num_batches - _num_ahead(state)
    polling = state.envs.polling(state.clock())
    if missing >= size:
        return min(missing // size, math.ceil(missing / (size * max(1, len(polling)))))
    useful = can_ever_add_up({other.group_size for other in (*polling, env)}, run.batch_size)
    return 1 if useful and not batches.is_ready(state) else 0


def _num_ahead(state: State) -> int:
    """Sequences that the trainer will take before a group that is started now; one leased batch is being trained on."""
    leased = sum(batch.num_sequences for batch in state.out.values() if batch.standing is Standing.LEASED)
    others = state.num_sequences_out - leased
    return state.queue.num_sequences + others + max(0, leased - state.run.batch_size)


def _queue_figures(state: State, env: Environment, now: float) -> dict[str, Any]:
    queue, batch_size = state.queue, state.run.batch_size
    waiting = queue.sequences_by_env()
    for env_id, num in state.num_out.items():
        waiting[env_id] = waiting.get(env_id, 0) + num
    own, largest = waiting.pop(env.id, 0), max(1, queue.largest(), max(state.sizes_out, default=0))
    group_size = max(env.group_size or largest, queue.largest_of(env.id))
    shares = {other.id: other.min_share for other in state.envs.live(now)}
    others = 0
    if largest > 1:
        for other_id, num in waiting.items():
            share = shares.get(other_id, 0.0) if other_id is not None else 0.0
            others += max(0, math.ceil(num / largest) * largest - int(batch_size * share))
    return {
        "queue_size": (own + others) // group_size,
        "unallocated_fraction": 1.0 - min(1.0, sum(shares.values())),
        "self_queue_size": own // group_size,
        "max_group_size": largest,
    }


def metrics_text(state: State) -> str:
    """All of them."""
    return text_of((*_counters(state), *_gauges(state)), PREFIX)


def _counters(state: State) -> Iterator[Metric]:
    received = state.num_accepted + sum(state.set_aside.values())
    yield _one("groups_received_total", "counter", "Groups of this run, those set aside among them.", received)
    yield Metric(
        "groups_set_aside_total",
        "counter",
        "Groups of this run that no batch will have.",
        dict(state.set_aside),
        "reason",
    )
    yield _one(
        "groups_repeated_total",
        "counter",
        "Groups that came again with their key since the start.",
        state.num_duplicates,
    )
    yield _one(
        "batches_handed_out_total",
        "counter",
        "Batches of all runs, offered or leased, repeats too.",
        state.last_delivery,
    )


def _gauges(state: State) -> Iterator[Metric]:
    queue, now = state.queue, state.clock()
    standings = Counter(batch.standing for batch in state.out.values())
    oldest = next(iter(state.waiting.values()), None)
    age_s = 0.0 if oldest is None else max(0.0, now - oldest.received_at)
    yield _one("step", "gauge", "The run's step: batches delivered, and what it began with.", state.run.step)
    yield _one("registered", "gauge", "1 where a trainer has registered.", int(state.run.registration is not None))
    yield _one("paused", "gauge", "1 while the trainer works on an on-policy batch.", int(state.run.parked))
    yield _one("queued_groups", "gauge", "Groups that wait for a batch.", len(queue))
    yield _one("queued_sequences", "gauge", "Their sequences.", queue.num_sequences)
    yield _one("out_sequences", "gauge", "Sequences in batches that are not delivered yet.", state.num_sequences_out)
    yield _one("waiting_bytes", "gauge", "Bytes of groups queued, buffered, or in such batches.", state.num_bytes)
    yield _one("oldest_seconds", "gauge", "How long the oldest of these groups has waited.", age_s)
    yield _one("environments_live", "gauge", "Environments heard of lately.", len(state.envs.live(now)))
    yield Metric(
        "open_batches",
        "gauge",
        "Batches that are not delivered yet.",
        {standing.value: standings[standing] for standing in sorted(OPEN)},
        "standing",
    )
