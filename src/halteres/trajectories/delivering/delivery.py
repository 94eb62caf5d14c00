"""The trainer's side: registration, batches, staleness, parking.

Owns: when a batch is served, to which policy version, and which groups are too old for it.
Never: waits. A batch repeated to a trainer that did not get it is the same batch, and counts once.

    /register ──▶ registered ──first GET /batch──▶ started ──batch delivered, max_staleness 0──▶ parked
                                                      ▲                                             │
                                                      └── the trainer moved on: it asks with another ◀┘
                                                          version, or says that it holds the batch

A trainer that asks with the version it was last served lost the reply, or crashed before the step: nothing has been
trained on that batch, so it is served again. One that asks with a smaller version went back to a checkpoint: what later
weights sampled is set aside. On-policy means the trainer's own version: `max_staleness` bounds the distance both ways.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from halteres.trajectories.forming import packing
from halteres.trajectories.intake.intake import exceeds_batch, stale
from halteres.trajectories.records import Delivered, Delivery, GroupRecord, Place, RunRecord
from halteres.trajectories.state import State
from halteres.trajectories.wire.schema import BatchQuery, Registration
from halteres.trajectories.wire.scored import Problem


def register(state: State, registration: Registration) -> int:
    """A trainer registers: the same run goes on, another one begins. Gives the registration's uuid, 128 bits.

    A trainer that names its run is believed about its step, because environments count evaluations and their end by it:
    after a crash it comes back at its last checkpoint.
    """
    uuid, run = secrets.randbits(128), state.run
    if run.registration is not None and run.registration.identity == registration.identity:
        step = run.step if registration.run_id is None else registration.starting_step
        state.save_run(replace(run, registration=registration, uuid=str(uuid), step=step))
        return uuid
    if run.registration is not None:
        state.archive()
    state.save_run(
        RunRecord(
            registration=registration,
            uuid=str(uuid),
            step=registration.starting_step,
            first_group=state.run.first_group,
        )
    )
    return uuid


def next_batch(state: State, query: BatchQuery) -> Delivery | None:
    """The batch to serve now, if there is one. The run must be registered."""
    run = state.run
    version = query.policy_version
    if version is None and run.max_staleness is not None:
        version = run.step
    state.save_run(replace(run, started=True))
    if run.last is not None and _was_lost(run, run.last, query, version):
        state.save_run(replace(state.run, step=max(run.step, run.last.step)))
        return run.last
    _move_on(state, version)
    groups = packing.choose(state.queue, run.batch_size, state.minima())
    return None if groups is None else _deliver(state, groups, version)


def _was_lost(run: RunRecord, last: Delivery, query: BatchQuery, version: int | None) -> bool:
    """Whether the trainer asks for the batch it was last served."""
    if version != last.version or last.num_sequences != run.batch_size:
        return False
    return run.max_staleness == 0 if query.after is None else query.after != last.id


def _move_on(state: State, version: int | None) -> None:
    run = state.run
    before = run.asked_version
    state.save_run(replace(run, asked_version=version, parked=False))
    _set_aside_oversized(state)
    if run.max_staleness is None or version is None:
        return
    went_back = before is not None and version < before
    newest = version if went_back else version + run.max_staleness
    for group in state.queue.outside(version - run.max_staleness, newest):
        state.move(group, Place.SET_ASIDE, _lag(group, version, run.max_staleness))


def _lag(group: GroupRecord, version: int, max_staleness: int) -> Problem:
    low, high = group.versions or (version, version)
    if low < version - max_staleness:
        return stale(low, version, max_staleness)
    return Problem("ahead", f"Sampled by version {high}; the trainer is at {version}, back at a checkpoint.")


def _set_aside_oversized(state: State) -> None:
    """Groups that came before the trainer said how large a batch is."""
    batch_size = state.run.batch_size
    for size in [size for size in state.queue.num_by_size if size > batch_size]:
        for group in list(state.queue.of_size(size)):
            state.move(group, Place.SET_ASIDE, exceeds_batch(size, batch_size))


def _deliver(state: State, groups: list[GroupRecord], version: int | None) -> Delivery:
    run = state.run
    state.last_delivery += 1
    delivery = Delivery(
        id=state.last_delivery,
        step=run.step + 1,
        version=version,
        groups=tuple(group.id for group in groups),
        num_sequences=sum(group.size for group in groups),
        delivered_at=state.clock(),
    )
    for group in groups:
        state.queue.remove(group)
    state.changes.append(Delivered(delivery, before=run.last.groups if run.last else ()))
    parked = run.max_staleness == 0 and version is not None
    state.save_run(replace(run, step=delivery.step, last=delivery, parked=parked))
    return delivery
