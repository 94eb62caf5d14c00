"""Group commit: requests submit decisions, one task takes them in turns, nobody is answered before they are kept.

    decisions that wait ──▶ begin ──▶ decide, one after another ──▶ commit ──▶ answers
                            (shared stores: lock, news of others)    (the store's thread)

Where nobody waits and the store is quick, a decision is a turn by itself, taken as soon as it is submitted.

When the store fails, everything of that turn fails with it, and memory goes back to what is kept. Where that cannot be
read either, the turns end: memory holds what nobody was promised, so nothing may be built on it. A shared store may
come back: after a failure it begins every turn with what is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from halteres.errors import HalteresError, boundary
from halteres.trajectories.records import Remembered
from halteres.trajectories.state import State
from halteres.trajectories.stores.store import News, Store, StoreFailed

T = TypeVar("T")
Decision = Callable[[State], T]
"""Changes the state by `state.do`, or raises before it changed anything."""

QUICK_S = 0.02
"""How long a commit on the event loop may take; usual are 0.1 ms."""

STUCK_S = 0.2
"""How long it may take at most before the disk is distrusted at once."""

DISTRUST_S = 2.0
"""How long a disk that was slow twice within that time is left to the store's thread. Once is SQLite putting its log
into its file, every some thousand commits."""

NEWS_S = 0.2
"""How far a server may lag behind others on the same queue in what it only tells."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    decide: Decision[Any]
    keys: Sequence[str]
    answer: asyncio.Future[Any]


class GroupCommit:
    """The turns at one store. `run` is the task that owns them."""

    def __init__(self, store: Store, remember: Callable[[Remembered], State]) -> None:
        self._store, self._remember = store, remember
        self.state = remember(store.load())
        self.changed = asyncio.Event()  # set, and replaced, after every turn that changed something
        self.is_ending = False  # nobody should be held for long
        self._waiting: list[_Asked] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._slow_at = self._distrusted_until = -DISTRUST_S  # on the monotonic clock
        self._busy = False  # a turn is under way
        self._spoilt: tuple[_Asked, StoreFailed] | None = None
        self._stopping = False
        self._ended: StoreFailed | None = None

    def submit(self, decide: Decision[T], keys: Sequence[str] = ()) -> asyncio.Future[T]:
        """Have a decision taken. `keys` are the Idempotency-Keys it will look up.

        The answer raises what the decision raised, or StoreFailed: it is not kept.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        asked = _Asked(decide, keys, answer)
        if self._ended is not None:
            answer.set_exception(self._ended)
        elif self._may_decide_now(keys):
            self._decide_now(asked)
        else:
            self._waiting.append(asked)
            self._wake.set()
        return answer

    def leave(self, decide: Decision[Any]) -> None:
        """Have a decision taken that nobody waits for: where the store is gone, whoever opens it next decides it."""
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
                while self._ended is None and (self._waiting or self._spoilt or not self._stopping):
                    await self._woken()
                    await self._turn()
            return self._ended
        finally:
            self._ended = self._ended or StoreFailed("The trajectory store is closed.", "", "Ask again in a moment.")
            _fail(self._waiting, self._ended)

    def _may_decide_now(self, keys: Sequence[str]) -> bool:
        """Nobody waits, and the disk answers at once: a turn of its own would cost more than the decision."""
        if self._busy or self._waiting or self._spoilt or not self._store.is_quick:
            return False
        return time.monotonic() >= self._distrusted_until and not any(map(self._must_look_up, keys))

    def _decide_now(self, asked: _Asked) -> None:
        began = time.monotonic()
        try:
            with boundary(StoreFailed, "The trajectory store"):
                outcome = _outcome(asked.decide, self.state)
                if changes := self.state.drain():
                    self._store.commit(changes)
                    self._wake_waiting()
        except StoreFailed as failure:
            self._spoilt = asked, failure  # memory is ahead of the store: the next turn goes back, and answers
            self._wake.set()
        else:
            _answer(asked.answer, outcome)
        self._judge(began)

    def _judge(self, began: float) -> None:
        """The disk, by a commit that has just ended."""
        now = time.monotonic()
        if now - began > QUICK_S:
            if began - self._slow_at < DISTRUST_S or now - began > STUCK_S:
                self._distrusted_until = now + DISTRUST_S
            self._slow_at = now

    async def _woken(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_S if self._store.is_shared else None):
                await self._wake.wait()

    async def _turn(self) -> None:
        self._wake.clear()
        self._busy = True
        try:
            if self._spoilt is not None:
                await self._make_good(*self._spoilt)
            await self._take()
        finally:
            self._busy = False

    async def _make_good(self, asked: _Asked, failure: StoreFailed) -> None:
        """Go back from a decision that was taken at once and not kept."""
        await self._go_back()
        self._spoilt = None
        _fail([asked], failure)

    async def _take(self) -> None:
        taken, self._waiting = self._waiting, []
        try:
            with boundary(StoreFailed, "The trajectory store"):
                outcomes = await self._decide(taken) if taken else await self._follow()
        except StoreFailed as failure:
            await self._go_back()
            _fail(taken, failure)
        else:
            for asked, outcome in zip(taken, outcomes, strict=True):
                _answer(asked.answer, outcome)

    async def _decide(self, taken: Sequence[_Asked]) -> list[Any]:
        keys = [key for asked in taken for key in asked.keys if self._must_look_up(key)]
        if begun := self._store.is_shared or bool(keys):
            self._take_in(await self._in_thread(self._store.begin, keys))
        outcomes = [_outcome(asked.decide, self.state) for asked in taken]
        if changes := self.state.drain():
            began = time.monotonic()
            await self._in_thread(self._store.commit, changes)
            self._judge(began)
            self._wake_waiting()
        elif begun:
            await self._in_thread(self._store.abandon)
        return outcomes

    def _must_look_up(self, key: str) -> bool:
        """On a shared store always: what others did may be learnt in this very turn."""
        return self._store.is_shared or self.state.must_look_up(key)

    async def _follow(self) -> list[Any]:
        """Nobody asks for anything: learn what others did."""
        if self._store.is_shared and not self._stopping:
            self._take_in(await self._in_thread(self._store.news))
        return []

    def _take_in(self, news: News) -> None:
        if news.afresh is not None:
            self.state = self._remember(news.afresh)
        for change in news.changes:
            self.state.apply(change)
        for known in news.known:
            self.state.know(known)
        if news.changes or news.afresh:
            self._wake_waiting()

    async def _go_back(self) -> None:
        """The store did not take what memory already holds: go back to what is kept."""
        _log.error("The store failed; going back to its last committed state.")
        try:
            with boundary(StoreFailed, "The trajectory store"):
                await self._in_thread(self._store.abandon)  # where a defect, not the store, ended the turn
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


def _outcome(decide: Decision[Any], state: State) -> Any:
    try:
        return decide(state)
    except HalteresError as refusal:
        return refusal


def _answer(answer: asyncio.Future[Any], outcome: Any) -> None:
    if answer.done():  # its request was given up
        return
    if isinstance(outcome, HalteresError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _fail(asked: Sequence[_Asked], failure: StoreFailed) -> None:
    for each in asked:
        _answer(each.answer, cast(HalteresError, failure))
