"""How much memory of the engine adapters and snapshots may take, and how much each of them takes.

Owns: the bytes of both, by the base model's shape; the default, by what memory is free.
Never: makes anything leave (`service.training.adapters` and `service.sampling.snapshots` do).

Each half of the budget is one kind's: many publishes push no adapter out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from halteres.engine.protocol import LoraConfig
from halteres.main_memory import main_memory
from halteres.models.shape import ModelShape, adapter_numbers, diagonal_numbers, read_shape

NUMBER = 4
"""Bytes of a number; adapters are fp32."""

SHARE = 4
"""The default budget is one part in so many of the memory that the base model leaves free."""

LEAST = 1 << 29
"""Bytes of the default budget where little is free, or nobody tells how much."""

UNKNOWN = 32
"""Adapters and snapshots, half of them each, that a budget is for where the model's shape cannot be read."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBudget:
    """Bytes for all adapters and snapshots in the engine. Whatever is in use stays, also beyond it."""

    total: int
    shape: ModelShape | None  # of the base model; None: unknown

    @classmethod
    def of(cls, folder: Path, total: int | None = None) -> WeightsBudget:
        """For the base model in this folder; without a total, by what is free now, before the model is loaded."""
        try:
            shape = read_shape(folder)
        except (OSError, ValueError) as error:
            log.warning("Adapters are counted, not weighed: %s.", error)
            shape = None
        if total is None:
            loaded = NUMBER * shape.parameters if shape else 0
            total = max(LEAST, ((main_memory().free or 0) - loaded) // SHARE)
        return cls(total=total, shape=shape)

    @property
    def of_kind(self) -> int:
        """Bytes for all adapters, and as many for all snapshots."""
        return self.total // 2

    def adapter(self, lora: LoraConfig | None) -> int:
        """Bytes of an adapter: weights, two gradients, two moments, and its B's once more."""
        return self._weighed(lora, 5)

    def snapshot(self, lora: LoraConfig | None) -> int:
        """Bytes of a snapshot: weights, and its B's once more."""
        return self._weighed(lora, 1)

    def _weighed(self, lora: LoraConfig | None, copies: int) -> int:
        """As if it were on every projection; one that is not made yet weighs nothing."""
        if self.shape is None:
            return self.total // UNKNOWN
        rank = lora.rank if lora else 0
        return NUMBER * (copies * adapter_numbers(self.shape, rank) + diagonal_numbers(self.shape, rank))
