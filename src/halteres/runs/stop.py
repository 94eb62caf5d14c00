"""Stopping a run from any process.

Owns: the request (control/stop.json), waking the supervisor, waiting for the end within a deadline.
Never: ends a process of the run; the supervisor does, in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from halteres.config.control import Mode, write_stop_request
from halteres.runs import identity
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState

WAKE = signal.SIGUSR1
"""Tells a supervisor to look at its `control` folder."""

_LOOK_EVERY_S = 0.1


def stop_run(run: RunDirectory, mode: Mode = "now", deadline_s: float = 45) -> RunState:
    """Ask the run to stop and wait for it. Safe to repeat: a run that has ended answers with its final state.

    Args:
        run: which.
        mode: `now` interrupts the step in progress; `after_step` lets it end. Both write a checkpoint first.
        deadline_s: seconds to wait; 0 only asks.

    Returns:
        The state at the end, or at the deadline (`stopping`, or still `running` in mode `after_step`).
    """
    state = run.state()
    if state.terminal:
        return state
    waking = WAKE if _requested(run, mode) else signal.SIGTERM
    supervisor = run.state().supervisor  # read after the request is written: who has no pid here yet will find it
    if supervisor and identity.alive(supervisor):
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor["pid"], waking)
    return _wait(run, deadline_s)


def _requested(run: RunDirectory, mode: Mode) -> bool:
    """Write the request; False where the disk will not have it (SIGTERM says the same as mode `now`)."""
    try:
        write_stop_request(run.path / "control" / "stop.json", mode)
    except OSError:
        return False
    return True


def _wait(run: RunDirectory, deadline_s: float) -> RunState:
    ends = time.monotonic() + deadline_s
    while not (state := run.state()).terminal and time.monotonic() < ends:
        time.sleep(_LOOK_EVERY_S)
    return state
