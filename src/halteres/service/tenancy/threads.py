"""Work off the event loop: long bodies and texts are read, and large answers made, in threads.

Owns: which work is long enough for a thread, the threads, whose turn it is.
Never: knows what is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from halteres.service.tenancy.tenants import Tenant
from halteres.service.tenancy.turns import Turns

T = TypeVar("T")

LONG = 2**15
"""Bytes, or as much work: a text of this length takes the tokenizer some 30 ms."""

THREADS, MOST_THREADS = 4, 3
"""Threads, and those of one tenant. More would only take Python's lock from each other."""


class Threads:
    """The threads of one service."""

    def __init__(self) -> None:
        self._turns, self._pool = Turns(THREADS, MOST_THREADS), ThreadPoolExecutor(THREADS, "aside")

    async def run(self, tenant: Tenant, size: int, make: Callable[[], T]) -> T:
        """What `make` makes; of less than LONG it is made at once, of more when it is the tenant's turn."""
        if size < LONG:
            return make()
        async with self._turns.places(tenant, 1):
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
