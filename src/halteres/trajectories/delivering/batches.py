"""Which batch answers a trainer's question, and when it counts.

Owns: the life of a batch from the queue to a trainer; the run's step; which groups are too old for a batch.
Never: waits, reads tokens, writes a reply.

    queue ──▶ OFFERED ── its reply was written whole ───▶ DELIVERED: step + 1, in nobody else's batch for ever
       │         │ the client was gone ▼                      ▲
       │      RETURNED ── the next question, under a new id ──┤
       │         ▲ nacked, or its time is up                  │
       └────▶ LEASED ──────────── acknowledged ───────────────┘

A trainer whose reply was lost, or that crashed before the step, gets the same batch, which counts once (`again`). One
that registers with a step before batches that it got went back to a checkpoint: what later weights sampled is set
aside. On-policy means the trainer's own version: `max_staleness` bounds the distance both ways (`versions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from halteres.errors import Conflict, NotFound
from halteres.trajectories.delivering.again import lost, serve_again
from halteres.trajectories.delivering.choice import choose, note_starving
from halteres.trajectories.delivering.versions import Span, has_gone_back, wanted
from halteres.trajectories.group_checks import Problem, exceeds_batch
from halteres.trajectories.intake.fitness import too_far
from halteres.trajectories.records import Delivery, DeliverySaved, GroupRecord, Place, Standing
from halteres.trajectories.state import State
from halteres.trajectories.wire.schema import BatchQuery

OFFER_S = 60.0
"""How long the reply of a batch may take to be written, before the batch answers another question."""


class LeaseLost(Conflict):
    """The batch is not the asker's any more."""

    code, status = "lease_lost", 409


def next_batch(state: State, query: BatchQuery) -> Delivery | None:
    """The batch to serve now, if there is one. The run must be registered."""
    run, version = state.run, query.policy_version
    if version is None and state.max_staleness is not None:
        version = run.step
    state.save_run(replace(run, started=True))
    take_back_expired(state)
    _take_as_held(state, query.after)
    if (last := lost(state, query, version)) is not None:
        if has_gone_back(state.run):
            _set_aside_outside(state, wanted(state, version), version)
        return serve_again(state, last, version)
    _move_on(state, version)
    came_back = [each for each in state.out.values() if each.is_back]
    if came_back:
        back = min(came_back, key=lambda each: min(each.groups))  # the oldest, however often it was handed out
        state.do(DeliverySaved(replace(back, standing=Standing.REPLACED)))
        return _hand_out(state, back.groups, query, version)
    note_starving(state)
    chosen = choose(state)
    return None if chosen is None else _hand_out(state, tuple(group.id for group in chosen), query, version)


def take_back_expired(state: State) -> None:
    """Offers and leases whose time is up come back whole."""
    now = state.clock()
    for each in list(state.out.values()):
        if not each.is_back and each.expires_at is not None and each.expires_at <= now:
            give_back(state, each.id)


def take_back_offers(state: State) -> None:
    """The server that wrote these replies is gone: they answer the next question."""
    for each in list(state.out.values()):
        if each.standing is Standing.OFFERED:
            give_back(state, each.id)


def give_back(state: State, batch_id: int) -> None:
    """The batch reached nobody; nothing happens where it is settled already."""
    batch = state.out.get(batch_id)
    if batch is not None and not batch.is_back:
        state.do(DeliverySaved(replace(batch, standing=Standing.RETURNED, expires_at=None)))


def hand_over(state: State, batch_id: int) -> None:
    """The reply of an offered batch was written whole; nothing happens where it is settled already."""
    if (batch := state.out.get(batch_id)) is not None and batch.standing is not Standing.LEASED:
        _deliver(state, batch)


def must_look_up(state: State, batch_id: int) -> bool:
    """Whether only the store knows what became of a batch: memory keeps the newest."""
    return 0 < batch_id <= state.last_delivery and batch_id not in state.out and batch_id not in state.settled


def acknowledge(state: State, batch_id: int, looked_up: Delivery | None = None) -> Delivery:
    """A trainer has it for good. Safe to repeat; also while it is back, but not served to another yet.

    Args:
        state: of the server.
        batch_id: of the batch.
        looked_up: what the store knows of it, where that `must_look_up`.

    Raises:
        NotFound, LeaseLost.
    """
    batch = state.out.get(batch_id)
    if batch is not None:
        return _deliver(state, replace(batch, held=None))
    settled = state.settled.get(batch_id, looked_up)
    if settled is not None and settled.standing is Standing.DELIVERED:
        return settled
    raise _not_theirs(state, batch_id, settled)


def nack(state: State, batch_id: int) -> Delivery:
    """A trainer gives a batch back. Safe to repeat.

    Raises:
        NotFound, LeaseLost.
    """
    if batch_id not in state.out:
        raise _not_theirs(state, batch_id)
    give_back(state, batch_id)
    return state.out[batch_id]


