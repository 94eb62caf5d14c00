"""Which names one vLLM has loaded, and who uses them.

    hold(name) ─▶ known, loaded ──another needs the place──▶ known ──in_use(name)──▶ known, loaded
                        └────────────────── drop(name) ────────┴──▶ gone, and its folder with it

More names than there are places are never loaded at a time, since a vLLM that lets go of a name by
itself ends when it is asked for. The one unused for longest makes room, and one in use never does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from halteres.engine import checks
from halteres.engine.protocol import Weights
from halteres.engine.vllm.adapters import AdapterFolders
from halteres.errors import HalteresError

ROOM_S = 3600.0  # no request waits longer for a place


class Loader(Protocol):
    """The vLLM. Both calls have deadlines of their own."""

    async def load(self, name: str) -> None:
        """Load a name from its folder."""

    async def unload(self, name: str) -> None:
        """Unload a name; one that is not loaded is fine."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The names that were loaded at a moment."""

    names: frozenset[str]
    changes: int  # how often any came or went until then


class LoadedNames:
    """The names of one vLLM."""

    def __init__(self, loader: Loader, folders: AdapterFolders, places: int) -> None:
        """`places`: names that may be loaded at a time."""
        self._loader, self._folders, self._places = loader, folders, places
        self._sources: dict[str, Weights] = {}  # of every name that was not dropped
        self._loaded = OrderedDict[str, None]()  # unused for longest first
        self._under_way = Counter[str]()  # requests, by name
        self._changes = 0  # how often a load began or ended, or an unload ended
        # held while a name is loaded or unloaded; waiters get it in the order they came
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()  # a request has ended

    @property
    def known(self) -> tuple[str, ...]:
        """Names that were not dropped, loaded or not."""
        return tuple(self._sources)

    def find(self, name: str) -> Weights:
        """What a name means; NotFound where it is not known."""
        return checks.find_snapshot(self._sources, name)

    def now(self) -> Loaded:
        """Those that are loaded."""
        return Loaded(frozenset(self._loaded), self._changes)

    def lost_since(self, before: Loaded, listed: Collection[str]) -> list[str]:
        """Names that were loaded before the vLLM listed its own, and that are not in that list.

        Nothing can be said of a list that was made while names came and went: then none.
        """
        if before.changes != self._changes or self._turn.locked():
            return []
        return sorted(before.names - set(listed))

    async def hold(self, name: str, source: Weights) -> None:
        """Load a name, whose folder is there. Where that fails neither is left."""
        self._sources[name] = source
        try:
            async with self.in_use(name):
                return
        except BaseException:
            del self._sources[name]
            with suppress(HalteresError):
                await _whole(self._forget(name))
            raise

    async def drop(self, name: str) -> None:
        """Unload a name, then remove its folder; one that is not known is fine."""
        if self._sources.pop(name, None) is not None:
            await _whole(self._forget(name))

    async def _forget(self, name: str) -> None:
        async with self._turn:
            await self.unload(name)
        await asyncio.to_thread(self._folders.remove, name)

    @asynccontextmanager
    async def in_use(self, name: str) -> AsyncIterator[None]:
        """The name is loaded as long as the block runs. NotFound where it is not known."""
        async with self._turn:
            self.find(name)
            if name not in self._loaded:
                await self._make_room()
                await _whole(self._load(name))
            self._loaded.move_to_end(name)
            self._under_way[name] += 1
        try:
            yield
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]
            self._freed.set()

    async def _make_room(self) -> None:
        """Unload until one more fits; where all are in use, wait for the first that is not."""
        async with asyncio.timeout(ROOM_S):
            while len(self._loaded) >= self._places:
                idle = next((one for one in self._loaded if not self._under_way[one]), None)
                if idle is not None:
                    await _whole(self.unload(idle))
                    continue
                self._freed.clear()
                await self._freed.wait()

    async def _load(self, name: str) -> None:
        self._loaded[name] = None
        self._changes += 1
        try:
            await self._loader.load(name)
        except BaseException:
            del self._loaded[name]
            raise
        finally:
            # a list that was asked for meanwhile may lack it
            self._changes += 1

    async def unload(self, name: str) -> None:
        """Unload a name now, also one that is in use: requests under way keep its weights."""
        await self._loader.unload(name)
        self._changes += 1
        self._loaded.pop(name, None)


async def _whole(change: Coroutine[Any, Any, None]) -> None:
    """Load or unload to the end, also where the caller is cancelled meanwhile: else it would not be
    known what the vLLM holds.
    """
    task = asyncio.ensure_future(change)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
