"""What of uvicorn's words reaches the log.

Owns: how often a warning that any stranger can cause is written; the tracebacks that tell nothing.
Never: hides an error of ours.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 60.0
"""The same warning is written so often at most."""


@dataclass(slots=True)
class Told:
    """A warning that was written."""

    at: float  # s
    unwritten: int = 0  # ... and came again since


class Seldom(logging.Filter):
    """Lets each warning through once a minute, with the number of those held back before; no line per bad request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._told = clock, dict[str, Told]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False  # uvicorn has said in a line of its own that it cancels what did not end in time
        return record.levelno != logging.WARNING or self._due(record)

    def _due(self, record: logging.LogRecord) -> bool:
        now, before = self._clock(), self._told.get(record.msg)
        if before is not None and now - before.at < EVERY_S:
            before.unwritten += 1
            return False
        self._told[record.msg] = Told(now)
        if before is not None and before.unwritten:
            record.msg = f"{record.msg} ({before.unwritten} more since the last such line.)"
        return True


SELDOM = Seldom()


def quieten() -> None:
    """For this process; repeated, it changes nothing."""
    logging.getLogger("uvicorn.error").addFilter(SELDOM)