def extend(state: State, batch_id: int, lease_s: float) -> Delivery:
    """A trainer needs longer: the lease ends `lease_s` seconds from now.

    Raises:
        NotFound, LeaseLost.
    """
    batch = state.out.get(batch_id)
    if batch is None or batch.standing is Standing.OFFERED:
        raise _not_theirs(state, batch_id)
    leased = replace(batch, standing=Standing.LEASED, expires_at=state.clock() + lease_s)
    state.do(DeliverySaved(leased))
    return leased


def dissolve(state: State, batch: Delivery, unfit: dict[int, Problem]) -> None:
    """Take a batch that is out apart: what fits no batch is set aside, the rest queues at its old place."""
    groups = [state.waiting[group_id] for group_id in batch.groups]
    state.do(DeliverySaved(replace(batch, standing=Standing.BROKEN, expires_at=None)))
    for group in groups:
        problem = unfit.get(group.id)
        state.put(group, Place.SET_ASIDE if problem else Place.QUEUED, problem)


def _not_theirs(state: State, batch_id: int, looked_up: Delivery | None = None) -> NotFound | LeaseLost:
    settled = state.settled.get(batch_id, looked_up)
    if settled is None and batch_id not in state.out and not 0 < batch_id <= state.last_delivery:
        return NotFound(f"There is no batch {batch_id}.", "No batch with that id was ever served.")
    why = {
        Standing.REPLACED: "It came back first, and was served to another question under another id.",
        Standing.DELIVERED: "It is acknowledged.",
        Standing.BROKEN: "It came back, and was taken apart because it no longer fits the run.",
    }.get(settled.standing if settled else Standing.OFFERED, "It is no lease.")
    return LeaseLost(f"Batch {batch_id} is not yours any more.", why, "Drop it, and ask for the next one.")


def _hand_out(state: State, groups: tuple[int, ...], query: BatchQuery, version: int | None) -> Delivery:
    now, members = state.clock(), [state.waiting[group_id] for group_id in groups]
    tagged = [group.versions for group in members if group.versions]
    batch = Delivery(
        id=state.last_delivery + 1,
        standing=Standing.OFFERED if query.lease is None else Standing.LEASED,
        version=version,
        groups=groups,
        num_sequences=sum(group.size for group in members),
        made_at=now,
        expires_at=now + (OFFER_S if query.lease is None else query.lease),
        versions=(min(low for low, _ in tagged), max(high for _, high in tagged)) if tagged else None,
        held=query.after or 0,
    )
    state.do(DeliverySaved(batch))
    return batch


def _deliver(state: State, batch: Delivery) -> Delivery:
    run = state.run
    done = replace(batch, standing=Standing.DELIVERED, step=run.step + 1, expires_at=None)
    state.do(DeliverySaved(done))
    parked = state.max_staleness == 0 and batch.version is not None
    state.save_run(replace(run, step=run.step + 1, last=done, parked=parked, asked_version=None))
    return done


def _take_as_held(state: State, batch_id: int | None) -> None:
    """The trainer names the last batch it holds: that acknowledges it."""
    if batch_id is not None and batch_id in state.out:
        _deliver(state, state.out[batch_id])


def _move_on(state: State, version: int | None) -> None:
    """The trainer asks for another batch: what fits none of its batches any more is set aside."""
    run = state.run
    state.save_run(replace(run, asked_version=version, parked=False))
    _set_aside_oversized(state)
    span = wanted(state, version)
    _set_aside_outside(state, span, version)
    for batch in [each for each in state.out.values() if each.is_back]:
        unfit = dict(_unfit(state, batch, span, version))
        if unfit or batch.num_sequences != run.batch_size:
            dissolve(state, batch, unfit)


def _set_aside_outside(state: State, span: Span | None, version: int | None) -> None:
    for group in state.queue.outside(span.oldest, span.newest) if span else ():
        state.put(group, Place.SET_ASIDE, too_far(group, version, state.max_staleness))


def _unfit(state: State, batch: Delivery, span: Span | None, version: int | None) -> Iterator[tuple[int, Problem]]:
    for group in map(state.waiting.__getitem__, batch.groups):
        if group.size > state.run.batch_size:
            yield group.id, exceeds_batch(group.size, state.run.batch_size)
        elif span and not span.holds(group.versions):
            yield group.id, too_far(group, version, state.max_staleness)


def _set_aside_oversized(state: State) -> None:
    """Groups that came before the trainer said how large a batch is."""
    batch_size = state.run.batch_size
    for size in [size for size in state.queue.num_by_size if size > batch_size]:
        groups: list[GroupRecord] = list(state.queue.of_size(size))
        for group in groups:
            state.put(group, Place.SET_ASIDE, exceeds_batch(size, batch_size))
