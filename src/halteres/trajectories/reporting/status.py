"""What environments are told when they poll.

Owns: the figures of /status-env (spec: rule 2.6 of the original), the parked form of it, the allowance.
Never: changes anything but the time of the poll.

Sequences in open batches (offered, leased, come back) count as queued: they wait for the trainer as much as the rest.
"""

from __future__ import annotations

import math
from typing import Any

from halteres.trajectories.delivering import choice
from halteres.trajectories.forming.packing import can_ever_add_up
from halteres.trajectories.intake.environments import Environment
from halteres.trajectories.records import Standing
from halteres.trajectories.state import State


def status(state: State) -> dict[str, int]:
    """GET /status: the step, and groups that wait."""
    num_out = sum(len(batch.groups) for batch in state.out.values())
    return {"current_step": state.kept_step, "queue_size": len(state.queue) + num_out}


def is_paused(state: State) -> bool:
    """Whether rollouts started now would be of no use.

    On-policy: the trainer works on a batch, or one lies ready. Otherwise: more waits than the operator wants, and the
    trainer can take some of it; where it cannot, what it lacks may be just what an environment is about to make.
    """
    if state.max_staleness == 0 and (state.run.parked or state.out or choice.is_ready(state)):
        return True
    return is_full(state) and (bool(state.out) or choice.is_ready(state))


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
    return 1 if useful and not choice.is_ready(state) else 0


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
