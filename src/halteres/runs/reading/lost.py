"""The verdict over a run whose supervisor is gone.

Owns: what is then true of the run, of its step and of its processes.
Never: writes it (`directory`), or decides that the supervisor is gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from halteres.runs import identity
from halteres.runs.state import RunState

if TYPE_CHECKING:
    from halteres.runs.directory import RunDirectory


def verdict_over(run: RunDirectory, state: RunState) -> RunState:
    """The state of a run that was in `state` when its supervisor went."""
    newest = run.newest_checkpoint()
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
        last_checkpoint=newest,
        step=max([state.step, *(row["step"] for row in run.metrics() if isinstance(row.get("step"), int))]),
        ended_at=_last_heartbeat(run),
        processes={role: _ended(facts) for role, facts in state.processes.items()},
    )


def _ended(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A process of a run whose supervisor is gone: ended too, or just about to, and nobody saw how."""
    if facts.get("exit") is not None or not facts.get("pid"):
        return dict(facts)
    ending = identity.alive(facts)
    return {**facts, "exit": "unknown", "state": "ending" if ending else "ended with the supervisor"}


def _last_heartbeat(run: RunDirectory) -> float:
    try:
        return (run.path / "heartbeat").stat().st_mtime
    except OSError:
        return time.time()
