"""How often, and how long, a failing call is repeated; the caller says which errors are worth
another attempt.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from halteres.errors import HalteresError, NotReady

T = TypeVar("T")
Errors = tuple[type[Exception], ...]

log = logging.getLogger(__name__)

_LOGGED_AFTER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Bounds of a repeated call; the wait doubles up to its longest, with jitter, or is what the
    server asks for.
    """

    # None: as many as there is time for; what is waited for is then logged
    attempts: int | None = 4
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0
    within_s: float = 600.0  # from the first attempt; no attempt is begun later

    @classmethod
    def for_seconds(cls, within_s: float, longest_wait_s: float = 1.0) -> Self:
        """As many attempts as there is time for."""
        return cls(
            attempts=None, first_wait_s=0.05, longest_wait_s=longest_wait_s, within_s=within_s
        )

    async def call(self, attempt: Callable[[], Awaitable[T]], on: Errors = (NotReady,)) -> T:
        """The first result; after the last attempt the last error, as it was raised."""
        waits = _Waits(self)
        while True:
            try:
                return await attempt()
            except on as error:
                if (wait_s := waits.after(error)) is None:
                    raise
            await asyncio.sleep(wait_s)

    def call_blocking(
        self,
        attempt: Callable[[], T],
        on: Errors = (NotReady,),
        is_over: Callable[[], bool] = lambda: False,
    ) -> T:
        """The same without an event loop; also over as soon as `is_over` says so."""
        waits = _Waits(self)
        while True:
            try:
                return attempt()
            except on as error:
                if is_over() or (wait_s := waits.after(error)) is None:
                    raise
            time.sleep(wait_s)


class _Waits:
    """The waits of one call."""

    def __init__(self, bounds: Retries) -> None:
        self._bounds, self._began, self._failed = bounds, time.monotonic(), 0
        self._wait_s, self._is_logged = bounds.first_wait_s, bounds.attempts is not None

    def after(self, error: Exception) -> float | None:
        """How long to wait after this failure; None: no further attempt."""
        bounds, passed_s = self._bounds, time.monotonic() - self._began
        requested = error.details.get("retry_after_s") if isinstance(error, HalteresError) else None
        least_s, longest_s = requested or 0.0, self._wait_s
        self._failed += 1
        if self._failed == bounds.attempts or passed_s + max(longest_s, least_s) > bounds.within_s:
            return None
        if not self._is_logged and passed_s > _LOGGED_AFTER_S:
            self._is_logged = True
            log.warning("Waiting, for %g s at most: %s", bounds.within_s, error)
        self._wait_s = min(2 * longest_s, bounds.longest_wait_s)
        spread = random.uniform(0.5, 1.0)  # noqa: S311 - of many callers; decides nothing
        return max(longest_s * spread, least_s)


async def until_ready(call: Callable[[], Awaitable[T]], within_s: float) -> T:
    """Repeat a call that raises NotReady, with growing waits or those the server asks for, for
    `within_s` at most.
    """
    try:
        return await Retries.for_seconds(within_s).call(call)
    except NotReady as error:
        why = f"It was waited for {within_s:g} s. {error.why}".strip()
        raise NotReady(error.what, why, "Start the server, or look at its log.") from error
