"""Where keys and values lie while sequences are decoded: blocks of slots of one length.

A position that its slot's sequence has not written is zero, whatever the slot's last tenant left: attention gives it
the weight 0, but 0 * NaN is NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.model import BaseModel, Heads
from halteres.engine.torch.projections import round_up

POSITION_STEP = 32  # bounds of what attention reads are multiples of this, as are lengths of slots
SHORTEST = 128
"""Positions of the shortest slot: steps of a small model have one or two blocks, and each costs calls of its own."""

MOST_BYTES, MOST_SHARE = 32 << 20, 32
"""A block of several slots holds at most so many bytes, or this part of all memory where that is more: blocks grow by
copying, and what a copy takes has to be small beside a step's reading."""


def slot_length(positions: int, context: int) -> int:
    """Positions of the shortest slot that holds so many: 128, 256, 384, 512, 768, 1024, ..., the context.

    >>> [slot_length(positions, 2000) for positions in (1, 129, 300, 513, 1025, 1900)]
    [128, 256, 384, 768, 1536, 2016]
    """
    length = max(SHORTEST, 1 << max(positions - 1, 0).bit_length())
    if length > 2 * SHORTEST and positions <= length // 4 * 3:
        length = length // 4 * 3
    return min(length, max(SHORTEST, round_up(context, POSITION_STEP)))


