"""Which samples of a sampling session are settled, for clients that ask once for the whole session.

A cursor is microseconds of unix time, no two the same. What was settled before a client first asked (also in an earlier
life of the service), and what left the memory, the journal tells.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from halteres.process import steady_time
from halteres.service.durable.futures import SAMPLE, Future, Futures
from halteres.service.durable.journal import Journal

CLONE = 10**9
"""Sequence numbers of one client of a sampling session: a copy's begin at its own multiple of this."""

MAX_STREAMS, MAX_HELD = 256, 2048
"""Clients whose completions are held in memory, and how many of each."""

MARGIN_S = 1.0
"""The journal is asked for so much more than was missed: a client ignores what it knows already."""


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One settled sample."""

    state: str  # finished or failed
    request_id: str
    response_payload_uncompressed_size: int | None = None


@dataclass(slots=True, eq=False)
class Stream:
    """The completions of one client, oldest first."""

    floor: int  # up to this cursor the journal tells
    last: int  # the newest cursor
    cursors: list[int] = field(default_factory=list[int])
    held: list[Completion] = field(default_factory=list[Completion])
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, settled_at: float, completion: Completion) -> None:
        """The newest one."""
        self.last = max(round(settled_at * 1e6), self.last + 1)
        self.cursors.append(self.last)
        self.held.append(completion)
        if len(self.held) > MAX_HELD:
            self.drop(self.cursors[MAX_HELD // 2])
        self.grown.set()

    def since(self, cursor: int) -> list[Completion]:
        """Those in memory that came after it."""
        return self.held[bisect_right(self.cursors, cursor) :]

    def drop(self, cursor: int) -> None:
        """Those up to this one leave the memory."""
        gone = bisect_right(self.cursors, cursor)
        del self.cursors[:gone], self.held[:gone]
        self.floor = max(self.floor, cursor)


class Completions:
    """The completions of all sampling sessions."""

    def __init__(self, journal: Journal, futures: Futures) -> None:
        self._journal, self._futures = journal, futures
        self._streams: OrderedDict[tuple[str, int], Stream] = OrderedDict()
        futures.listen(self)

    def settled(self, future: Future) -> None:
        """A future was settled."""
        if future.kind != SAMPLE or future.outcome is None:
            return
        stream = self._streams.get((future.subject, (future.seq or 0) // CLONE))
        if stream is not None:
            done = future.outcome.state == "done"
            size = len(future.outcome.body) if done else None
            stream.add(future.settled_at, _completion(future.request_id, done=done, size=size))

    def closing(self) -> None:
        """The service ends: who waits asks the next one."""
        for stream in self._streams.values():
            stream.grown.set()

    async def after(self, sampler: str, clone: int, cursor: int, hold_s: float) -> tuple[list[Completion], int]:
        """What was settled after a cursor, and the cursor after that; waits up to `hold_s` while there is nothing.

        Args:
            sampler: the sampling session.
            clone: which of its clients.
            cursor: of the answer before; what it covers was seen, and leaves the memory. 0 means from the beginning.
            hold_s: 0 answers at once.
        """
        stream = self._stream(sampler, clone)
        if cursor > stream.last:  # an earlier life's, whose clock was ahead: everything of this life is newer
            stream.last, cursor = cursor, 0
        if cursor >= stream.floor and not stream.since(cursor):
            await self._grown(stream, hold_s)
            stream = self._stream(sampler, clone)  # it may have made room meanwhile
        recalled, covered = [], cursor
        while covered < stream.floor:  # which may rise while the journal is asked
            covered, recalled = stream.floor, await self._recalled(sampler, clone, cursor)
        found = [*recalled, *stream.since(cursor)]
        stream.drop(cursor)
        return found, stream.last

    async def _grown(self, stream: Stream, hold_s: float) -> None:
        stream.grown.clear()
        if hold_s <= 0 or self._futures.closing:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                await stream.grown.wait()

    async def _recalled(self, sampler: str, clone: int, cursor: int) -> list[Completion]:
        rows = await self._journal.settled_samples(sampler, cursor / 1e6 - MARGIN_S)
        return [
            _completion(row.id, done=row.state == "done", size=None) for row in rows if (row.seq or 0) // CLONE == clone
        ]

    def _stream(self, sampler: str, clone: int) -> Stream:
        stream = self._streams.get((sampler, clone))
        if stream is None:
            now = round(steady_time() * 1e6)
            stream = self._streams[sampler, clone] = Stream(now, now)
            if len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)
        self._streams.move_to_end((sampler, clone))
        return stream


def _completion(request_id: str, *, done: bool, size: int | None) -> Completion:
    state = "finished" if done else "failed"
    return Completion(state=state, request_id=request_id, response_payload_uncompressed_size=size)
