"""The slot cache: keys and values of every sequence that is being decoded.

Owns: one buffer per layer, [slot, key head, position, width], which grows by doubling; slots are rows of a step.
Never: knows which sequence a slot belongs to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halteres.engine.torch.model import BaseModel

POSITION_STEP = 32
"""Bounds of what attention reads are multiples of this."""


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


class SlotCache:
    """Keys and values, with room for `slots` rows of `positions`."""

    def __init__(self, base: BaseModel) -> None:
        self.kv_heads, self.width = base.kv_heads, base.head_width
        self.slots, self.positions = 0, 0
        empty = base.embedding_VD.new_empty((0, self.kv_heads, 0, self.width))
        self._keys, self._values = [empty] * len(base.layers), [empty] * len(base.layers)

    def reserve(self, slots: int, positions: int) -> None:
        """Make room; what the slots hold is kept. Positions never written are zero, so masked ones are finite."""
        if slots <= self.slots and positions <= self.positions:
            return
        old_slots, old_positions = self.slots, self.positions
        self.slots = max(old_slots, 8, 1 << (slots - 1).bit_length())
        self.positions = max(old_positions, 2 * POSITION_STEP, 1 << (positions - 1).bit_length())
        for buffers in (self._keys, self._values):
            for i, old in enumerate(buffers):
                new = old.new_zeros((self.slots, self.kv_heads, self.positions, self.width))
                new[:old_slots, :, :old_positions] = old
                buffers[i] = new

    def index(self, positions_S: Tensor) -> Tensor:
        """Flat row numbers, slots * key heads, of one position per slot."""
        rows = torch.arange(positions_S.shape[0] * self.kv_heads, device=positions_S.device)
        return rows * self.positions + positions_S.repeat_interleave(self.kv_heads)

    def append(self, layer: int, index_X: Tensor, k_X1W: Tensor, v_X1W: Tensor) -> None:
        """Write one position of every slot."""
        for buffer, new in ((self._keys[layer], k_X1W), (self._values[layer], v_X1W)):
            buffer.view(-1, self.width).index_copy_(0, index_X, new.view(-1, self.width))

    def read(self, layer: int, slots: int, bound: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first slots up to a bound, (slots * key heads) x L x W, as views."""
        shape = (-1, self.positions, self.width)
        return self._keys[layer][:slots].view(shape)[:, :bound], self._values[layer][:slots].view(shape)[:, :bound]

    def fill(self, layer: int, k_BKTW: Tensor, v_BKTW: Tensor, slots: list[range]) -> None:
        """Copy each row of a prefill into all of its slots."""
        length = k_BKTW.shape[2]
        for row, own in enumerate(slots):
            self._keys[layer][own.start : own.stop, :, :length] = k_BKTW[row]
            self._values[layer][own.start : own.stop, :, :length] = v_BKTW[row]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one slot over another."""
        for buffer in (*self._keys, *self._values):
            buffer[target, :, :length] = buffer[source, :, :length]
