"""Whether the event loop of an environment's process hangs: it was asked to touch a file every
second (`environments.heartbeat`), and has not for too long.

Only what was seen to stand still counts: while we sleep ourselves (SIGSTOP, a closed laptop), or
the process is stopped by a signal, no silence adds up. A process that has not begun to beat, or has
ended it, is not watched: it loads its tasks, or takes its leave.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halteres.config.environ import AskedHeartbeat
from halteres.files import NOT_JSON, read_regular
from halteres.process import is_stopped

LOOK_S = 1.0  # between two looks
MOST_PER_LOOK_S = 2 * LOOK_S  # of silence; more has passed where we slept

STUCK_S = 120.0
"""The limit of an environment whose settings have no `stuck_s`, as one of atroposlib's."""


@dataclass(slots=True)
class HangWatch:
    """Watches one process after another that are asked for the same heartbeat."""

    asked: AskedHeartbeat
    clock: Callable[[], float] = time.monotonic
    silent_s: float = 0.0  # seconds without a beat, up to the last look
    _last_beat: int | None = None  # ns, as the file system has it
    _looked_at: float = field(default=0.0)

    @classmethod
    def of(cls, file: Path, env: Mapping[str, Any]) -> HangWatch:
        """Of an environment with these settings, which touches this file."""
        limit = env.get("stuck_s")
        limit_s = STUCK_S
        if isinstance(limit, int | float):
            limit_s = float(limit)
        return cls(AskedHeartbeat(file, limit_s))

    def begin(self) -> None:
        """Another process is about to be started."""
        self.asked.file.unlink(missing_ok=True)
        self.silent_s, self._last_beat = 0.0, None

    def is_hung(self, who: Mapping[str, Any]) -> bool:
        """One look. `who`: the process's identity."""
        now = self.clock()
        passed_s = min(now - self._looked_at, MOST_PER_LOOK_S)
        self._looked_at = now
        try:
            beat = self.asked.file.stat().st_mtime_ns
        except OSError:
            beat = None
        if beat is None or beat != self._last_beat or is_stopped(who):
            self._last_beat, self.silent_s = beat, 0.0
            return False
        self.silent_s += passed_s
        return self.has_hung

    @property
    def has_hung(self) -> bool:
        """What the last look found."""
        return 0 < self.asked.limit_s <= self.silent_s

    @property
    def at_work_on(self) -> dict[str, Any]:
        """The draw on whose item the loop is at work (draw_step, ordinal, drawing); empty where it
        is none, or none is known.
        """
        try:
            found = json.loads(read_regular(self.asked.file))
        except (OSError, *NOT_JSON):
            return {}
        if isinstance(found, dict) and {"draw_step", "ordinal"} <= found.keys():
            return found
        return {}
