"""A batch's way from the queue to a trainer, and the run that counts it.

    queue ──▶ OFFERED ── its reply was written whole ───▶ DELIVERED: step + 1, in nobody else's
       batch for ever
       │         │ the client was gone ▼                      ▲
       │      RETURNED ── the next question, under a new id ──┤
       │         ▲ nacked, or its time is up                  │
       └────▶ LEASED ──────────── acknowledged ───────────────┘

On-policy means the trainer's own version: `max_staleness` bounds the distance both ways. A trainer
that registers with a step before batches that it got went back to a checkpoint: what later weights
sampled is set aside.

A trainer whose reply was lost, or that crashed before the step, gets the batch delivered last once
more, and it counts once. What a question says it holds (`after`), and whether that batch answers it
again:

    after     the batch that came last    again where
    -------   -------------------------   ----------------------------------------------------------
    not said  any                         the run is on-policy, and the version that of the last
                                          question
    0         was not acknowledged        the version is that of the last question: nothing was
                                          trained on since
    0         was acknowledged            never: a trainer that leased it has learnt from it
    K         answered one who held K     any version: its reply was lost, whoever has trained since
                                          has not on this
    K         answered another question   never: it is another trainer's, or K itself

In every row no lease is asked for, and the batch is of this run, its size and its bound on
staleness; in those with `after`, the trainer did not register with a step that contains it. So
after a registration, when nothing is held: a trainer that died before its step has the version it
asked with, and gets its batch; one that died after it has a newer version, or a checkpoint with
that step; one that lost more has an older version. Those two get another batch.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from halteres.errors import Conflict, NotFound
from halteres.trajectories import batch_selection
from halteres.trajectories.posted_group import Problem, exceeds_batch, too_far
from halteres.trajectories.records import (
    Delivery,
    GroupRecord,
    Place,
    RunRecord,
    Standing,
    Versions,
)
from halteres.trajectories.schema import BatchQuery, Registration
from halteres.trajectories.state import State

# how long the reply of a batch may take to be written, before the batch answers another question
OFFER_S = 60.0


WHY_SETTLED = {
    Standing.REPLACED: "It came back first, and was served to another question under another id.",
    Standing.DELIVERED: "It is acknowledged.",
    Standing.BROKEN: "It came back, and was taken apart because it no longer fits the run.",
}


class LeaseLost(Conflict):
    """The batch is not the asker's any more."""

    code, status = "lease_lost", 409


# -- which batch


def span_for(state: State, version: int | None) -> Versions | None:
    """The policy versions that a batch may contain for a trainer at this version; None: any."""
    bound = state.max_staleness
    if bound is None or version is None:
        return None
    return version - bound, version + bound


def _is_within(versions: Versions | None, span: Versions | None) -> bool:
    """Whether all of these lie in the span; what is untagged does."""
    return span is None or versions is None or span[0] <= versions[0] <= versions[1] <= span[1]


def version_at_request(state: State, step: int) -> int | None:
    """The trainer's version when it asked for the batch after so many; None: it has not yet, or
    told none.

    Of a batch before those of this run, what it said with its first question: a deterministic
    environment samples the batch after k by the weights with which the trainer asked for the batch
    after k - lag, and a run has to begin.
    """
    run = state.run
    if run.registration is not None:
        step = max(step, run.registration.starting_step)
    if step == run.step:
        return run.asked_version
    for batch in reversed(state.settled.values()):
        if (
            batch.standing is Standing.DELIVERED
            and batch.step == step + 1
            and batch.groups[0] >= run.first_group
        ):
            return batch.version
    return None


def has_gone_back(run: RunRecord) -> bool:
    """Whether the trainer said at its registration that it has not done the steps of batches that
    it got.

    True from then on until it has a batch again. Only a trainer that names its run is believed
    about its step; one that merely asks with a smaller version may be late, or another.
    """
    if run.registration is None or run.registration.run_id is None:
        return False
    return run.last is not None and run.last.step is not None and run.last.step > run.step


