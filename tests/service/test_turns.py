"""Places in the engine: nobody waits for what another has waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from halteres.service.limits import FairQueue


class Queue:
    """Requests that hold a place until they are told to go on, and the order in which they got
    theirs.
    """

    def __init__(self, places: int, most: int) -> None:
        self._turns = FairQueue(places, most)
        self.entered: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, count: int = 1) -> None:
        """Requests named TENANT + number."""
        for name in names:
            self._leave[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._hold(name, count))
        await self.settled()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self.settled()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await self.settled()

    async def settled(self) -> None:
        for _ in range(5):  # each step of ours is one turn of the loop
            await asyncio.sleep(0)

    async def _hold(self, name: str, count: int) -> None:
        async with self._turns.places(name[0], count):
            self.entered.append(name)
            await self._leave[name].wait()

    async def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


@asynccontextmanager
async def queue(places: int, most: int | None = None) -> AsyncIterator[Queue]:
    made = Queue(places, places if most is None else most)
    try:
        yield made
    finally:
        await made.end()


async def test_a_newcomer_is_next_whatever_another_has_waiting() -> None:
    async with queue(2) as line:
        await line.come("a1", "a2", "a3", "a4", "a5")
        await line.come("b1")
        assert line.entered == ["a1", "a2"]
        await line.leave("a1")
        assert line.entered == ["a1", "a2", "b1"]
        await line.leave("a2")
        assert line.entered[3:] == ["a3"]


async def test_no_tenant_holds_all_places() -> None:
    async with queue(4, most=3) as line:
        await line.come("a1", "a2", "a3", "a4")
        assert line.entered == ["a1", "a2", "a3"]
        await line.come("b1")
        assert line.entered[3:] == ["b1"]
        await line.leave("a2")
        assert line.entered[4:] == ["a4"]


async def test_tenants_share_what_becomes_free() -> None:
    async with queue(4) as line:
        await line.come(*(f"a{number}" for number in range(8)))
        await line.come(*(f"b{number}" for number in range(8)))
        await line.come(*(f"c{number}" for number in range(8)))
        for number in range(4):
            await line.leave(f"a{number}")
        assert sorted(name[0] for name in line.entered[4:]) == ["a", "b", "b", "c"] or sorted(
            name[0] for name in line.entered[4:]
        ) == ["b", "b", "c", "c"]


async def test_a_large_request_is_not_passed_for_ever() -> None:
    async with queue(4) as line:
        await line.come("a1", "a2", "a3")
        await line.come("b1", count=3)
        await line.come("c1", "c2")
        assert line.entered[3:] == []
        await line.leave("a1")
        await line.leave("a2")
        assert line.entered[3:] == ["b1"]
        await line.leave("a3")
        assert line.entered[4:] == ["c1"]


async def test_a_request_larger_than_everything_gets_everything() -> None:
    async with queue(4, most=3) as line:
        await line.come("a1", count=1000)
        await line.come("a2")
        assert line.entered == ["a1"]
        await line.leave("a1")
        assert line.entered == ["a1", "a2"]


@pytest.mark.parametrize("gone", ["a2", "a3", "b1"])
async def test_whoever_goes_away_leaves_its_place_to_the_next(gone: str) -> None:
    async with queue(1) as line:
        await line.come("a1", "a2", "a3")
        await line.come("b1")
        await line.cancel(gone)
        await line.cancel("a1")
        order = [name for name in ("b1", "a2", "a3") if name != gone]
        for name in order:
            assert line.entered[-1] == name
            await line.leave(name)
        assert line.entered == ["a1", *order]


async def test_one_that_is_cancelled_as_it_gets_its_place_gives_it_back() -> None:
    turns = FairQueue(1, 1)
    async with AsyncExitStack() as held:
        await held.enter_async_context(turns.places("a", 1))
        waiting = asyncio.create_task(held.enter_async_context(turns.places("b", 1)))
        await asyncio.sleep(0)
        await held.aclose()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(5), turns.places("c", 1):
        pass
