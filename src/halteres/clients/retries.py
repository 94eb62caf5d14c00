"""How often, and how long, a failing call is repeated.

Owns: attempts, waits between them, the deadline over all of them.
Never: decides which errors are worth another attempt; the caller names them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Bounds of a repeated call; the wait doubles up to its longest, with jitter."""

    attempts: int = 4
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0
    within_s: float = 600.0  # from the first attempt; no attempt is begun later

    async def call(self, attempt: Callable[[], Awaitable[T]], on: tuple[type[Exception], ...]) -> T:
        """The first result; after the last attempt the last error, as it was raised."""
        deadline = time.monotonic() + self.within_s
        wait = self.first_wait_s
        for remaining in range(self.attempts - 1, -1, -1):
            try:
                return await attempt()
            except on:
                if remaining == 0 or time.monotonic() + wait > deadline:
                    raise
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 - spreads callers, decides nothing
            wait = min(2 * wait, self.longest_wait_s)
        raise AssertionError("a Retries has at least one attempt")
