"""Group commit: requests submit decisions, one task takes them in turns, nobody is answered before
they are kept.

    decisions that wait ──▶ begin ──▶ decide, one after another ──▶ commit ──▶ answers
                            (shared stores: lock, what others did)   (in the store's thread)

A lone decision is committed where it is taken while the store is quick: a thread's wake-up costs
more than the commit that it is woken for.

When the store fails, everything of that turn fails with it, and memory goes back to what is kept.
Where that cannot be read either, the turns end: memory holds what nobody was promised, so nothing
may be built on it. A shared store may come back: after a failure it begins every turn with what is
kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

from halteres.errors import HalteresError, boundary
from halteres.trajectories.records import Remembered, Update
from halteres.trajectories.state import State
from halteres.trajectories.stores.store import Store, StoreFailed

T = TypeVar("T")
# changes the state by `state.do`, or raises before it changed anything
Decision = Callable[[State], T]
# a commit that took longer sends the next ones into the store's thread, where nobody waits for them
QUICK_S = 0.005
CATCH_UP_S = 0.2  # how far a server may lag behind others on the same queue in what it only tells

_log = logging.getLogger(__name__)


class GroupCommit:
    """The turns at one store. `run` is the task that owns them."""

    def __init__(self, store: Store, remember: Callable[[Remembered], State]) -> None:
        self._store, self._remember = store, remember
        self.state = remember(store.load())
        self.changed = asyncio.Event()  # set, and replaced, after every turn that changed something
        self.is_ending = False  # nobody should be held for long
        self._waiting: list[tuple[Decision[Any], asyncio.Future[Any]]] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._stopping = False
        self._commit_s = 0.0  # what the last one took
        self._ended: StoreFailed | None = None

    def submit(self, decide: Decision[T]) -> asyncio.Future[T]:
        """Have a decision taken. The answer raises what the decision raised, or StoreFailed: it is
        not kept.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            answer.set_exception(self._ended)
        else:
            self._waiting.append((decide, answer))
            self._wake.set()
        return answer

    def leave(self, decide: Decision[Any]) -> None:
        """Have a decision taken that nobody waits for: where the store is gone, whoever opens it
        next decides it.
        """
        self.submit(decide).add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def has_ended(self) -> bool:
        """Nothing will be decided any more."""
        return self._ended is not None

    def release(self) -> None:
        """Whoever waits for a change waits no more; decisions are taken until `stop`."""
        self.is_ending = True
        self.changed.set()

    def stop(self) -> None:
        """Let `run` return once nothing waits."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> StoreFailed | None:
        """Take turns until stopped; gives the failure that ended them earlier."""
        try:
            with self._thread:
                while self._ended is None and (self._waiting or not self._stopping):
                    if self._store.is_shared:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self._wake.wait(), CATCH_UP_S)
                    else:
                        await self._wake.wait()
                    self._wake.clear()
                    await self._commit_round()
            return self._ended
        finally:
            self._ended = self._ended or StoreFailed(
                "The trajectory store is closed.", "", "Ask again in a moment."
            )
            for _, answer in self._waiting:
                _settle(answer, self._ended)

    async def _commit_round(self) -> None:
        submitted, self._waiting = self._waiting, []
        outcomes: list[Any] = []
        try:
            with boundary(StoreFailed, "The trajectory store"):
                if submitted:
                    outcomes = await self._decide([decide for decide, _ in submitted])
                elif self._store.is_shared and not self._stopping:  # learn what others did
                    self._take_in(await self._in_thread(self._store.catch_up))
        except StoreFailed as failure:
            await self._go_back()
            outcomes = [failure] * len(submitted)
        for (_, answer), outcome in zip(submitted, outcomes, strict=True):
            _settle(answer, outcome)

    async def _decide(self, decisions: Sequence[Decision[Any]]) -> list[Any]:
        if self._store.is_shared:
            self._take_in(await self._in_thread(self._store.begin))
        outcomes: list[Any] = []
        for decide in decisions:
            try:
                outcomes.append(decide(self.state))
            except HalteresError as refusal:
                outcomes.append(refusal)
        if changes := self.state.drain():
            begun = monotonic()
            if self._store.is_quick and len(decisions) == 1 and self._commit_s < QUICK_S:
                self._store.commit(changes)
            else:
                await self._in_thread(self._store.commit, changes)
            self._commit_s = monotonic() - begun
            self._wake_waiting()
        elif self._store.is_shared:
            await self._in_thread(self._store.abandon)
        return outcomes

    def _take_in(self, update: Update) -> None:
        if update.afresh is not None:
            self.state = self._remember(update.afresh)
        for change in update.changes:
            self.state.apply(change)
        if update.changes or update.afresh:
            self._wake_waiting()

    async def _go_back(self) -> None:
        """The store did not take what memory already holds: go back to what is kept."""
        _log.error("The store failed; going back to its last committed state.")
        try:
            with boundary(StoreFailed, "The trajectory store"):
                # where a defect, not the store, ended the turn
                await self._in_thread(self._store.abandon)
                self.state = self._remember(await self._in_thread(self._store.load))
        except StoreFailed as loss:
            if not self._store.is_shared:  # there the next turn begins afresh
                self._ended = loss
        else:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Memory holds what is kept, and something new: whoever waits for a change looks again."""
        self.state.keep()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)


def _settle(answer: asyncio.Future[Any], outcome: Any) -> None:
    if answer.done():  # its request was given up
        return
    if isinstance(outcome, HalteresError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
