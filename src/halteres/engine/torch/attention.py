"""Attention over one padded batch, and over the slot cache.

Owns: how queries meet keys: causally inside a batch, or each row with its own past.
Never: expands keys and values to the number of query heads.
Promise: on a CPU a query's result has the same bits in training, prefill and decoding, so that the sampler's and the
trainer's log-probabilities are equal, not merely close: the built-in model amplifies fp32 rounding to 2e-5 (p99.9).

The promise rests on three properties of the batched matmul (MKL 2024.2; the tests of equal bits hold them). With at
least 4 rows the bits of a row do not depend on the other rows. Keys of weight 0 at the end change nothing. But sums
over more than 192 keys are split by rules that depend on their number; so they are split here, always at the same keys.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from halteres.engine.torch.cache import SlotCache
from halteres.engine.torch.heads import Grid, Heads

KEY_BLOCK = 192
"""Keys of one matmul of weights and values."""

QUERY_BLOCK = 32
"""Queries of one block of a causal pass: it sees no key after its last one. 32 is fastest (24 to 192 were tried)."""

MIN_ROWS = 4
"""Below this many rows matmul kernels change, and with them bits."""


class Attention(Protocol):
    """How the tokens of one pass see each other and the past."""

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """The attended values, N x (H*W)."""
        ...


def _weights(q_XMW: Tensor, k_XLW: Tensor, mask_ML: Tensor) -> Tensor:
    """softmax(q @ k^T / sqrt(W) + mask), X x M x L."""
    scores_XML = torch.baddbmm(mask_ML, q_XMW, k_XLW.transpose(1, 2), alpha=q_XMW.shape[-1] ** -0.5)
    return torch.softmax(scores_XML, dim=-1)


def _weighted(p_XML: Tensor, v_XLW: Tensor) -> Tensor:
    """p @ v, summed block by block."""
    out_XMW = torch.bmm(p_XML[:, :, :KEY_BLOCK], v_XLW[:, :KEY_BLOCK])
    for start in range(KEY_BLOCK, v_XLW.shape[1], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out_XMW.baddbmm_(p_XML[:, :, block], v_XLW[:, block])
    return out_XMW


class _CausalBlocks(Function):
    """G query heads per key head; weights are computed again in the backward, never kept."""

    @staticmethod
    def forward(ctx: Any, q_XGTW: Tensor, k_XTW: Tensor, v_XTW: Tensor) -> Tensor:
        out_XGTW = torch.empty_like(q_XGTW)
        for block in _blocks(q_XGTW.shape[2]):
            q_XMW, k_XLW, v_XLW = _block(q_XGTW, block), k_XTW[:, : block.stop], v_XTW[:, : block.stop]
            p_XML = _weights(q_XMW, k_XLW, _causal_mask(block, q_XGTW))
            out_XGTW[:, :, block] = _weighted(p_XML, v_XLW).view_as(out_XGTW[:, :, block])
        ctx.save_for_backward(q_XGTW, k_XTW, v_XTW)
        return out_XGTW

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (q_XGTW, k_XTW, v_XTW), (do_XGTW, *_) = ctx.saved_tensors, grads
        dq_XGTW, dk_XTW, dv_XTW = torch.empty_like(q_XGTW), torch.zeros_like(k_XTW), torch.zeros_like(v_XTW)
        scale = q_XGTW.shape[-1] ** -0.5
        for block in _blocks(q_XGTW.shape[2]):
            q_XMW, k_XLW, v_XLW = _block(q_XGTW, block), k_XTW[:, : block.stop], v_XTW[:, : block.stop]
            do_XMW = _block(do_XGTW, block)
            p_XML = _weights(q_XMW, k_XLW, _causal_mask(block, q_XGTW))
            dv_XTW[:, : block.stop].baddbmm_(p_XML.transpose(1, 2), do_XMW)
            dp_XML = torch.bmm(do_XMW, v_XLW.transpose(1, 2))
            ds_XML = torch.ops.aten._softmax_backward_data(dp_XML, p_XML, -1, p_XML.dtype)
            dq_XGTW[:, :, block] = torch.bmm(ds_XML, k_XLW).mul_(scale).view_as(dq_XGTW[:, :, block])
            dk_XTW[:, : block.stop].baddbmm_(ds_XML.transpose(1, 2), q_XMW, alpha=scale)
        return dq_XGTW, dk_XTW, dv_XTW


def _blocks(length: int) -> list[slice]:
    return [slice(start, min(start + QUERY_BLOCK, length)) for start in range(0, length, QUERY_BLOCK)]


def _block(x_XGTW: Tensor, block: slice) -> Tensor:
    """The block's queries of all heads of a group as rows of one matrix, M = G * block."""
    return x_XGTW[:, :, block].reshape(x_XGTW.shape[0], -1, x_XGTW.shape[-1])


