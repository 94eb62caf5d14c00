"""How a test steers the scripted engine.

Owns: holding, failing and slowing calls; counting them.
Never: knows what a call does.

    held = engine.block("forward_backward")     # calls stop inside from now on
    await held.inside()                        # one is there
    held.release()                             # they go on; later ones do not stop
    engine.fail_next("optim_step", ServerError("The device is lost."))
    engine.latency_s["sample"] = 0.05
    engine.under_way["sample"]                 # calls that are inside now

A hold of "piece" stops streams before each of their pieces.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from halteres.errors import HalteresError


class Hold:
    """Calls of one operation stop inside until `release`."""

    def __init__(self) -> None:
        self._arrived = asyncio.Semaphore(0)
        self._released = asyncio.Event()

    async def inside(self, count: int = 1) -> None:
        """Wait until `count` calls more are inside."""
        for _ in range(count):
            await self._arrived.acquire()

    def release(self) -> None:
        """Let those inside and all later ones pass."""
        self._released.set()

    async def stop(self) -> None:
        """The call's side: say that it is inside, then wait."""
        self._arrived.release()
        await self._released.wait()


class Hooks:
    """What a test may set, and what every call passes."""

    def __init__(self) -> None:
        self._holds: dict[str, Hold] = {}
        self._failures: defaultdict[str, deque[HalteresError]] = defaultdict(deque)
        self.latency_s: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()

    def block(self, operation: str) -> Hold:
        """From now on calls of this operation stop inside."""
        self._holds[operation] = Hold()
        return self._holds[operation]

    def fail_next(self, operation: str, error: HalteresError, times: int = 1) -> None:
        """The next `times` calls of this operation raise `error` and change nothing."""
        self._failures[operation].extend([error] * times)

    def release_all(self) -> None:
        """Let everybody who is held go on."""
        for hold in self._holds.values():
            hold.release()

    @asynccontextmanager
    async def passed(self, operation: str) -> AsyncIterator[None]:
        """A call is inside while this block runs; it begins once the call was held and slowed as planned."""
        self.calls[operation] += 1
        self.under_way[operation] += 1
        try:
            await self.pause(operation)
            yield
        finally:
            self.under_way[operation] -= 1

    async def pause(self, operation: str) -> None:
        """Held and slowed as planned."""
        if hold := self._holds.get(operation):
            await hold.stop()
        if delay := self.latency_s.get(operation):
            await asyncio.sleep(delay)

    def fail_as_planned(self, operation: str) -> None:
        """Raise what a test has planned for this call."""
        if self._failures[operation]:
            raise self._failures[operation].popleft()