def minima(state: State) -> list[batch_selection.Minimum]:
    """Minimum shares of the next batch; without those that starved for longer than the operator
    waits.
    """
    now = state.clock()
    patience_s = state.rules.min_share_patience_s
    registered = state.envs.minima(state.run.batch_size, now)
    if patience_s is None:
        return registered
    return [
        each
        for each in registered
        if not state.envs.by_id[each.env_id].starves_for(now) > patience_s
    ]


def choose(state: State) -> list[GroupRecord] | None:
    """The groups of the next batch; None if none can be formed."""
    by_weight = None
    if state.rules.composition == "weighted":
        by_weight = state.shares.copy()
    return batch_selection.choose(state.queue, state.run.batch_size, minima(state), by_weight)


def starved(state: State) -> batch_selection.Minimum | None:
    """The minimum share that holds every batch back."""
    return batch_selection.unmet(state.queue, state.run.batch_size, minima(state))


def is_ready(state: State) -> bool:
    """Whether a question for a batch would get one now."""
    batch_size = state.run.batch_size
    if batch_size <= 0:
        return False
    if any(batch.is_back for batch in state.out.values()):
        return True
    if state.queue.num_sequences < batch_size or starved(state):
        return False
    return batch_selection.can_add_up(state.queue.num_by_size, batch_size)


def next_batch(state: State, query: BatchQuery) -> Delivery | None:
    """The batch to serve now, if there is one. The run must be registered."""
    version = query.policy_version
    if version is None and state.max_staleness is not None:
        version = state.run.step
    state.save_run(replace(state.run, started=True))
    now = state.clock()
    for each in list(state.out.values()):  # offers and leases whose time is up come back whole
        if each.expires_at is not None and each.expires_at <= now:
            give_back(state, each.id)
    # the last batch that the trainer holds: acknowledged
    if query.after is not None and query.after in state.out:
        _deliver(state, state.out[query.after])
    span = span_for(state, version)
    # nothing of the weights that it left behind
    if span and version is not None and has_gone_back(state.run):
        span = span[0], version
    last = redelivery_of(state, query, version)
    if last is not None:
        if has_gone_back(state.run):
            _drop_outside(state, span, version)
        return _redeliver(state, last, version)
    _move_on(state, span, version)
    came_back = [each for each in state.out.values() if each.is_back]
    if came_back:
        # the oldest, however often it was handed out
        back = min(came_back, key=lambda each: min(each.groups))
        state.do(replace(back, standing=Standing.REPLACED))
        return _hand_out(state, back.groups, query, version)
    _note_starving(state, now)
    chosen = choose(state)
    if chosen is None:
        return None
    return _hand_out(state, tuple(group.id for group in chosen), query, version)


def _note_starving(state: State, now: float) -> None:
    """Since when each environment with a minimum share has had nothing for a batch."""
    batch_size = state.run.batch_size
    for minimum in state.envs.minima(batch_size, now):
        env = state.envs.by_id[minimum.env_id]
        if batch_selection.unmet(state.queue, batch_size, [minimum]) is None:
            env.starving_since = None
        elif env.starving_since is None:
            env.starving_since = now


def _redeliver(state: State, last: Delivery, version: int | None) -> Delivery:
    """Serve the batch that was delivered last once more; it counts once."""
    if version != last.version:
        # a trainer that dies before its step comes back with this one
        last = replace(last, version=version)
        state.do(last)
    step = max(state.run.step, last.step or 0)
    state.save_run(replace(state.run, step=step, last=last, asked_version=None))
    return last


def redelivery_of(state: State, query: BatchQuery, version: int | None) -> Delivery | None:
    """The batch that was delivered last, if this question is for it: see the table above."""
    last = state.run.last
    registration = state.run.registration
    after = query.after
    if query.lease is not None or last is None or last.num_sequences != state.run.batch_size:
        return None
    if not _is_within(last.versions, span_for(state, version)):
        return None
    same_version = version == last.version
    if after is None:
        if state.max_staleness == 0 and same_version:
            return last
        return None
    # What the trainer said when it registered that it had trained on.
    trained_step = -1
    if registration is not None and registration.run_id is not None:
        trained_step = registration.starting_step
    if last.step is not None and last.step <= trained_step:
        return None
    if last.held is None:
        return None
    answers = same_version
    if after != 0:
        answers = last.held == after
    if answers:
        return last
    return None


