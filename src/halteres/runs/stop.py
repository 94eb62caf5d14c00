"""Stopping a run from any process: a request in its `control` folder, and a signal that wakes its supervisor."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from halteres.config.control import Mode, write_stop_request
from halteres.process import alive
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState

WAKE = signal.SIGUSR1
"""Tells a supervisor to look at its `control` folder."""


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
    wake: signal.Signals = WAKE
    try:
        write_stop_request(run.path / "control" / "stop.json", mode)
    except OSError:  # a full disk: SIGTERM says the same as mode `now`
        wake = signal.SIGTERM
    supervisor = run.state().supervisor  # read after the request is written: who has no pid here yet will find it
    if supervisor and alive(supervisor):
        with suppress(ProcessLookupError):
            os.kill(supervisor["pid"], wake)
    ends = time.monotonic() + deadline_s
    while not (state := run.state()).terminal and time.monotonic() < ends:
        time.sleep(0.1)
    return state
