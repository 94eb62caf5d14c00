"""A trainer that asks for the batch it was last served, because it never got it.

Owns: when the batch delivered last answers a question once more, without counting twice.
Never: leases anything: a lease comes back by itself.

What a question says it holds (`after`), and whether the batch delivered last answers it again:

    after     the batch that came last    again where
    -------   -------------------------   ------------------------------------------------------------------------
    not said  any                         the run is on-policy, and the version that of the last question
    0         was not acknowledged        the version is that of the last question: nothing was trained on since
    0         was acknowledged            never: a trainer that leased it has learnt from it
    K         answered one who held K     any version: its reply was lost, whoever has trained since has not on this
    K         answered another question   never: it is another trainer's, or K itself

In every row no lease is asked for, and the batch is of this run, its size and its bound on staleness; in those with
`after`, the trainer did not register with a step that contains it. So after a registration, when nothing is held: a
trainer that died before its step has the version it asked with, and gets its batch; one that died after it has a newer
version, or a checkpoint with that step; one that lost more has an older version. Those two get another batch.
"""

from __future__ import annotations

from dataclasses import replace

from halteres.trajectories.delivering import versions
from halteres.trajectories.records import Delivery, DeliverySaved
from halteres.trajectories.state import State
from halteres.trajectories.wire.schema import BatchQuery


def lost(state: State, query: BatchQuery, version: int | None) -> Delivery | None:
    """The batch that was delivered last, if this question is for it."""
    last = state.run.last
    if query.lease is not None or last is None or last.num_sequences != state.run.batch_size:
        return None
    span = versions.allowed(state, version)
    fits = span is None or span.holds(last.versions)
    return last if fits and _is_asked_for(state, last, query.after, version) else None


def serve_again(state: State, last: Delivery, version: int | None) -> Delivery:
    """It answers another question, and counts once."""
    run = state.run
    if version != last.version:  # a trainer that dies before its step comes back with this one
        last = replace(last, version=version)
        state.do(DeliverySaved(last))
    state.save_run(replace(run, step=max(run.step, last.step or 0), last=last, asked_version=None))
    return last


def _is_asked_for(state: State, last: Delivery, after: int | None, version: int | None) -> bool:
    if after is None:
        return state.max_staleness == 0 and version == last.version
    if _is_done(state, last) or last.held is None:
        return False
    return version == last.version if after == 0 else last.held == after


def _is_done(state: State, last: Delivery) -> bool:
    """Whether the trainer said when it registered that it had trained on it."""
    registration = state.run.registration
    if registration is None or registration.run_id is None or last.step is None:
        return False
    return last.step <= registration.starting_step
