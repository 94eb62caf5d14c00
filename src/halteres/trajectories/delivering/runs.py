"""A trainer's run: it begins, goes on after a restart, makes room for another.

Owns: what makes a run the same one; what happens to the groups and environments of a run that is over.
Never: forms a batch.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from halteres.trajectories.records import DeliverySaved, Place, RunRecord, Standing
from halteres.trajectories.state import State
from halteres.trajectories.wire.schema import Registration


def register(state: State, registration: Registration) -> int:
    """A trainer registers: the same run goes on, another one begins. Gives the registration's uuid, 128 bits.

    A trainer that names its run is believed about its step, because environments count evaluations and their end by it:
    after a crash it comes back at its last checkpoint. Nobody is parked any more where the bound is not 0 now.
    """
    uuid, run = secrets.randbits(128), state.run
    if run.registration is not None and run.registration.identity == registration.identity:
        step = run.step if registration.run_id is None else registration.starting_step
        state.save_run(replace(run, registration=registration, uuid=str(uuid), step=step))
        state.save_run(replace(state.run, parked=state.run.parked and state.max_staleness == 0))
        return uuid
    first = run.first_group if run.registration is None else archive(state)
    state.save_run(
        RunRecord(registration=registration, uuid=str(uuid), step=registration.starting_step, first_group=first)
    )
    return uuid


def reset(state: State) -> None:
    """GET /reset_data: no trainer, no groups; environments keep their ids."""
    state.save_run(RunRecord(first_group=archive(state)))


def archive(state: State) -> int:
    """Take everything that waits out of the way of another run; gives the id of that run's first group.

    Environments count in that run once they poll or register: nobody says goodbye to the original's server, and the
    minimum share of one that is gone would hold back the first batches.
    """
    for batch in list(state.out.values()):
        state.do(DeliverySaved(replace(batch, standing=Standing.BROKEN, expires_at=None)))
    for group in list(state.waiting.values()):
        state.put(group, Place.ARCHIVED)
    for env in list(state.envs.by_id.values()):
        state.save_env(replace(env.record, connected=False))
    return state.last_group + 1
