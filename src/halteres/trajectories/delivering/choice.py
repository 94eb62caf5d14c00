"""The next batch of a state: its queue, minimum shares and composition, brought to `forming`.

Owns: what of the state batch forming is told.
Never: chooses (`forming` does), changes the state.
"""

from __future__ import annotations

from halteres.trajectories.forming import packing
from halteres.trajectories.records import GroupRecord
from halteres.trajectories.state import State


def minima(state: State) -> list[packing.Minimum]:
    """Minimum shares of the next batch; without those that starved for longer than the operator waits."""
    now, patience_s = state.clock(), state.rules.min_share_patience_s
    asked = state.envs.minima(state.run.batch_size, now)
    if patience_s is None:
        return asked
    return [each for each in asked if not state.envs.by_id[each.env_id].starves_for(now) > patience_s]


def note_starving(state: State) -> None:
    """Remember since when environments with a minimum share have had nothing that fits."""
    now, asked = state.clock(), state.envs.minima(state.run.batch_size, state.clock())
    for each in asked:
        state.envs.by_id[each.env_id].starve(now, packing.unmet(state.queue, state.run.batch_size, [each]) is not None)


def choose(state: State) -> list[GroupRecord] | None:
    """The groups of the next batch; None if none can be formed."""
    order = state.shares.copy() if state.rules.composition == "weighted" else None
    return packing.choose(state.queue, state.run.batch_size, minima(state), order)


def starved(state: State) -> packing.Minimum | None:
    """The minimum share that holds every batch back."""
    return packing.unmet(state.queue, state.run.batch_size, minima(state))


def is_ready(state: State) -> bool:
    """Whether a question for a batch would get one now."""
    if state.run.batch_size <= 0:
        return False
    if any(batch.is_back for batch in state.out.values()):
        return True
    if state.queue.num_sequences < state.run.batch_size or starved(state):
        return False
    return packing.can_add_up(state.queue.num_by_size, state.run.batch_size)
