"""From a fused qkv projection to normalised, rotated heads, laid out for batched matmuls.

Owns: the split into heads, the norms of Qwen3's queries and keys, the rotary embedding, and their backward, in one
function: separate ones would write every intermediate once more.
Never: sees the cache or the adapter.

A is the rows of the rotary tables: B where every row has its own positions, else 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from halteres.engine.torch.fused import FusedModel, Layer
from halteres.engine.torch.model import BaseModel


@dataclass(frozen=True, slots=True)
class Grid:
    """How the N = B * T tokens of a pass lie, and their positions."""

    rows: int  # B
    length: int  # T
    positions_AT: Tensor

    @classmethod
    def padded(cls, base: BaseModel, rows: int, length: int) -> Grid:
        """B rows at positions 0 to T - 1."""
        return cls(rows, length, torch.arange(length, device=base.device)[None])

    @classmethod
    def following(cls, base: BaseModel, starts: Sequence[int], length: int) -> Grid:
        """B rows of T tokens, each from a position of its own on; padding may lie beyond the last position."""
        if not any(starts):
            return cls.padded(base, len(starts), length)
        positions_BT = torch.tensor(starts)[:, None] + torch.arange(length)
        return cls(len(starts), length, positions_BT.clamp_(max=base.context - 1).to(base.device))

    @classmethod
    def single(cls, positions_B: Tensor) -> Grid:
        """One token per row, each at a position of its own."""
        return cls(positions_B.shape[0], 1, positions_B[:, None])


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary tables of a grid's positions."""

    cos_A1TW: Tensor
    sin_A1TW: Tensor  # the sign of the rotation folded in

    @classmethod
    def of(cls, base: FusedModel, grid: Grid) -> Rotation:
        """For all layers."""
        cos, sin = (table[grid.positions_AT].unsqueeze(1) for table in (base.cos_PW, base.sin_PW))
        return cls(cos, sin)


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries of G heads per key head, keys and values; X = B * key heads."""

    q_XGTW: Tensor
    k_XTW: Tensor
    v_XTW: Tensor


def split_heads(base: FusedModel, layer: Layer, grid: Grid, rotation: Rotation, qkv_NE: Tensor) -> Heads:
    """Queries and keys normalised (where the model does) and rotated, values as they are."""
    outputs = _Split.apply(qkv_NE, _Split.Shape(base, layer, grid, rotation))
    assert isinstance(outputs, tuple)  # noqa: S101 - for the type checker
    q_BHTW, k_BKTW, v_BKTW = outputs
    group, length, width = base.heads // base.kv_heads, grid.length, base.head_width
    return Heads(q_BHTW.view(-1, group, length, width), k_BKTW.view(-1, length, width), v_BKTW.view(-1, length, width))


class _Split(Function):
    """J = query and key heads, which are normalised and rotated alike."""

    class Shape:
        """Where heads lie in the projection, and the tables that rotate them."""

        def __init__(self, base: FusedModel, layer: Layer, grid: Grid, rotation: Rotation) -> None:
            self.grid, self.eps = grid, base.norm_eps
            self.attended, self.kept = base.attention_dtype, base.cache_dtype
            self.sizes = base.heads, base.kv_heads
            self.cos, self.sin = rotation.cos_A1TW, rotation.sin_A1TW
            self.weight_J1W = None if layer.qk_norm is None else layer.qk_norm.weight_J1W

        def split(self, qkv_NE: Tensor) -> tuple[Tensor, Tensor]:
            """Queries with keys, and values: views, B x heads x T x W."""
            width = self.cos.shape[-1]
            heads_BETW = qkv_NE.view(self.grid.rows, self.grid.length, -1, width).transpose(1, 2)
            rotated = sum(self.sizes)
            return heads_BETW[:, :rotated], heads_BETW[:, rotated:]

    @staticmethod
    def forward(ctx: Any, qkv_NE: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        x_BJTW, v_BKTW = shape.split(qkv_NE.float())
        scaled_BJTW = x_BJTW if shape.weight_J1W is None else x_BJTW * shape.weight_J1W
        y_BJTW, r_BJT1 = _swapped(scaled_BJTW).mul_(shape.sin).addcmul_(scaled_BJTW, shape.cos), None
        if shape.weight_J1W is not None:
            square_BJT1 = torch.linalg.vector_norm(x_BJTW, dim=-1, keepdim=True).square_()
            r_BJT1 = square_BJT1.div_(x_BJTW.shape[-1]).add_(shape.eps).rsqrt_()
            q_BHTW, k_BKTW = map(torch.mul, y_BJTW.split(shape.sizes, dim=1), r_BJT1.split(shape.sizes, dim=1))
        else:
            q_BHTW, k_BKTW = (part.contiguous() for part in y_BJTW.split(shape.sizes, dim=1))
        ctx.save_for_backward(qkv_NE, r_BJT1)
        ctx.shape = shape
        k_BKTW, v_BKTW = (part.to(shape.kept).to(shape.attended) for part in (k_BKTW, v_BKTW.contiguous()))
        return q_BHTW.to(shape.attended), k_BKTW, v_BKTW

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (qkv_NE, r_BJT1), shape = ctx.saved_tensors, ctx.shape
        dqkv_NE = torch.empty_like(qkv_NE, dtype=torch.float32)
        (x_BJTW, _), (dx_BJTW, dv_BKTW) = shape.split(qkv_NE), shape.split(dqkv_NE)
        dv_BKTW.copy_(grads[2])
        dy_BJTW = torch.cat(grads[:2], dim=1).float()
        g_BJTW = _swapped(dy_BJTW * shape.sin).addcmul_(dy_BJTW, shape.cos)
        if r_BJT1 is None:
            dx_BJTW.copy_(g_BJTW)
            return dqkv_NE.to(qkv_NE.dtype), None
        g_BJTW.mul_(shape.weight_J1W)
        x_BJTW = x_BJTW.float()
        c_BJT1 = torch.linalg.vecdot(g_BJTW, x_BJTW).unsqueeze(-1)
        c_BJT1.mul_(r_BJT1.pow(3)).div_(-x_BJTW.shape[-1])
        torch.mul(g_BJTW, r_BJT1, out=dx_BJTW)
        dx_BJTW.addcmul_(x_BJTW, c_BJT1)
        return dqkv_NE.to(qkv_NE.dtype), None


def _swapped(x: Tensor) -> Tensor:
    """The halves of the last dimension exchanged; a contiguous copy."""
    half = x.shape[-1] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half].copy_(x[..., half:])
    out[..., half:].copy_(x[..., :half])
    return out
