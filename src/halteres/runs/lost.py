"""The verdict over a run whose supervisor is gone.

Owns: what is then true of the run, of its step and of its processes.
Never: writes it (`directory`), or decides that the supervisor is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from halteres.runs import identity
from halteres.runs.state import RunState


def verdict_over(state: RunState, newest: Mapping[str, Any] | None, step: int, ended_at: float) -> RunState:
    """The state of a run that was in `state` when its supervisor went.

    Args:
        state: as it was last written.
        newest: checkpoint to go on from.
        step: the last that a metric tells of.
        ended_at: when the supervisor was last alive; unix seconds.
    """
    go_on = (
        f"Go on from step {newest['step']}: {state.resume_command}"
        if newest
        else "It has no checkpoint yet: start it again."
    )
    return msgspec.structs.replace(
        state,
        status="failed",
        code="supervisor_lost",
        error=f"The run's supervisor is gone; its processes ended with it. {go_on}",
        exit={"process": "supervisor", "code": None},
        resumable=newest is not None,
        last_checkpoint=None if newest is None else dict(newest),
        step=max(state.step, step),
        ended_at=ended_at,
        processes={role: _ended(facts) for role, facts in state.processes.items()},
    )


def _ended(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A process of a run whose supervisor is gone: ended too, or just about to, and nobody saw how."""
    if facts.get("exit") is not None or not facts.get("pid"):
        return dict(facts)
    ending = identity.alive(facts)
    return {**facts, "exit": "unknown", "state": "ending" if ending else "ended with the supervisor"}
