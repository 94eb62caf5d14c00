"""LoRA weights of one adapter: every tensor a view of one flat buffer.

Owns: which modules an adapter has, where their A and B lie in the flat buffer, seeded initial values.
Never: trains or saves them; merges them into the base weights.

A's of one projection lie next to each other, so the stacked A of a fused projection is a view too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halteres.engine.protocol import LoraConfig
from halteres.engine.shapes import check_shape
from halteres.engine.torch.draws import as_seed
from halteres.engine.torch.model import BaseModel, Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapter of one projection: `scale * B_i @ A_i` for each part i. R = parts * rank.

    Two matmuls with all parts are faster than six with one part each, so the B's are also kept as one block-diagonal
    matrix, times the scale. What matmuls read has the type of the base's weights; what is trained is fp32. Whoever
    changes an A or a B calls `fuse`.
    """

    a_RD: Tensor
    b: tuple[Tensor, ...]  # per part, E_i x rank
    read_a_RD: Tensor  # A as matmuls read it; shares its memory if the base's weights are fp32
    scaled_b_ER: Tensor
    blocks: tuple[tuple[slice, slice], ...]  # where each part's B lies in it
    scale: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """A, then every B: what is trained and saved."""
        return self.a_RD, *self.b

    def fuse(self) -> None:
        """Copy A, where it has another type, and the B's into the block-diagonal matrix."""
        with torch.no_grad():
            if self.read_a_RD.dtype != self.a_RD.dtype:
                self.read_a_RD.copy_(self.a_RD)
            for b, block in zip(self.b, self.blocks, strict=True):
                torch.mul(b, self.scale, out=self.scaled_b_ER[block])

    def split(self, fused_ER: Tensor) -> tuple[Tensor, ...]:
        """The parts' blocks of a gradient of `scaled_b_ER`, as gradients of the B's."""
        return tuple(fused_ER[block].float() * self.scale for block in self.blocks)


LoraWeights = Mapping[Projection, Lora]
"""A projection without an adapter is absent."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where an adapter's tensors lie in its flat buffer; a pure function of base model and configuration."""

    config: LoraConfig
    projections: tuple[Projection, ...]

    @classmethod
    def of(cls, base: BaseModel, config: LoraConfig) -> Layout:
        """The layout of an adapter on this base.

        Raises:
            InvalidData: a rank out of range, or nothing to train.
        """
        check_shape(config)
        chosen: list[Projection] = []
        for layer in base.layers:
            chosen += layer.attention if config.train_attn else ()
            chosen += layer.mlp if config.train_mlp else ()
        chosen += (base.head,) if config.train_unembed else ()
        return cls(config, tuple(chosen))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.config.alpha / self.config.rank

    @property
    def size(self) -> int:
        """Numbers in the flat buffer."""
        rank = self.config.rank
        return sum(rank * (len(p.parts) * p.inputs + p.weight_ED.shape[0]) for p in self.projections)

    def views(self, flat: Tensor) -> dict[Projection, Lora]:
        """The adapter's tensors in a flat buffer, as views, and its B's fused."""
        return {
            projection: _fused(projection, a_RD, b, self.config.rank, self.scale)
            for projection, a_RD, b in self._split(flat)
        }

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by PEFT's names, as views: `<module>.lora_A.weight` (rank x in), `lora_B` (out x rank)."""
        rank, found = self.config.rank, dict[str, Tensor]()
        for projection, a_RD, b in self._split(flat):
            for i, part in enumerate(projection.parts):
                found[f"base_model.model.{part.module}.lora_A.weight"] = a_RD[i * rank : (i + 1) * rank]
                found[f"base_model.model.{part.module}.lora_B.weight"] = b[i]
        return found

    def initial(self, device: torch.device) -> Tensor:
        """A fresh flat buffer: A kaiming-uniform (as PEFT draws it), B zero. Same seed, same numbers; no seed is 0."""
        generator = torch.Generator().manual_seed(as_seed(self.config.seed or 0))
        flat = torch.zeros(self.size)
        for _, a_RD, _ in self._split(flat):
            bound = 1 / math.sqrt(a_RD.shape[1])
            a_RD.uniform_(-bound, bound, generator=generator)
        return flat.to(device)

    def _split(self, flat: Tensor) -> Iterator[tuple[Projection, Tensor, tuple[Tensor, ...]]]:
        """Each projection with its stacked A and its B's, as views."""
        rank, start = self.config.rank, 0

        def take(rows: int, columns: int) -> Tensor:
            nonlocal start
            start += rows * columns
            return flat[start - rows * columns : start].view(rows, columns)

        for projection in self.projections:
            a_RD = take(len(projection.parts) * rank, projection.inputs)
            yield projection, a_RD, tuple(take(part.stop - part.start, rank) for part in projection.parts)


def _fused(projection: Projection, a_RD: Tensor, b: tuple[Tensor, ...], rank: int, scale: float) -> Lora:
    columns = (slice(i * rank, (i + 1) * rank) for i in range(len(b)))
    rows = (slice(part.start, part.stop) for part in projection.parts)
    dtype = projection.weight_ED.dtype
    lora = Lora(
        a_RD=a_RD,
        b=b,
        read_a_RD=a_RD.to(dtype),
        scaled_b_ER=a_RD.new_zeros((projection.weight_ED.shape[0], a_RD.shape[0]), dtype=dtype),
        blocks=tuple(zip(rows, columns, strict=True)),
        scale=scale,
    )
    lora.fuse()
    return lora
