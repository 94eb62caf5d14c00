"""The rows in decode, and their slots.

Owns: which row has which slot of which block; the numbers that a step needs of each row, as columns.
Never: runs a model; decides who enters or makes way.

Rows lie without gaps: all blocks of one length but the last are full, and a block's rows have its first slots. A row
has a slot of the shortest length that holds it, and moves on when it has filled that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from halteres.engine.torch.cache import Block, CacheMemory, slot_length
from halteres.engine.torch.requests import Row

COLUMNS = np.dtype(
    [
        ("token", np.int64),  # the newest one, to be fed next
        ("position", np.int64),  # ... at this position
        ("seed", np.uint64),
        ("sample", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("tempered", np.bool_),
        ("told", np.int64),  # most likely tokens that are told with every token
    ],
    align=True,
)


class RowBlock:
    """Rows in the slots of one block: row i in slot i."""

    def __init__(self, cache: Block) -> None:
        self.cache = cache
        self.rows: list[Row] = []
        self.columns_S = np.zeros(cache.slots, COLUMNS)

    @property
    def vacant(self) -> int:
        """Slots without a row."""
        return self.cache.slots - len(self.rows)

    @property
    def written_R(self) -> np.ndarray:
        """Positions that each row's slot holds: the newest token is not there yet."""
        return self.columns_S["position"][: len(self.rows)]

    @property
    def full(self) -> list[Row]:
        """Rows that have filled their slots."""
        return [self.rows[slot] for slot in np.flatnonzero(self.written_R >= self.cache.length)]

    def exchange(self, cache: Block) -> Block:
        """Move all rows into another block with room for them; the old one."""
        count, old = len(self.rows), self.cache
        if count:
            slots = range(count)
            cache.copy(slots, old, slots, int(self.written_R.max()))
        columns_S = np.zeros(cache.slots, COLUMNS)
        columns_S[:count] = self.columns_S[:count]
        self.cache, self.columns_S = cache, columns_S
        return old


Place = tuple[RowBlock, range]
"""Neighbouring slots of a block."""


