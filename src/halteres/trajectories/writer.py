"""Group commit: one thread writes, many wait.

Owns: the order of changes on their way to the store, and the promise that nobody is told before they are kept.
Never: looks into a change; lets anybody wait for a store that is gone.

When the store fails, everything that waits fails with it, in order, and the owner goes back to what is kept. Where that
fails too, the writer ends: memory holds what nobody was promised, so nothing may be built on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from halteres.errors import boundary
from halteres.trajectories.records import Change
from halteres.trajectories.stores.store import Store, StoreFailed

Waiting = tuple[Sequence[Change], "asyncio.Future[None]"]


class Writer:
    """Commits to one store from one thread. `run` is the task that owns it.

    `on_failure` goes back to what the store kept; it raises StoreFailed where it cannot.
    """

    def __init__(self, store: Store, on_failure: Callable[[], None]) -> None:
        self._store, self._on_failure = store, on_failure
        self._waiting: list[Waiting] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._ended: StoreFailed | None = None

    async def commit(self, changes: Sequence[Change]) -> None:
        """Wait until these changes, and all before them, are kept.

        Raises:
            StoreFailed: they are not.
        """
        if self._ended is not None:
            raise self._ended
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((changes, kept))
        self._wake.set()
        await kept

    def stop(self) -> None:
        """Let `run` return once nothing waits."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> StoreFailed | None:
        """Write whatever waits, one transaction at a time, until stopped; gives the failure that ended it earlier."""
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="store") as thread:
                while self._ended is None and (self._waiting or not self._stopping):
                    await self._wake.wait()
                    await self._write(thread)
            return self._ended
        finally:
            self._ended = self._ended or StoreFailed("The trajectory store is closed.", "", "Ask again in a moment.")
            _settle(self._waiting, self._ended)

    async def _write(self, thread: ThreadPoolExecutor) -> None:
        self._wake.clear()
        batch, self._waiting = self._waiting, []
        changes = [change for part, _ in batch for change in part]
        try:
            with boundary(StoreFailed, "The trajectory store"):
                if changes:
                    await asyncio.get_running_loop().run_in_executor(thread, self._store.commit, changes)
        except StoreFailed as failure:
            batch += self._waiting
            self._waiting = []
            try:
                self._on_failure()
            except StoreFailed as loss:
                self._ended = loss
            _settle(batch, failure)
        else:
            _settle(batch, None)


def _settle(batch: Sequence[Waiting], failure: StoreFailed | None) -> None:
    for _, kept in batch:
        if kept.done():  # its request was given up
            continue
        if failure is None:
            kept.set_result(None)
        else:
            kept.set_exception(failure)
