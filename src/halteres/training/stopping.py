"""Ending early: a signal, a stop file, or the time limit.

Owns: whether an end was asked for, in which mode, and by whom; what signals do.
Never: ends anything itself, save on a second signal or when the grace after a signal is over.

    after_step   the batch under way is waited for and trained on, then the final checkpoint is
                 written
    now          no further batch is waited for; a pass under way ends (it is promised already),
                 then the checkpoint
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halteres.config.environ import Mode, read_stop_request
from halteres.training.failures import StopTimedOut

logger = logging.getLogger(__name__)

# after a signal the process is gone within 10 s, with or without its final checkpoint
SIGNAL_GRACE_S = 9.0


StopReason = Literal["time_limit", "asked", "signal"]


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Somebody wants an end."""

    mode: Mode
    why: str  # for people
    reason: StopReason = "asked"


class Stopping:
    """Whether to end early. Checked between waits; asking is idempotent, and "now" overrules
    "after_step".
    """

    def __init__(
        self,
        file: Path,
        max_minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._max_s, self._clock = file, (max_minutes or 0.0) * 60, clock
        self._started: float | None = None
        self._request: StopRequest | None = None

    def start_clock(self) -> None:
        """Training begins: the time limit counts from here."""
        self._started = self._clock()

    def ask(self, request: StopRequest) -> None:
        """Ask for an end."""
        if self._request is None or request.mode == "now":
            self._request = request

    def request(self) -> StopRequest | None:
        """What was asked for so far, by anybody."""
        if self._request is None or self._request.mode != "now":
            started = self._started
            if self._max_s and started is not None and self._clock() - started >= self._max_s:
                self.ask(
                    StopRequest(
                        "now", f"the limit of {self._max_s / 60:g} minutes is reached", "time_limit"
                    )
                )
            elif (mode := read_stop_request(self._file)) is not None:
                self.ask(StopRequest(mode, "a stop was requested"))
        return self._request

    @property
    def at_once(self) -> bool:
        """True where no further batch should be waited for."""
        request = self.request()
        return request is not None and request.mode == "now"


def obey_signals(stopping: Stopping) -> None:
    """SIGINT and SIGTERM ask for an end with a checkpoint; a second one ends the process at
    once.
    """
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def receive(number: signal.Signals) -> None:
        if seen:
            _leave(128 + number, f"{number.name} came twice; ended without a final checkpoint.")
        seen.append(number)
        logger.warning("%s: ending with a checkpoint; a second signal ends at once.", number.name)
        stopping.ask(StopRequest("now", f"{number.name} was received", "signal"))
        late = StopTimedOut(
            f"The final checkpoint was not written within {SIGNAL_GRACE_S:.0f} s of {number.name}.",
            "The training service did not answer in time.",
            "Resume from the last checkpoint in checkpoints.jsonl.",
        )
        loop.call_later(SIGNAL_GRACE_S, _leave, 1, late.sentence)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, receive, number)


def _leave(code: int, sentence: str) -> None:
    sys.stderr.write(f"error: {sentence}\n")
    sys.stderr.flush()
    os._exit(code)