class Block:
    """Keys and values of some slots, which are as many consecutive rows of a decode step."""

    def __init__(self, base: BaseModel, slots: int, length: int) -> None:
        layers, heads, width = len(base.layers), base.kv_heads, base.head_width
        self.slots, self.length, self.kv_heads = slots, length, heads
        self._data = torch.zeros((2, layers, slots, heads, length, width), dtype=base.cache_dtype, device=base.device)
        self._rows = self._data.view(2 * layers, slots * heads, length, width)
        self._positions = self._data.view(2, layers, slots * heads * length, width)

    @property
    def area(self) -> int:
        """Positions of all slots; times the bytes of one it is the memory."""
        return self.slots * self.length

    @property
    def buffer(self) -> Tensor:
        """Keys, then values: 2 x layers x slots x key heads x length x width."""
        return self._data

    def index(self, positions_S: Tensor) -> Tensor:
        """Flat row numbers, slots * key heads, of one position of each of the first slots."""
        rows = torch.arange(positions_S.shape[0] * self.kv_heads, device=positions_S.device)
        return (rows * self.length).add_(positions_S.repeat_interleave(self.kv_heads))

    def append(self, layer: int, index_X: Tensor, k_X1W: Tensor, v_X1W: Tensor) -> None:
        """Write one position of each of the first slots."""
        for part, new_X1W in enumerate((k_X1W, v_X1W)):
            self._positions[part, layer].index_copy_(0, index_X, new_X1W.squeeze(1).to(self._data.dtype))

    def read(self, slots: int, bound: int) -> Sequence[Tensor]:
        """Keys of every layer, then values of every layer, of the first slots up to a bound.

        Views, (slots * key heads) x L x W.
        """
        return self._rows[:, : slots * self.kv_heads, :bound].unbind(0)

    def write(self, layer: int, slot: int, heads: Heads, row: int, positions: range) -> None:
        """Copy a row of a prefill, without its padding, to these positions of a slot."""
        own, count = slice(row * self.kv_heads, (row + 1) * self.kv_heads), len(positions)
        for part, new_XTW in enumerate((heads.k_XTW, heads.v_XTW)):
            self._data[part, layer, slot, :, positions.start : positions.stop] = new_XTW[own, :count]

    def slot(self, layer: int, slot: int, bound: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one slot up to a bound: views, key heads x L x W."""
        return self._data[0, layer, slot, :, :bound], self._data[1, layer, slot, :, :bound]

    def copy(self, slots: Sequence[int], source: Block, sources: Sequence[int], length: int) -> None:
        """Copy slots of a block, this or another, up to a length; one source may go to all."""
        self._data[:, :, _range(slots), :, :length] = source._data[:, :, _range(sources), :, :length]

    def clear(self, slots: range, length: int) -> None:
        """Zero slots that have lost their tenants, who wrote nothing from `length` on."""
        self._data[:, :, slots.start : slots.stop, :, :length] = 0


def _range(slots: Sequence[int]) -> slice | list[int]:
    """Neighbours as a slice, which is a view."""
    first, last = slots[0], slots[-1]
    return slice(first, last + 1) if last - first + 1 == len(slots) and sorted(slots) == [*slots] else [*slots]


@dataclass(slots=True, eq=False)
class Prefix:
    """Keys and values that stay when their sequence has ended."""

    tokens: np.ndarray  # int64, whole pages of POSITION_STEP
    block: Block  # of one slot
    snapshot: weakref.ref[Snapshot]

    @property
    def texts(self) -> list[bytes]:
        """What it begins with, in whole pages: the keys that it is found by."""
        return [self.tokens[:stop].tobytes() for stop in range(POSITION_STEP, len(self.tokens) + 1, POSITION_STEP)]


class PrefixCache:
    """What ended sequences began with, in memory that no row needs; the least recently used goes first.

    A prefix is found by its whole pages, so that a text's queries fall into the blocks in which a whole prefill has
    them, and have the same bits. Those of a snapshot that nobody holds any more go at the next look for room.
    """

    def __init__(self, base: BaseModel, most: int) -> None:
        self._base, self._most = base, most
        self.hit_tokens, self.computed_tokens = 0, 0  # of all texts that were prefilled
        self._entries: dict[Prefix, None] = {}  # the least recently used first
        self._by_text: weakref.WeakKeyDictionary[Snapshot, dict[bytes, Prefix]] = weakref.WeakKeyDictionary()

    @property
    def area(self) -> int:
        """Positions of all."""
        return sum(prefix.block.area for prefix in self._entries)

    def find(self, snapshot: Snapshot, tokens: np.ndarray) -> tuple[Prefix, int] | None:
        """What the text shares with a prefix, in whole pages, and at least one token short of it: its last one has to
        be computed."""
        by_text, found = self._by_text.get(snapshot, {}), None
        for stop in range(POSITION_STEP, len(tokens), POSITION_STEP):
            prefix = by_text.get(tokens[:stop].tobytes())
            if prefix is None:
                break
            found = prefix, stop
        if found is not None:
            self._entries[found[0]] = self._entries.pop(found[0], None)
        return found

    def keep(self, snapshot: Snapshot, tokens: np.ndarray, block: Block, slot: int, room: int) -> None:
        """Keep what the slot holds of these tokens, if `room` for all prefixes allows it."""
        length = len(tokens) // POSITION_STEP * POSITION_STEP
        by_text = self._by_text.setdefault(snapshot, {})
        if not 0 < length <= room or not self._most or tokens[:length].tobytes() in by_text:
            return
        self.shrink(room - length, self._most - 1)
        prefix = Prefix(tokens[:length], Block(self._base, 1, length), weakref.ref(snapshot))
        prefix.block.copy([0], block, [slot], length)
        self._entries[prefix] = None
        for text in prefix.texts:
            by_text.setdefault(text, prefix)

    def shrink(self, area: int, count: int | None = None) -> None:
        """Keep so many positions, and prefixes, at most."""
        if not self._entries:
            return
        for prefix in [prefix for prefix in self._entries if prefix.snapshot() is None]:
            del self._entries[prefix]
        held, most = self.area, self._most if count is None else count
        while self._entries and (held > area or len(self._entries) > most):
            prefix = next(iter(self._entries))
            held -= prefix.block.area
            del self._entries[prefix]
            snapshot = prefix.snapshot()
            by_text = self._by_text.get(snapshot, {}) if snapshot is not None else {}
            for text in [text for text in prefix.texts if by_text.get(text) is prefix]:
                del by_text[text]
            for other in self._entries:  # those that begin alike are found by their own pages from now on
                if other.snapshot() is snapshot and other.texts[0] == prefix.texts[0]:
                    for text in other.texts:
                        by_text.setdefault(text, other)


class CacheMemory:
    """How much all blocks take: at most `cache_bytes`, unless one row alone needs more."""

    def __init__(self, base: BaseModel, cache_bytes: int, prefixes: int = 0) -> None:
        self._base = base
        self._area = cache_bytes // base.cache_bytes_per_token
        self._most = max(MOST_BYTES, cache_bytes // MOST_SHARE) // base.cache_bytes_per_token
        self.used = 0  # positions of rows' blocks
        self.prefixes = PrefixCache(base, prefixes)

    @property
    def free(self) -> int:
        """Positions that no row has; prefixes make way. Below 0 where one row alone needed more than there is."""
        return self._area - self.used

    @property
    def context(self) -> int:
        """Positions that a sequence can have."""
        return self._base.context

    def most_slots(self, length: int) -> int:
        """Slots of one block."""
        return max(1, self._most // length)

    def block(self, slots: int, length: int) -> Block:
        """A new block; whoever asks has looked whether it is free."""
        self.prefixes.shrink(self.free - slots * length)
        block = Block(self._base, slots, length)
        self.used += block.area
        return block

    def release(self, block: Block) -> None:
        """A block has no tenants any more."""
        self.used -= block.area
