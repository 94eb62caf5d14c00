"""How often, and how long, a failing call is repeated; the caller says which errors are worth another attempt."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from halteres.errors import NotReady

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
_SAY_AFTER_S = 3.0


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


async def until_ready(call: Callable[[], Awaitable[Any]], within_s: float) -> Any:
    """Repeat a call that raises NotReady, with growing waits or those the server asks for, for `within_s` at most."""
    began = time.monotonic()
    wait, has_warned = _FIRST_WAIT_S, False
    while True:
        try:
            return await call()
        except NotReady as error:
            if not has_warned and time.monotonic() - began > _SAY_AFTER_S:
                has_warned = True
                log.warning("Waiting, for %g s at most: %s", within_s, error.sentence)
            asked_s = error.details.get("retry_after_s") or 0.0
            if time.monotonic() + max(wait, asked_s) > began + within_s:
                why = f"It was waited for {within_s:g} s. {error.why}".strip()
                raise NotReady(error.what, why, "Start the server, or look at its log.") from error
        spread = random.uniform(0.8, 1.2)  # noqa: S311 - of many callers; decides nothing
        await asyncio.sleep(max(wait * spread, asked_s))
        wait = min(wait * 1.5, _LONGEST_WAIT_S)
