"""Why a sound group can be in no batch of a run.

Owns: the reasons that depend on the run: too large, too old, too new, of unknown version.
Never: looks into a group (`wire.contents` does), moves one.
"""

from __future__ import annotations

from halteres.trajectories.group_checks import Problem, exceeds_batch, stale
from halteres.trajectories.posted_group import Scored
from halteres.trajectories.records import GroupRecord
from halteres.trajectories.state import State


def misfit(state: State, scored: Scored) -> Problem | None:
    """What keeps a group that is posted now out of every batch."""
    run, bound, version = state.run, state.max_staleness, state.run.known_version
    if run.registration and scored.size > run.batch_size:
        return exceeds_batch(scored.size, run.batch_size)
    if scored.versions is None:
        return _untagged() if state.rules.require_version else None
    if bound is None or version is None or version - scored.versions[0] <= bound:
        return None
    return stale(scored.versions[0], version, bound)


def too_far(group: GroupRecord, version: int | None, bound: int | None) -> Problem:
    """The problem of a group that waited until it was too old, or that a trainer went back behind."""
    asked, lag = version or 0, bound or 0
    low, high = group.versions or (asked, asked)
    if low < asked - lag:
        return stale(low, asked, lag)
    return Problem("ahead", f"Sampled by version {high}; the trainer is at {asked}, and allows a distance of {lag}.")


def _untagged() -> Problem:
    return Problem("untagged", "The group carries no policy_version, and this server asks for one.")