class Rows:
    """All rows, in the order of a step."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self._blocks: dict[int, list[RowBlock]] = {}  # by length, the shortest first

    def __len__(self) -> int:
        return sum(len(block.rows) for block in self.blocks)

    def __iter__(self) -> Iterator[Row]:
        return (row for block in self.blocks for row in block.rows)

    @property
    def blocks(self) -> list[RowBlock]:
        """All that have rows, or room for some."""
        return [block for blocks in self._blocks.values() for block in blocks]

    @property
    def places(self) -> list[Place]:
        """All rows'."""
        return [(block, range(len(block.rows))) for block in self.blocks if block.rows]

    @property
    def vacant(self) -> int:
        """Positions of slots without a row: what `trim` would free."""
        return sum(block.vacant * block.cache.length for block in self.blocks)

    def make_room(self, length: int, count: int, *, forced: bool = False) -> int:
        """Slots of this length that are free now: so many, or as many as there is memory for.

        Args:
            length: of the slots.
            count: how many are wanted.
            forced: one there is in any case.
        """
        memory = self._memory
        while (vacant := self._vacant(length)) < count:
            fit = memory.free // length
            fit = max(fit, 1 - vacant) if forced else fit
            if fit < 1:
                break
            last, most = (self._blocks.get(length) or [None])[-1], memory.most_slots(length)
            if last is None or last.cache.slots >= most:
                block = RowBlock(memory.block(min(count - vacant, fit, most), length))
                self._blocks.setdefault(length, []).append(block)
                self._blocks = dict(sorted(self._blocks.items()))
            else:
                slots = last.cache.slots
                self._resize(last, min(slots + min(max(slots, count - vacant), fit), most))
        return min(count, self._vacant(length))

    def enter(self, length: int, rows: Sequence[Row], columns: np.ndarray) -> list[Place]:
        """Give rows free slots; `make_room` was asked for them."""
        places: list[Place] = []
        taken = 0
        for block in self._blocks[length]:
            part = rows[taken : taken + block.vacant]
            if part:
                slots = range(len(block.rows), len(block.rows) + len(part))
                block.columns_S[slots.start : slots.stop] = columns[taken : taken + len(part)]
                block.rows += part
                places.append((block, slots))
                taken += len(part)
        return places

    def leave(self, rows: Collection[Row]) -> None:
        """Rows go."""
        for blocks in self._blocks.values():
            _leave(blocks, rows)
        self._drop_empty()

    @property
    def grown(self) -> dict[int, list[Row]]:
        """Rows that have filled their slots, by the slots' length."""
        found = {length: [row for block in blocks for row in block.full] for length, blocks in self._blocks.items()}
        return {length: rows for length, rows in found.items() if rows}

    def move_on(self, *, forced: bool = False) -> int:
        """Rows that have filled their slots get longer ones, the oldest first, while there is memory; how many did.

        Args:
            forced: one does in any case.
        """
        moved = 0
        for length, rows in sorted(self.grown.items(), reverse=True):
            longer = slot_length(length + 1, self._memory.context)
            count = self.make_room(longer, len(rows), forced=forced and not moved)
            if count:
                self._move(sorted(rows, key=lambda row: row.age)[:count], length, longer)
                moved += count
        self._drop_empty()
        return moved

    def keep(self, rows: Collection[Row]) -> None:
        """What these rows' slots hold stays as prefixes, as far as there is room."""
        gone = set(rows)
        for block in self.blocks:
            for slot, row in enumerate(block.rows):
                if row in gone:
                    text = row.text[: int(block.columns_S["position"][slot])]
                    self._memory.prefixes.keep(row.request.snapshot, text, block.cache, slot, self._memory.free)

    def trim(self) -> None:
        """Free the memory of slots without rows."""
        for block in self.blocks:
            if block.rows and block.vacant:
                self._resize(block, len(block.rows))
        self._drop_empty()

    def release(self) -> None:
        """Let go of everything."""
        for block in self.blocks:
            self._memory.release(block.cache)
        self._blocks = {}

    def _move(self, rows: Sequence[Row], length: int, longer: int) -> None:
        slots = {row: (block, slot) for block in self._blocks[length] for slot, row in enumerate(block.rows)}
        old = [slots[row] for row in rows]
        columns = np.array([block.columns_S[slot] for block, slot in old], COLUMNS)
        moved = 0
        for block, places in self.enter(longer, rows, columns):
            for slot in places:
                source, number = old[moved]
                block.cache.copy([slot], source.cache, [number], length)
                moved += 1
        _leave(self._blocks[length], rows)

    def _vacant(self, length: int) -> int:
        return sum(block.vacant for block in self._blocks.get(length, ()))

    def _resize(self, block: RowBlock, slots: int) -> None:
        self._memory.release(block.exchange(self._memory.block(slots, block.cache.length)))

    def _drop_empty(self) -> None:
        for length, blocks in list(self._blocks.items()):
            for block in blocks:
                if not block.rows:
                    self._memory.release(block.cache)
            self._blocks[length] = [block for block in blocks if block.rows]
        self._blocks = {length: blocks for length, blocks in self._blocks.items() if blocks}


def _leave(blocks: Sequence[RowBlock], rows: Collection[Row]) -> None:
    """The last rows of all these blocks close the gaps; nothing stays behind in slots that are free then."""
    gone = set(rows)
    before = [(len(block.rows), int(block.written_R.max(initial=0))) for block in blocks]
    for number in range(len(blocks) - 1, -1, -1):
        block = blocks[number]
        for slot in range(len(block.rows) - 1, -1, -1):
            if block.rows[slot] in gone:
                last = next(last for last in reversed(blocks) if last.rows)
                _replace(block, slot, last, len(last.rows) - 1)
    for block, (count, written) in zip(blocks, before, strict=True):
        if block.rows and len(block.rows) < count:
            block.cache.clear(range(len(block.rows), count), written)


def _replace(block: RowBlock, slot: int, last: RowBlock, number: int) -> None:
    """The row in the last slot takes a slot whose row has gone."""
    if block is not last or slot != number:
        length = int(max(block.columns_S["position"][slot], last.columns_S["position"][number]))
        block.cache.copy([slot], last.cache, [number], length)
        block.rows[slot], block.columns_S[slot] = last.rows[number], last.columns_S[number]
    last.rows.pop()
    last.columns_S[number] = np.zeros((), COLUMNS)
