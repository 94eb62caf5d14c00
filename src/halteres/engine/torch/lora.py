"""LoRA weights of one adapter: every tensor a view of one flat buffer.

Owns: which modules an adapter has, where their A and B lie in the flat buffer, seeded initial values; what one adapter
adds to a projection, and the gradients of it.
Never: trains or saves them; merges them into the base weights.

A's of one projection lie next to each other, so the stacked A of a fused projection is a view too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from halteres.engine.protocol import LoraConfig
from halteres.engine.shapes import check_shape
from halteres.engine.torch.matmul import operand_type, reduced
from halteres.engine.torch.model import BaseModel, Projection
from halteres.engine.torch.token_sampling import as_seed


class Adaptation(Protocol):
    """What adapters add to the outputs of one projection: one adapter to all rows, or several, each to its own."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is trained."""
        ...

    def add_to(self, y_NE: Tensor, x_ND: Tensor) -> Tensor:
        """Add it; what A makes of x, which `gradients` needs."""
        ...

    def gradients(self, dy_NE: Tensor, x_ND: Tensor, h: Tensor, dx_ND: Tensor | None) -> tuple[Tensor, ...]:
        """Of `tensors`; that of x is added to `dx_ND`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapter of one projection: `scale * B_i @ A_i` for each part i. R = parts * rank.

    One A serves all parts; the B's go part by part. They are also kept times the scale, as blocks of one matrix. What
    matmuls read has the type of the base's weights; what is trained is fp32. Whoever changes an A or a B calls `fuse`.
    All of it is left to torch's default BLAS: oneDNN lays such narrow matrices out anew, and takes twice as long.
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

    def add_to(self, y_NE: Tensor, x_ND: Tensor) -> Tensor:
        """See `Adaptation`; x @ A^T is N x R."""
        h_NR = reduced(x_ND, self.read_a_RD)
        for outputs, columns in self.blocks:
            y_NE[:, outputs].addmm_(h_NR[:, columns], self.scaled_b_ER[outputs, columns].t())
        return h_NR

    def gradients(self, dy_NE: Tensor, x_ND: Tensor, h: Tensor, dx_ND: Tensor | None) -> tuple[Tensor, ...]:
        """See `Adaptation`."""
        g_NR = torch.empty_like(h)
        for outputs, columns in self.blocks:
            torch.mm(dy_NE[:, outputs], self.scaled_b_ER[outputs, columns], out=g_NR[:, columns])
        if dx_ND is not None:
            dx_ND.addmm_(g_NR, self.read_a_RD)
        parts = (torch.mm(dy_NE[:, outputs].t(), h[:, columns]) for outputs, columns in self.blocks)
        return torch.mm(g_NR.t(), x_ND).float(), *(part.float().mul_(self.scale) for part in parts)


LoraWeights = Mapping[Projection, Lora]
"""A projection without an adapter is absent."""


class Adaptations(Protocol):
    """By projection: `LoraWeights` of one adapter, or those of several for rows of their own."""

    def get(self, projection: Projection, /) -> Adaptation | None:
        """None: no adapter changes it."""
        ...


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
    dtype = operand_type(projection.weight_ED)
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
