"""Where keys and values lie while sequences are decoded: blocks of slots of one length.

Owns: a block's buffer and what attention reads and writes of it; which lengths slots have; how much memory all blocks
take together.
Never: knows which sequence a slot belongs to, or who may have one.
Promise: a position that its slot's sequence has not written is zero, whatever the slot's last tenant left: attention
gives it the weight 0, but 0 * NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halteres.engine.torch.heads import Heads
from halteres.engine.torch.model import BaseModel

POSITION_STEP = 32
"""Bounds of what attention reads are multiples of this, as are lengths of slots."""

SHORTEST = 128
"""Positions of the shortest slot: steps of a small model have one or two blocks, and each costs calls of its own."""

MOST_BYTES, MOST_SHARE = 32 << 20, 32
"""A block of several slots holds at most so many bytes, or this part of all memory where that is more: blocks grow by
copying, and what a copy takes has to be small beside a step's reading."""


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


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
        self._data = base.embedding_VD.new_zeros((2, layers, slots, heads, length, width))
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
            self._positions[part, layer].index_copy_(0, index_X, new_X1W.squeeze(1))

    def read(self, slots: int, bound: int) -> Sequence[Tensor]:
        """Keys of every layer, then values of every layer, of the first slots up to a bound.

        Views, (slots * key heads) x L x W.
        """
        return self._rows[:, : slots * self.kv_heads, :bound].unbind(0)

    def write(self, layer: int, slot: int, heads: Heads, row: int, length: int) -> None:
        """Copy a row of a prefill, without its padding, into a slot."""
        own = slice(row * self.kv_heads, (row + 1) * self.kv_heads)
        self._data[0, layer, slot, :, :length] = heads.k_XTW[own, :length]
        self._data[1, layer, slot, :, :length] = heads.v_XTW[own, :length]

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


class CacheMemory:
    """How much all blocks take: at most `cache_bytes`, unless one row alone needs more."""

    def __init__(self, base: BaseModel, cache_bytes: int) -> None:
        self._base = base
        self._area = cache_bytes // base.cache_bytes_per_token
        self._most = max(MOST_BYTES, cache_bytes // MOST_SHARE) // base.cache_bytes_per_token
        self.used = 0  # positions

    @property
    def free(self) -> int:
        """Positions that are not taken; below 0 where one row alone needed more than there is."""
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
        block = Block(self._base, slots, length)
        self.used += block.area
        return block

    def release(self, block: Block) -> None:
        """A block has no tenants any more."""
        self.used -= block.area
