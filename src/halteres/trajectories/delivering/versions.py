"""Which policy versions a batch may contain.

Owns: the distance from the trainer's version, both ways; whether the trainer went back to a checkpoint; with which
version it asked for a batch.
Never: moves a group.
"""

from __future__ import annotations

from dataclasses import dataclass

from halteres.trajectories.records import RunRecord, Standing, Versions
from halteres.trajectories.state import State


@dataclass(frozen=True, slots=True)
class Span:
    """Versions from the oldest to the newest."""

    oldest: int
    newest: int

    def holds(self, versions: Versions | None) -> bool:
        """Whether all of these lie in it; what is untagged does."""
        return versions is None or self.oldest <= versions[0] <= versions[1] <= self.newest


def allowed(state: State, version: int | None) -> Span | None:
    """What a batch may contain for a trainer at this version; None: anything."""
    bound = state.max_staleness
    return None if bound is None or version is None else Span(version - bound, version + bound)


def wanted(state: State, version: int | None) -> Span | None:
    """As `allowed`; of a trainer that went back, nothing of the weights that it left behind."""
    span = allowed(state, version)
    return Span(span.oldest, version) if span and version is not None and has_gone_back(state.run) else span


def asked_with(state: State, step: int) -> int | None:
    """The trainer's version when it asked for the batch after so many; None: it has not yet, or told none.

    Of a batch before those of this run, what it said with its first question: a deterministic environment samples the
    batch after k by the weights with which the trainer asked for the batch after k - lag, and a run has to begin.
    """
    run = state.run
    step = max(step, run.registration.starting_step if run.registration else 0)
    if step == run.step:
        return run.asked_version
    for batch in reversed(state.settled.values()):
        if batch.standing is Standing.DELIVERED and batch.step == step + 1 and batch.groups[0] >= run.first_group:
            return batch.version
    return None


def has_gone_back(run: RunRecord) -> bool:
    """Whether the trainer said at its registration that it has not done the steps of batches that it got.

    True from then on until it has a batch again. Only a trainer that names its run is believed about its step; one
    that merely asks with a smaller version may be late, or another.
    """
    named = run.registration is not None and run.registration.run_id is not None
    return named and run.last is not None and run.last.step is not None and run.last.step > run.step
