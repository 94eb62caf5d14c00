"""The slot cache: keys and values of every sequence that is being decoded.

Owns: one buffer per layer, [slot, key head, position, width], which grows by doubling; slots are rows of a step.
Never: knows which sequence a slot belongs to.
Promise: a position that its slot's sequence has not written is zero, whatever the slot's last tenant left: attention
gives it the weight 0, but 0 * NaN is NaN. (Position 0 of a slot without tenant may hold anything: a tenant writes it.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halteres.engine.torch.model import BaseModel

POSITION_STEP = 32
"""Bounds of what attention reads are multiples of this."""


MIN_SLOTS = 8
"""A cache that holds anything has at least this many slots."""


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a cache: powers of 2, so that growth copies seldom."""

    slots: int = 0
    positions: int = 0

    @property
    def area(self) -> int:
        """Positions of all slots; times the bytes of one it is the memory."""
        return self.slots * self.positions

    def grown(self, slots: int, positions: int) -> Extent:
        """The extent with room for at least this; nothing shrinks."""
        if slots <= self.slots and positions <= self.positions:
            return self
        return Extent(
            max(self.slots, MIN_SLOTS, _power_of_2(slots)),
            max(self.positions, 2 * POSITION_STEP, _power_of_2(positions)),
        )

    def most_slots(self, positions: int, area: int) -> int:
        """As many slots as it may grow to, each with room for `positions`, within an area; 0 if that is impossible."""
        least = self.grown(1, positions)
        return 0 if least.area > area else least.slots << (area // least.area).bit_length() - 1


def _power_of_2(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


class SlotCache:
    """Keys and values, with room for `extent`."""

    def __init__(self, base: BaseModel) -> None:
        self.kv_heads, self.width = base.kv_heads, base.head_width
        self.extent = Extent()
        empty = base.embedding_VD.new_empty((0, self.kv_heads, 0, self.width))
        self._keys, self._values = [empty] * len(base.layers), [empty] * len(base.layers)

    def reserve(self, slots: int, positions: int) -> None:
        """Make room; what the slots hold is kept. Buffer by buffer, so that no two whole caches ever exist."""
        old_extent, self.extent = self.extent, self.extent.grown(slots, positions)
        if self.extent == old_extent:
            return
        for buffers in (self._keys, self._values):
            for i, old in enumerate(buffers):
                new = old.new_zeros((self.extent.slots, self.kv_heads, self.extent.positions, self.width))
                new[: old_extent.slots, :, : old_extent.positions] = old
                buffers[i] = new

    @property
    def bytes(self) -> int:
        """What the buffers hold now."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    def index(self, positions_S: Tensor) -> Tensor:
        """Flat row numbers, slots * key heads, of one position per slot."""
        rows = torch.arange(positions_S.shape[0] * self.kv_heads, device=positions_S.device)
        return rows * self.extent.positions + positions_S.repeat_interleave(self.kv_heads)

    def append(self, layer: int, index_X: Tensor, k_X1W: Tensor, v_X1W: Tensor) -> None:
        """Write one position of every slot."""
        for buffer, new in ((self._keys[layer], k_X1W), (self._values[layer], v_X1W)):
            buffer.view(-1, self.width).index_copy_(0, index_X, new.view(-1, self.width))

    def read(self, layer: int, slots: int, bound: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first slots up to a bound, (slots * key heads) x L x W, as views."""
        shape = (-1, self.extent.positions, self.width)
        return self._keys[layer][:slots].view(shape)[:, :bound], self._values[layer][:slots].view(shape)[:, :bound]

    def fill(self, layer: int, k_BKTW: Tensor, v_BKTW: Tensor, slots: list[range], lengths: list[int]) -> None:
        """Copy each row of a prefill, without its padding, into all of its slots."""
        for row, (own, length) in enumerate(zip(slots, lengths, strict=True)):
            self._keys[layer][own.start : own.stop, :, :length] = k_BKTW[row, :, :length]
            self._values[layer][own.start : own.stop, :, :length] = v_BKTW[row, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one slot over another; neither holds anything from `length` on."""
        for buffer in (*self._keys, *self._values):
            buffer[target, :, :length] = buffer[source, :, :length]

    def clear(self, slots: range, length: int) -> None:
        """Zero slots that have lost their tenants, who wrote nothing from `length` on."""
        for buffer in (*self._keys, *self._values):
            buffer[slots.start : slots.stop, :, :length] = 0
