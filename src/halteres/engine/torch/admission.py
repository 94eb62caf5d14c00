"""Who gets slots of the cache, and who makes way where memory ends.

Owns: the bounds on rows and on memory; the order in which rows enter and make way.
Never: runs a model; lets a later request in before an earlier one: where the first in line does not fit, nobody
behind it enters.

A row is counted with the slot that it has, not with all that its request may come to need. Where rows outgrow the
memory, the youngest of all make way, and wait for slots again in the order in which their requests came; so the oldest
always goes on. One row alone may need more than there is, and has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.cache import POSITION_STEP, CacheMemory, slot_length
from halteres.engine.torch.decode import DecodeBatch
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.requests import Row, SampleRequest


class Admission:
    """The batches of all snapshots, and the memory that they share."""

    def __init__(self, base: BaseModel, limits: Limits) -> None:
        self._base, self._limits = base, limits
        self.memory = CacheMemory(base, limits.cache_bytes, limits.prefixes)
        self.batches: deque[DecodeBatch] = deque()

    @property
    def num_rows(self) -> int:
        """Of all batches."""
        return sum(len(batch.rows) for batch in self.batches)

    def batch(self, snapshot: Snapshot) -> DecodeBatch:
        """The rows of this snapshot."""
        for batch in self.batches:
            if batch.snapshot is snapshot:
                return batch
        self.batches.append(DecodeBatch(self._base, snapshot, self._limits, self.memory))
        return self.batches[-1]

    def enter(self, batch: DecodeBatch, request: SampleRequest) -> None:
        """As many rows of the request as fit."""
        while request.waiting:
            count = min(self._alike(request), self._limits.decode_rows - self.num_rows)
            length = self._length(request.waiting[0])
            count = self._room(batch, length, count) if count > 0 else 0
            if not count:
                return
            batch.enter(request, length, count)

    def make_way(self, batch: DecodeBatch) -> Iterator[Row]:
        """Rows of this batch that have filled their slots get longer ones; each row that lost its slot to them, before
        anything is allocated, which may fail."""
        while self._missing(batch) > 0 and self.num_rows > 1:
            row = self._youngest()
            self.batch(row.request.snapshot).rows.leave([row])
            yield row
        while batch.rows.grown:
            if not batch.rows.move_on():
                self._trim()
                batch.rows.move_on(forced=True)

    def _missing(self, batch: DecodeBatch) -> int:
        """Positions that are too few for all rows that have filled their slots. One by one, a row leaves its old slot
        behind for the next."""
        lengths = {length: (self._longer(length), len(rows)) for length, rows in batch.rows.grown.items()}
        if not lengths:
            return 0
        more = sum((longer - length) * count for length, (longer, count) in lengths.items())
        return more + max(lengths) - self.memory.free - self._vacant

    def _room(self, batch: DecodeBatch, length: int, count: int) -> int:
        """Slots for this many rows or, if there are fewer, for those."""
        found = batch.rows.make_room(length, count)
        if found < count and self._vacant:
            self._trim()
            found = batch.rows.make_room(length, count)
        return found or batch.rows.make_room(length, 1, forced=not self.num_rows)

    def _alike(self, request: SampleRequest) -> int:
        """How many of the first rows need slots of one length."""
        first = self._length(request.waiting[0])
        return next((i for i, row in enumerate(request.waiting) if self._length(row) != first), len(request.waiting))

    def _length(self, row: Row) -> int:
        """Of the slot that a row enters with: what it has, and a little more."""
        return slot_length(min(row.length + POSITION_STEP, row.request.full_length), self._base.context)

    def _longer(self, length: int) -> int:
        return slot_length(length + 1, self._base.context)

    @property
    def _vacant(self) -> int:
        return sum(batch.rows.vacant for batch in self.batches)

    def _trim(self) -> None:
        for batch in self.batches:
            batch.rows.trim()

    def _youngest(self) -> Row:
        return max(self._all_rows(), key=lambda row: row.age)

    def _all_rows(self) -> Iterator[Row]:
        return (row for batch in self.batches for row in batch.rows)