def _move_on(state: State, span: Versions | None, version: int | None) -> None:
    """The trainer asks for another batch: what fits none of its batches any more is set aside."""
    state.save_run(replace(state.run, asked_version=version, parked=False))
    batch_size = state.run.batch_size
    if state.queue.largest() > batch_size:  # came before the trainer said how large a batch is
        for group in [group for group in state.queue.groups.values() if group.size > batch_size]:
            state.put(group, Place.SET_ASIDE, exceeds_batch(group.size, batch_size))
    _drop_outside(state, span, version)
    for batch in [each for each in state.out.values() if each.is_back]:
        unfit = dict[int, Problem]()
        for group in map(state.waiting.__getitem__, batch.groups):
            if group.size > batch_size:
                unfit[group.id] = exceeds_batch(group.size, batch_size)
            elif not _is_within(group.versions, span):
                unfit[group.id] = too_far(group.versions, version, state.max_staleness)
        if unfit or batch.num_sequences != batch_size:
            dissolve(state, batch, unfit)


def _drop_outside(state: State, span: Versions | None, version: int | None) -> None:
    if span is None:
        return
    for group in state.queue.outside(*span):
        state.put(group, Place.SET_ASIDE, too_far(group.versions, version, state.max_staleness))


def _hand_out(
    state: State, groups: tuple[int, ...], query: BatchQuery, version: int | None
) -> Delivery:
    now = state.clock()
    members = [state.waiting[group_id] for group_id in groups]
    versions = None
    tagged = [group.versions for group in members if group.versions]
    if tagged:
        versions = min(low for low, _ in tagged), max(high for _, high in tagged)
    standing, valid_s = Standing.OFFERED, OFFER_S
    if query.lease is not None:
        standing, valid_s = Standing.LEASED, query.lease
    batch = Delivery(
        id=state.last_delivery + 1,
        standing=standing,
        version=version,
        groups=groups,
        num_sequences=sum(group.size for group in members),
        made_at=now,
        expires_at=now + valid_s,
        versions=versions,
        held=query.after or 0,
    )
    state.do(batch)
    return batch


# -- what becomes of a batch


def give_back(state: State, batch_id: int) -> None:
    """The batch reached nobody; nothing happens where it is settled already."""
    batch = state.out.get(batch_id)
    if batch is not None and not batch.is_back:
        state.do(replace(batch, standing=Standing.RETURNED, expires_at=None))


def take_back_offers(state: State) -> None:
    """The server that wrote these replies is gone: they answer the next question."""
    for each in list(state.out.values()):
        if each.standing is Standing.OFFERED:
            give_back(state, each.id)


def count_delivered(state: State, batch_id: int) -> None:
    """The reply of an offered batch was written whole; nothing happens where it is settled
    already.
    """
    batch = state.out.get(batch_id)
    if batch is not None and batch.standing is not Standing.LEASED:
        _deliver(state, batch)


def acknowledge(state: State, batch_id: int, long_ago: Delivery | None = None) -> Delivery:
    """A trainer has it for good. Safe to repeat; also while it is back, but not served to another
    yet.

    `long_ago`: what the store knows of a batch that memory does not know any more.

    Raises:
        NotFound, LeaseLost.
    """
    batch = state.out.get(batch_id)
    if batch is not None:
        return _deliver(state, replace(batch, held=None))
    settled = state.settled.get(batch_id, long_ago)
    if settled is not None and settled.standing is Standing.DELIVERED:
        return settled
    raise _not_theirs(state, batch_id, settled)


def nack(state: State, batch_id: int) -> Delivery:
    """A trainer gives a batch back. Safe to repeat. Raises NotFound, LeaseLost."""
    if batch_id not in state.out:
        raise _not_theirs(state, batch_id)
    give_back(state, batch_id)
    return state.out[batch_id]


