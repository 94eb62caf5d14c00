"""Who gets slots of the cache, and who makes way where memory ends.

Owns: the bounds on rows and on memory; the order in which rows enter and make way.
Never: runs a model; lets a later request in before an earlier one: where the first in line does not fit, nobody
behind it enters.

A row is counted with the slot that it has, not with all that its request may come to need. Where rows outgrow the
memory, the youngest of all make way, and wait for slots again in the order in which their requests came; so the oldest
always goes on. One row alone may need more than there is, and has it.
"""

from __future__ import annotations

from collections.abc import Iterator

from halteres.engine.torch.cache import POSITION_STEP, CacheMemory, slot_length
from halteres.engine.torch.decode import DecodeBatch
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.requests import Row, SampleRequest
from halteres.engine.torch.rows import Rows


class Admission:
    """The batch, and its memory."""

    def __init__(self, base: BaseModel, limits: Limits) -> None:
        self._base, self._limits = base, limits
        self.memory = CacheMemory(base, limits.cache_bytes, limits.prefixes)
        self.batch = DecodeBatch(base, limits, self.memory)

    @property
    def num_rows(self) -> int:
        """Of the batch."""
        return len(self._rows)

    @property
    def _rows(self) -> Rows:
        return self.batch.rows

    def enter(self, request: SampleRequest) -> None:
        """As many rows of the request as fit."""
        while request.waiting:
            count = min(self._alike(request), self._limits.decode_rows - self.num_rows)
            length = self._length(request.waiting[0])
            count = self._room(length, count) if count > 0 else 0
            if not count:
                return
            self.batch.enter(request, length, count)

    def make_way(self) -> Iterator[Row]:
        """Rows that have filled their slots get longer ones; each row that lost its slot to them, before anything is
        allocated, which may fail."""
        while self._missing > 0 and self.num_rows > 1:
            row = max(self._rows, key=lambda row: row.age)
            self._rows.leave([row])
            yield row
        while self._rows.grown:
            if not self._rows.move_on():
                self._rows.trim()
                self._rows.move_on(forced=True)

    @property
    def _missing(self) -> int:
        """Positions that are too few for all rows that have filled their slots. One by one, a row leaves its old slot
        behind for the next."""
        lengths = {length: (self._longer(length), len(rows)) for length, rows in self._rows.grown.items()}
        if not lengths:
            return 0
        more = sum((longer - length) * count for length, (longer, count) in lengths.items())
        return more + max(lengths) - self.memory.free - self._rows.vacant

    def _room(self, length: int, count: int) -> int:
        """Slots for this many rows or, if there are fewer, for those."""
        found = self._rows.make_room(length, count)
        if found < count and self._rows.vacant:
            self._rows.trim()
            found = self._rows.make_room(length, count)
        return found or self._rows.make_room(length, 1, forced=not self.num_rows)

    def _alike(self, request: SampleRequest) -> int:
        """How many of the first rows need slots of one length."""
        first = self._length(request.waiting[0])
        return next((i for i, row in enumerate(request.waiting) if self._length(row) != first), len(request.waiting))

    def _length(self, row: Row) -> int:
        """Of the slot that a row enters with: what it has, and a little more."""
        return slot_length(min(row.length + POSITION_STEP, row.request.full_length), self._base.context)

    def _longer(self, length: int) -> int:
        return slot_length(length + 1, self._base.context)
