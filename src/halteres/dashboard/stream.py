"""Which runs have changed, told to every page that is open as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from halteres.errors import HalteresError, NotReady, ServerError, boundary
from halteres.runs.directory import known_runs

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5

MOST_LISTENERS = 64
"""A page has one; browsers open six connections to one host."""

FILES = ("run.json", "metrics.jsonl", "events.jsonl")

Stamp = tuple[object, ...]


class Listener:
    """One who listens. What it was not told yet is kept as a set of runs, however long it does not ask."""

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._news = asyncio.Event()
        self.ended = False

    def tell(self, changed: set[str]) -> None:
        """Some runs have changed, have come or have gone."""
        self._changed |= changed
        self._news.set()

    def end(self) -> None:
        """There will be no more news."""
        self.ended = True
        self._news.set()

    async def changed(self, within_s: float) -> set[str]:
        """The runs that have changed since the last time; none where nothing did within the time."""
        try:
            async with asyncio.timeout(within_s):
                await self._news.wait()
        except TimeoutError:
            return set()
        self._news.clear()
        told, self._changed = self._changed, set()
        return told


class Changes:
    """The changes of all runs of HALTERES_HOME, until `ended` is set."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended
        self._listeners: set[Listener] = set()
        self._looking: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()  # there is something to compare with

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Listener]:
        """Listen for the length of a block: to whatever changes after it was entered.

        Raises:
            NotReady: too many do.
        """
        if len(self._listeners) >= MOST_LISTENERS:
            raise NotReady(f"{MOST_LISTENERS} pages are open.", "That is the limit.", "Close one.")
        listener = Listener()
        self._listeners.add(listener)
        try:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look(), name="changes of runs")
            await self._begun.wait()
            if self._ended.is_set():
                listener.end()
            yield listener
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._looking is not None:
                self._looking.cancel()
                self._looking = None
                self._begun.clear()

    async def _look(self) -> None:
        before = await self._stamps({})
        self._begun.set()
        while not await self._ends_within(LOOK_EVERY_S):
            now = await self._stamps(before)
            changed = {run for run in before.keys() | now.keys() if before.get(run) != now.get(run)}
            before = now
            for listener in self._listeners if changed else ():
                listener.tell(changed)
        for listener in self._listeners:
            listener.end()

    async def _ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def _stamps(self, otherwise: Mapping[str, Stamp]) -> Mapping[str, Stamp]:
        """A look that fails is a look at nothing new; the next may succeed."""
        try:
            with boundary(ServerError, "looking at the runs"):
                return await asyncio.to_thread(stamps)
        except HalteresError as error:
            _log.warning("%s", error)
            return otherwise


def stamps() -> dict[str, Stamp]:
    """For every run something that differs once it has changed; a run whose supervisor is gone has changed too."""
    return {run.run_id: (run.facts.status, *(_stamp(run.path / name) for name in FILES)) for run in known_runs()}


def _stamp(file: Path) -> tuple[int, int]:
    try:
        told = os.stat(file)
    except OSError:
        return 0, 0
    return told.st_mtime_ns, told.st_size


HEARTBEAT_S = 15.0
"""How often a word is said where nothing happens: a connection whose other end is gone shows itself."""

RETRY_MS = 1000
"""When a browser asks again after a break."""


class Events(StreamingResponse):
    """`event: change`, `data: {"runs": [ids]}`, as often as runs change, until client or server ends."""

    def __init__(self, changes: Changes) -> None:
        super().__init__((), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._changes = changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, for as long as both sides want.

        Raises:
            NotReady: too many listen; nothing was sent yet.
        """
        async with self._changes.listening() as listener:
            self.body_iterator = _told(listener)
            await super().__call__(scope, receive, send)


async def _told(listener: Listener) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MS}\n\n"
    while not listener.ended:
        changed = await listener.changed(HEARTBEAT_S)
        yield f"event: change\ndata: {json.dumps({'runs': sorted(changed)})}\n\n" if changed else ": alive\n\n"
