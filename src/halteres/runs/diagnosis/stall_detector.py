"""Finds stalls: nothing happens any more, or a process is stopped.

Owns: how long a step may take before it is told; telling a stopped process (SIGSTOP) from a slow one; the alert of a
reader who finds that the supervisor itself has stopped.
Never: ends anything.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from halteres.errors import HalteresError
from halteres.files import tail
from halteres.next_step import NextStep, Remedy
from halteres.observe.metrics import Row
from halteres.runs.diagnosis.case import Case
from halteres.runs.diagnosis.excursion import Excursion, Finding, number
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.alerts import Alert
from halteres.runs.state import RunState

RULE = "stalled"

HEARTBEAT_S = 5.0
"""How often a supervisor shows that it lives, and looks at this."""

STALE_S = 2.5 * HEARTBEAT_S
"""A heartbeat older than this, under a held lock: the supervisor does nothing any more."""

STEPS, LEAST_S = 10, 60.0
"""A step is overdue after so many times the median of the last ones, and after a minute at least: an evaluation on the
same engine makes steps three times as long."""

FIRST_STEP_S = 600.0
"""How long the first step may take once every role is ready: large models compile and warm up in it."""


class StallDetector:
    """What the supervisor looks at with every heartbeat."""

    def __init__(self, case: Case, clock: Callable[[], float] = time.monotonic) -> None:
        self._case, self._clock = case, clock
        self._last = clock()
        self._seconds: deque[float] = deque(maxlen=8)
        # Twice: the first look after our own sleep (SIGSTOP, a closed laptop) comes before the rows of meanwhile.
        self._overdue, self._stopped = Excursion(2, calm=1), Excursion(2, calm=1)

    def begin(self) -> None:
        """From here on steps can come."""
        self._last = self._clock()

    def step(self, row: Row) -> None:
        """A step is done."""
        self._last = self._clock()
        if (seconds := number(row, "time/step")) is not None:
            self._seconds.append(seconds)

    def look(self, processes: Mapping[str, Mapping[str, Any]], *, training: bool) -> Finding | None:
        """What there is to tell now. `training`: steps are to be expected."""
        stopped = [role for role, facts in processes.items() if facts.get("exit") is None and is_stopped(facts)]
        if self._stopped.begins(bool(stopped)):
            return self._tell_stopped({role: processes[role]["pid"] for role in stopped})
        passed, limit = self._clock() - self._last, self._limit_s()
        if not self._overdue.begins(training and passed > limit and not stopped):
            return None
        usual = f"a step takes {median(self._seconds):.2g} s" if self._seconds else "the first step is awaited"
        return Finding(
            evidence=f"No step was done for {passed:.0f} s; {usual}.",
            remedy=Remedy((self._case.logs("trainer"), self._case.logs("env"), *self._case.go_on_with({}))),
        )

    def _limit_s(self) -> float:
        return max(LEAST_S, STEPS * median(self._seconds)) if self._seconds else FIRST_STEP_S

    def _tell_stopped(self, pids: Mapping[str, int]) -> Finding:
        told = ", ".join(f"{role} (process {pid})" for role, pid in pids.items())
        return Finding(
            evidence=f"Stopped by a signal (SIGSTOP), neither running nor ended: {told}.",
            remedy=Remedy(
                self._case.go_on_with({}), f"or let it go on: kill -CONT {' '.join(map(str, pids.values()))}"
            ),
        )


def stalled(run: RunDirectory, state: RunState | None = None) -> Alert | None:
    """What a reader has to say of a supervisor that holds its lock and does nothing. Cheap where it does something.

    Args:
        run: which.
        state: where it was read just before.

    Returns:
        None for a run that has ended, or whose supervisor shows that it lives.
    """
    try:
        state = state or run.state()
        silent_s = time.time() - (run.path / "heartbeat").stat().st_mtime
    except (HalteresError, OSError):
        return None
    if state.terminal or silent_s < HEARTBEAT_S:
        return None
    who = state.supervisor or {}
    stopped = is_stopped(who)
    if not stopped and silent_s < STALE_S:
        return None
    why = f" Its process {who.get('pid')} was stopped by a signal (SIGSTOP)." if stopped else ""
    logs = NextStep("rl_get_logs", {"run_id": run.run_id, "role": "supervisor"})
    resume = NextStep("rl_start_training", {"resume_from": run.run_id})
    return Alert(
        rule=RULE,
        step=max(state.step, _last_step(run)),
        evidence=f"The run's supervisor lives, but has shown no sign of it for {silent_s:.0f} s.{why}",
        remedy=Remedy(
            (logs,),
            f"let it go on with kill -CONT {who.get('pid')}, or end it with kill -KILL {who.get('pid')} and then",
            (resume,),
        ),
    )


def _last_step(run: RunDirectory) -> int:
    """The newest in metrics.jsonl: a trainer may go on while the supervisor, and with it run.json, stands still."""
    return max((step for line in tail(run.path / "metrics.jsonl", 8) if (step := _step(line)) is not None), default=0)


def _step(line: str) -> int | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None


def is_stopped(who: Mapping[str, Any]) -> bool:
    """Whether a signal has stopped the process of this identity; False where there is no /proc to tell."""
    try:
        fields = Path(f"/proc/{who.get('pid')}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] in ("T", "t") and int(fields[19]) == who.get("start_time", int(fields[19]))
