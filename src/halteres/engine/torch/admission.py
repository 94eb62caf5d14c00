"""Which of the waiting requests enter, and with how many rows.

Owns: the bounds on rows and on the memory of all slot caches; the spare cache.
Never: runs a model; reorders: where the first in line does not fit, nobody behind it enters.
Promise: the caches together, and the spare one, hold at most `cache_bytes`, unless one request alone needs more: that
one runs with nobody else. (While a cache grows, its old buffer of one layer comes on top.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.cache import MIN_SLOTS, Extent, SlotCache
from halteres.engine.torch.decode import DecodeBatch
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.requests import SampleRequest

Entries = dict[DecodeBatch, list[tuple[SampleRequest, int]]]
"""Requests with the rows each gets now."""


class CachePool:
    """Hands out caches; knows how far one may grow beside the others."""

    def __init__(self, base: BaseModel, limits: Limits) -> None:
        self._base = base
        self._area = limits.cache_bytes // base.cache_bytes_per_token
        self.spare: SlotCache | None = None

    def take(self) -> SlotCache:
        """A cache without tenants."""
        cache, self.spare = self.spare, None
        return cache or SlotCache(self._base)

    def fresh(self) -> SlotCache:
        """One that has not grown yet."""
        return SlotCache(self._base)

    def give_back(self, cache: SlotCache, others: Iterable[Extent]) -> None:
        """Keep one cache that fits beside what the others may become: fresh memory costs a page fault per 4 KiB."""
        if self.spare is None and cache.extent.area + _area(others) <= self._area:
            self.spare = cache

    def slots(self, extent: Extent, positions: int, others: Iterable[Extent], wanted: int) -> int:
        """Slots a cache may grow to if they reach `positions`; the spare cache makes way for those wanted."""
        free = self._area - _area(others)
        if self.spare:
            most = extent.most_slots(positions, free - self.spare.extent.area)
            if most >= wanted:
                return most
            self.spare = None
        return extent.most_slots(positions, free)


def _area(extents: Iterable[Extent]) -> int:
    return sum(extent.area for extent in extents)


class Admission:
    """One round, before a decode step; counts every cache as large as its rows may make it."""

    def __init__(self, batches: deque[DecodeBatch], base: BaseModel, pool: CachePool, limits: Limits) -> None:
        self._batches, self._base, self._pool, self._limits = batches, base, pool, limits
        self._extents = {batch: batch.extent for batch in batches}
        self._rows = {batch: len(batch.rows) for batch in batches}
        self.entries: Entries = {}

    def fill(self, waiting: deque[SampleRequest]) -> Entries:
        """Waiting requests that fit, in order; one that fits in part gets some of its rows now, the others later."""
        while waiting and self._free_rows > 0:
            request = waiting[0]
            batch = self._batch(request.snapshot)
            count = min(request.waiting, self._free_rows, self._room(batch, request))
            if count < 1 and not any(self._rows.values()):  # larger than the bound, but alone
                count = min(request.waiting, self._free_rows, MIN_SLOTS)
            if count < 1:
                break
            self._enter(batch, request, count)
            if count < request.waiting:
                break
            waiting.popleft()
        return self.entries

    @property
    def _free_rows(self) -> int:
        return self._limits.decode_rows - sum(self._rows.values())

    def _room(self, batch: DecodeBatch, request: SampleRequest) -> int:
        """Rows that the caches have memory for."""
        rows, positions = self._rows[batch], request.full_length
        others = [extent for other, extent in self._extents.items() if other is not batch]
        wanted = rows + min(request.waiting, self._free_rows)
        slots = self._pool.slots(self._extents[batch], positions, others, wanted)
        if slots < 1 and not rows:  # what a former tenant made of the cache is too large: a fresh one may fit
            batch.cache, self._extents[batch] = self._pool.fresh(), Extent()
            slots = self._pool.slots(Extent(), positions, others, wanted)
        return slots - rows

    def _enter(self, batch: DecodeBatch, request: SampleRequest, count: int) -> None:
        self.entries.setdefault(batch, []).append((request, count))
        self._rows[batch] += count
        self._extents[batch] = self._extents[batch].grown(self._rows[batch], request.full_length)

    def _batch(self, snapshot: Snapshot) -> DecodeBatch:
        for batch in self._batches:
            if batch.snapshot is snapshot:
                return batch
        batch = DecodeBatch(self._base, snapshot, self._limits, self._pool.take())
        self._batches.append(batch)
        self._extents[batch], self._rows[batch] = batch.cache.extent, 0
        return batch
