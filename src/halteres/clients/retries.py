"""How often, and how long, a failing call is repeated; the caller says which errors are worth another attempt."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from halteres.errors import HalteresError, NotReady

T = TypeVar("T")

log = logging.getLogger(__name__)

_SAY_AFTER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Bounds of a repeated call; the wait doubles up to its longest, with jitter, or is what the server asks for."""

    attempts: int | None = 4  # None: as many as there is time for; what is waited for is then logged
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0
    within_s: float = 600.0  # from the first attempt; no attempt is begun later

    async def call(self, attempt: Callable[[], Awaitable[T]], on: tuple[type[Exception], ...]) -> T:
        """The first result; after the last attempt the last error, as it was raised."""
        began = time.monotonic()
        wait, is_logged = self.first_wait_s, self.attempts is not None
        for number in count(1):
            try:
                return await attempt()
            except on as error:
                given = error.details.get("retry_after_s") if isinstance(error, HalteresError) else None
                asked_s = given or 0.0
                is_late = time.monotonic() + max(wait, asked_s) > began + self.within_s
                if number == self.attempts or is_late:
                    raise
                if not is_logged and time.monotonic() - began > _SAY_AFTER_S:
                    is_logged = True
                    log.warning("Waiting, for %g s at most: %s", self.within_s, error)
            spread = random.uniform(0.5, 1.0)  # noqa: S311 - of many callers; decides nothing
            await asyncio.sleep(max(wait * spread, asked_s))
            wait = min(2 * wait, self.longest_wait_s)
        raise AssertionError("counting ends never")


async def until_ready(call: Callable[[], Awaitable[T]], within_s: float) -> T:
    """Repeat a call that raises NotReady, with growing waits or those the server asks for, for `within_s` at most."""
    retries = Retries(attempts=None, first_wait_s=0.05, longest_wait_s=1.0, within_s=within_s)
    try:
        return await retries.call(call, (NotReady,))
    except NotReady as error:
        why = f"It was waited for {within_s:g} s. {error.why}".strip()
        raise NotReady(error.what, why, "Start the server, or look at its log.") from error
