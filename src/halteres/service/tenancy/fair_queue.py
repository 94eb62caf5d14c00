"""A fair queue: places in the engine, or in threads, given to tenants in turn.

A tenant that holds none gets its place before anything that another has waiting, and at once as long as one other
tenant alone is busy, whatever that one does with its places.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from halteres.service.tenancy.tenants import Tenant

T = TypeVar("T")

LONG = 2**15  # bytes, or as much work: a text of this length takes the tokenizer some 30 ms
THREADS, MOST_THREADS = 4, 3  # threads, and those of one tenant. More would only take Python's lock from each other


class FairQueue:
    """A number of places, of which no tenant holds more than `most`."""

    def __init__(self, places: int, most: int) -> None:
        self._free, self._most = places, most
        self._held: Counter[Tenant] = Counter()
        self._served: Counter[Tenant] = Counter()  # number of the last grant
        self._grants = 0
        self._waiting: dict[Tenant, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def places(self, tenant: Tenant, count: int) -> AsyncIterator[None]:
        """Hold so many places (at most those that one tenant may hold) while the block runs."""
        count = min(count, self._most)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((count, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if not granted.cancelled():
                self._free += count
                self._held[tenant] -= count
            self._grant()  # also for one that was cancelled: somebody behind it may fit now

    def _grant(self) -> None:
        while (tenant := self._next()) is not None:
            count, granted = self._waiting[tenant][0]
            if count > self._free:
                return  # whoever is next waits until it fits: else the small ones would pass it for ever
            self._waiting[tenant].popleft()
            self._free -= count
            self._held[tenant] += count
            self._grants += 1
            self._served[tenant] = self._grants
            granted.set_result(None)

    def _next(self) -> Tenant | None:
        """Of those who wait and may hold more, the tenant that holds the fewest; of several, the one that was served
        longest ago."""
        for tenant, own in list(self._waiting.items()):
            while own and own[0][1].cancelled():
                own.popleft()
            if not own:
                del self._waiting[tenant]
        allowed = (one for one, own in self._waiting.items() if self._held[one] + own[0][0] <= self._most)
        return min(allowed, key=lambda one: (self._held[one], self._served[one]), default=None)


class Threads:
    """The threads of one service."""

    def __init__(self) -> None:
        self._queue, self._pool = FairQueue(THREADS, MOST_THREADS), ThreadPoolExecutor(THREADS, "aside")

    async def run(self, tenant: Tenant, size: int, make: Callable[[], T]) -> T:
        """What `make` makes; of less than LONG it is made at once, of more when it is the tenant's turn."""
        if size < LONG:
            return make()
        async with self._queue.places(tenant, 1):
            working = asyncio.get_running_loop().run_in_executor(self._pool, make)
            try:
                await asyncio.wait((working,))
            except asyncio.CancelledError:
                while not working.done():  # nobody can end a thread: its place is free when it has ended
                    with suppress(asyncio.CancelledError):  # one cancellation more
                        await asyncio.wait((working,))
                working.exception()
                raise
            return working.result()

    def close(self) -> None:
        """Nothing new begins."""
        self._pool.shutdown(wait=False, cancel_futures=True)