def extend(state: State, batch_id: int, lease_s: float) -> Delivery:
    """A trainer needs longer: the lease ends `lease_s` seconds from now. Raises NotFound,
    LeaseLost.
    """
    batch = state.out.get(batch_id)
    if batch is None or batch.standing is Standing.OFFERED:
        raise _not_theirs(state, batch_id)
    leased = replace(batch, standing=Standing.LEASED, expires_at=state.clock() + lease_s)
    state.do(leased)
    return leased


def dissolve(state: State, batch: Delivery, unfit: dict[int, Problem]) -> None:
    """Take a batch that is out apart: what fits no batch is set aside, the rest queues at its old
    place.
    """
    groups = [state.waiting[group_id] for group_id in batch.groups]
    state.do(replace(batch, standing=Standing.BROKEN, expires_at=None))
    for group in groups:
        if group.id in unfit:
            state.put(group, Place.SET_ASIDE, unfit[group.id])
        else:
            state.put(group, Place.QUEUED)


def lose_tokens(state: State, batch_id: int, lost: set[int]) -> None:
    """The tokens of these groups of a batch cannot be read: they are set aside, the others queue
    again.
    """
    why = Problem("tokens_lost", "Its tokens cannot be read any more.")
    if batch_id in state.out:
        dissolve(state, state.out[batch_id], dict.fromkeys(lost, why))
    elif state.run.last is not None and state.run.last.id == batch_id:
        # it was counted, and is served no more
        state.save_run(replace(state.run, last=None, parked=False))


def _deliver(state: State, batch: Delivery) -> Delivery:
    run = state.run
    done = replace(batch, standing=Standing.DELIVERED, step=run.step + 1, expires_at=None)
    state.do(done)
    parked = state.max_staleness == 0 and batch.version is not None
    state.save_run(replace(run, step=run.step + 1, last=done, parked=parked, asked_version=None))
    return done


def _not_theirs(
    state: State, batch_id: int, long_ago: Delivery | None = None
) -> NotFound | LeaseLost:
    settled = state.settled.get(batch_id, long_ago)
    if settled is None and batch_id not in state.out and not 0 < batch_id <= state.last_delivery:
        return NotFound(f"There is no batch {batch_id}.", "No batch with that id was ever served.")
    why = "It is no lease."
    if settled is not None:
        why = WHY_SETTLED.get(settled.standing, why)
    return LeaseLost(
        f"Batch {batch_id} is not yours any more.", why, "Drop it, and ask for the next one."
    )


# -- the run


def register(state: State, registration: Registration) -> int:
    """A trainer registers: the same run goes on, another one begins. Gives the registration's uuid,
    128 bits.

    A trainer that names its run is believed about its step, because environments count evaluations
    and their end by it: after a crash it comes back at its last checkpoint. Nobody is parked any
    more where the bound is not 0 now.
    """
    uuid = secrets.randbits(128)
    run = state.run
    if run.registration is not None and run.registration.identity == registration.identity:
        step = run.step
        if registration.run_id is not None:
            step = registration.starting_step
        state.save_run(replace(run, registration=registration, uuid=str(uuid), step=step))
        state.save_run(replace(state.run, parked=state.run.parked and state.max_staleness == 0))
        return uuid
    first = run.first_group
    if run.registration is not None:
        first = archive(state)
    state.save_run(
        RunRecord(
            registration=registration,
            uuid=str(uuid),
            step=registration.starting_step,
            first_group=first,
        )
    )
    return uuid


def reset(state: State) -> None:
    """GET /reset_data: no trainer, no groups; environments keep their ids."""
    state.save_run(RunRecord(first_group=archive(state)))


def archive(state: State) -> int:
    """Take everything that waits out of the way of another run; gives the id of that run's first
    group.

    Environments count in that run once they poll or register: nobody says goodbye to the original's
    server, and the minimum share of one that is gone would hold back the first batches.
    """
    for batch in list(state.out.values()):
        state.do(replace(batch, standing=Standing.BROKEN, expires_at=None))
    for group in list(state.waiting.values()):
        state.put(group, Place.ARCHIVED)
    for env in list(state.envs.by_id.values()):
        state.save_env(replace(env.record, connected=False))
    return state.last_group + 1