def _causal_mask(block: slice, like_XGTW: Tensor) -> Tensor:
    rows, groups = block.stop - block.start, like_XGTW.shape[1]
    mask = torch.full((rows, block.stop), -math.inf, device=like_XGTW.device, dtype=like_XGTW.dtype)
    return mask.triu_(block.start + 1).repeat(groups, 1)


class Causal:
    """A padded batch: padding is later than every real token of its row, so it is never seen."""

    def __init__(self, grid: Grid) -> None:
        self._rows = grid.rows

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """Attended values, N x (H*W)."""
        q_XGTW = heads.q_XGTW
        if q_XGTW.device.type == "cpu":
            out_XGTW = _CausalBlocks.apply(q_XGTW, heads.k_XTW, heads.v_XTW)
        else:  # not verified yet
            k_X1TW, v_X1TW = heads.k_XTW.unsqueeze(1), heads.v_XTW.unsqueeze(1)
            out_XGTW = F.scaled_dot_product_attention(q_XGTW, k_X1TW, v_X1TW, is_causal=True, enable_gqa=True)
        assert isinstance(out_XGTW, Tensor)  # noqa: S101 - for the type checker
        return self._merged(out_XGTW)

    def _merged(self, out_XGTW: Tensor) -> Tensor:
        """Heads side by side again."""
        length, width = out_XGTW.shape[2:]
        return out_XGTW.view(self._rows, -1, length, width).transpose(1, 2).reshape(self._rows * length, -1)


class Prefill(Causal):
    """Causal, and every row's keys and values go into its slots."""

    def __init__(self, grid: Grid, cache: SlotCache, slots: list[range], lengths: list[int]) -> None:
        super().__init__(grid)
        self.cache, self.slots, self.lengths = cache, slots, lengths

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """Attended values, N x (H*W)."""
        shape = (self._rows, -1, *heads.k_XTW.shape[1:])
        self.cache.fill(layer, heads.k_XTW.view(shape), heads.v_XTW.view(shape), self.slots, self.lengths)
        return super().__call__(layer, heads)


class Cached:
    """One new token per slot; each row reads its own past up to its position."""

    def __init__(self, cache: SlotCache, positions_S: Tensor, bound: int) -> None:
        self.cache, self.rows, self.bound = cache, positions_S.shape[0], bound
        unseen_SL = torch.arange(bound, device=positions_S.device) > positions_S[:, None]
        mask_SL = torch.zeros(unseen_SL.shape, device=positions_S.device).masked_fill_(unseen_SL, -math.inf)
        self.mask_X1L = mask_SL.repeat_interleave(cache.kv_heads, dim=0).unsqueeze(1)
        self.index_X = cache.index(positions_S)

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """Attended values, N x (H*W); the G query heads of a key head are rows of one matmul."""
        self.cache.append(layer, self.index_X, heads.k_XTW, heads.v_XTW)
        k_XLW, v_XLW = self.cache.read(layer, self.rows, self.bound)
        q_XGW = heads.q_XGTW.squeeze(2)
        group = q_XGW.shape[1]
        if group < MIN_ROWS:
            q_XGW = F.pad(q_XGW, (0, 0, 0, MIN_ROWS - group))
        out_XGW = _weighted(_weights(q_XGW, k_XLW, self.mask_X1L), v_XLW)
        return out_XGW[:, :group].reshape(self.rows, -1)
