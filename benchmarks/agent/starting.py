"""Runs that a task begins with.

Owns: starting one, waiting for it within a deadline.
Never: waits for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from halteres.config.resolution import resolve_settings
from halteres.errors import NotReady
from halteres.runs.directory import RunDirectory
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import start_run
from halteres.runs.state import RunState

WITHIN_S, LOOK_EVERY_S = 300.0, 0.05


def begin(environment: str, *edits: str) -> RunDirectory:
    """Start a run."""
    asked = resolve_settings(environment, None, edits)
    return start_run(plan_run(asked))


def until_step(run: RunDirectory, step: int) -> RunState:
    """Its state once it has done so many steps."""
    return _until(run, lambda state: state.step >= step)


def until_ended(run: RunDirectory) -> RunState:
    """Its state once it has ended."""
    return _until(run, lambda state: state.terminal)


def _until(run: RunDirectory, holds: Callable[[RunState], bool]) -> RunState:
    ends = time.monotonic() + WITHIN_S
    while not holds(state := run.state()):
        if state.terminal or time.monotonic() > ends:
            raise NotReady(
                f"The task's run {run.run_id} is {state.status} at step {state.step}.",
                state.error or "",
            )
        time.sleep(LOOK_EVERY_S)
    return state
