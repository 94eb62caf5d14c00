"""What environments are told when they poll.

Owns: the figures of /status-env (spec: rule 2.6 of the original), the parked form of it, the allowance.
Never: changes anything but the time of the poll.
"""

from __future__ import annotations

import math
from typing import Any

from halteres.trajectories.forming.packing import can_ever_add_up
from halteres.trajectories.intake.environments import Environment
from halteres.trajectories.state import State


def status(state: State) -> dict[str, int]:
    """GET /status: the step, and groups queued."""
    return {"current_step": state.run.step, "queue_size": len(state.queue)}


def is_paused(state: State) -> bool:
    """Whether rollouts started now would be too old for any batch: the trainer works on one, or one lies ready."""
    return state.run.parked or (state.run.max_staleness == 0 and state.batch_is_ready())


def status_env(state: State, env: Environment) -> dict[str, Any]:
    """GET /status-env. `allowance` is ours; unmodified clients take a pause from a worker limit of 0."""
    env.last_poll = now = state.clock()
    weight = state.envs.weight_of(env, now)
    if state.run.registration is None or is_paused(state):
        return idle(state, weight)
    figures = _queue_figures(state, env, now)
    return {"current_step": state.run.step, **figures, "env_weight": weight, "allowance": allowance(state, env)}


def idle(state: State, weight: float = 1.0) -> dict[str, Any]:
    """The answer that makes any client pause."""
    return {
        "current_step": state.run.step,
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
    add one group. A `max_staleness` of K > 1 lets K batches lie ready.
    """
    run, queue = state.run, state.queue
    if run.registration is None or is_paused(state):
        return 0
    size = env.group_size or queue.largest_of(env.id) or queue.largest()
    if size == 0:
        return 1  # adopted: its first group will tell
    missing = run.batch_size * max(1, run.max_staleness or 1) - queue.num_sequences
    polling = state.envs.polling(state.clock())
    if missing >= size:
        return min(missing // size, math.ceil(missing / (size * max(1, len(polling)))))
    useful = can_ever_add_up({other.group_size for other in (*polling, env)}, run.batch_size)
    return 1 if useful and not state.batch_is_ready() else 0


def _queue_figures(state: State, env: Environment, now: float) -> dict[str, Any]:
    queue, batch_size = state.queue, state.run.batch_size
    own, largest = queue.sequences_of(env.id), max(1, queue.largest())
    group_size = max(env.group_size or largest, queue.largest_of(env.id))
    shares = {other.id: other.min_share for other in state.envs.live(now)}
    others = 0
    if largest > 1:
        for other_id, num in queue.sequences_by_env().items():
            if other_id != env.id:
                share = shares.get(other_id, 0.0) if other_id is not None else 0.0
                others += max(0, math.ceil(num / largest) * largest - int(batch_size * share))
    return {
        "queue_size": (own + others) // group_size,
        "unallocated_fraction": 1.0 - min(1.0, sum(shares.values())),
        "self_queue_size": own // group_size,
        "max_group_size": largest,
    }
