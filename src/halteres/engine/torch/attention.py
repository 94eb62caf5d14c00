"""Attention over one padded batch, and over the blocks of the cache.

Owns: how queries meet keys: causally inside a batch, or each row with its own past.
Never: expands keys and values to the number of query heads.
Promise: on a CPU a query's result has the same bits in training, prefill and decoding, so that the
sampler's and the trainer's log-probabilities are equal, not merely close: the built-in model
amplifies fp32 rounding to 2e-5 (p99.9).

The promise rests on three properties of the batched matmul (MKL 2024.2; the tests of equal bits
hold them). With at least 4 rows the bits of a row do not depend on the other rows. Keys of weight 0
at the end change nothing. But sums over more than 192 keys are split by rules that depend on their
number; so they are split here, always at the same keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from halteres.engine.torch import flash
from halteres.engine.torch.cache import POSITION_STEP, Block
from halteres.engine.torch.model import Grid, Heads
from halteres.engine.torch.projections import round_up

KEY_BLOCK = 192
"""Keys of one matmul of weights and values."""

QUERY_BLOCK = 32
"""Queries of one block of a causal pass: it sees no key after its last one. 32 is fastest (24 to
192 were tried).
"""

WIDENED = 1 << 18
"""How many numbers of a bfloat16 cache are converted to fp32 at once: so few stay in a core's own
cache. Whole blocks were 4 times as slow; these are as fast as an fp32 cache in main memory.
"""

KEYS_TOGETHER = 1 << 18
"""Cached positions that one call of a GPU's kernels reads behind a prefill: they are copied side by
side for it, 1 GiB for 8 key heads of width 128.
"""

MIN_ROWS = 4
"""Below this many rows matmul kernels change, and with them bits. Queries are padded to a multiple
of it: threads share the rows of a single matrix, and an odd rest has other bits.
"""


def weights(q_XMW: Tensor, k_XLW: Tensor, mask_ML: Tensor) -> Tensor:
    """softmax(q @ k^T / sqrt(W) + mask), X x M x L."""
    scores_XML = torch.baddbmm(mask_ML, q_XMW, k_XLW.transpose(1, 2), alpha=q_XMW.shape[-1] ** -0.5)
    return torch.softmax(scores_XML, dim=-1)


def weighted(p_XML: Tensor, v_XLW: Tensor, out_XMW: Tensor | None = None) -> Tensor:
    """p @ v, on a CPU summed block by block; into `out` where it is given."""
    if p_XML.device.type != "cpu":
        return torch.bmm(p_XML, v_XLW, out=out_XMW)
    out_XMW = torch.bmm(p_XML[:, :, :KEY_BLOCK], v_XLW[:, :KEY_BLOCK], out=out_XMW)
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
            q_XMW, k_XLW, v_XLW = (
                _block(q_XGTW, block),
                k_XTW[:, : block.stop],
                v_XTW[:, : block.stop],
            )
            p_XML = weights(q_XMW, k_XLW, _causal_mask(block, q_XGTW))
            out_XGTW[:, :, block] = weighted(p_XML, v_XLW).view_as(out_XGTW[:, :, block])
        ctx.save_for_backward(q_XGTW, k_XTW, v_XTW)
        return out_XGTW

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (q_XGTW, k_XTW, v_XTW), (do_XGTW, *_) = ctx.saved_tensors, grads
        dq_XGTW, dk_XTW, dv_XTW = (
            torch.empty_like(q_XGTW),
            torch.zeros_like(k_XTW),
            torch.zeros_like(v_XTW),
        )
        scale = q_XGTW.shape[-1] ** -0.5
        for block in _blocks(q_XGTW.shape[2]):
            q_XMW, k_XLW, v_XLW = (
                _block(q_XGTW, block),
                k_XTW[:, : block.stop],
                v_XTW[:, : block.stop],
            )
            do_XMW = _block(do_XGTW, block)
            p_XML = weights(q_XMW, k_XLW, _causal_mask(block, q_XGTW))
            dv_XTW[:, : block.stop].baddbmm_(p_XML.transpose(1, 2), do_XMW)
            dp_XML = torch.bmm(do_XMW, v_XLW.transpose(1, 2))
            ds_XML = torch.ops.aten._softmax_backward_data(dp_XML, p_XML, -1, p_XML.dtype)
            dq_XGTW[:, :, block] = (
                torch.bmm(ds_XML, k_XLW).mul_(scale).view_as(dq_XGTW[:, :, block])
            )
            dk_XTW[:, : block.stop].baddbmm_(ds_XML.transpose(1, 2), q_XMW, alpha=scale)
        return dq_XGTW, dk_XTW, dv_XTW


def _blocks(length: int) -> list[slice]:
    return [
        slice(start, min(start + QUERY_BLOCK, length)) for start in range(0, length, QUERY_BLOCK)
    ]


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
        self._lengths: flash.Lengths | None = None  # of a GPU's kernels, made once for all layers

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """Attended values, N x (H*W)."""
        q_XGTW = heads.q_XGTW
        if q_XGTW.dtype == torch.bfloat16:
            return self._flash(heads)
        if q_XGTW.device.type == "cpu":
            out_XGTW = _CausalBlocks.apply(q_XGTW, heads.k_XTW, heads.v_XTW)
        else:
            # not verified on a GPU; with enable_gqa fp32 would have only the kernel that keeps all
            # scores
            k_XGTW, v_XGTW = (
                x_XTW.unsqueeze(1).expand_as(q_XGTW) for x_XTW in (heads.k_XTW, heads.v_XTW)
            )
            out_XGTW = F.scaled_dot_product_attention(q_XGTW, k_XGTW, v_XGTW, is_causal=True)
        assert isinstance(out_XGTW, Tensor)  # noqa: S101 - for the type checker
        return self._merged(out_XGTW)

    def _flash(self, heads: Heads) -> Tensor:
        """Rows as sequences of one length, for a GPU's kernels. Not verified on a GPU."""
        length, width = heads.k_XTW.shape[1:]
        q_IHW, k_IKW, v_IKW = (
            part.view(self._rows, -1, length, width).transpose(1, 2).flatten(0, 1)
            for part in (heads.q_XGTW, heads.k_XTW, heads.v_XTW)
        )
        if self._lengths is None:
            self._lengths = flash.Lengths(
                [length] * self._rows, [length] * self._rows, q_IHW.device
            )
        return flash.attend(q_IHW, k_IKW, v_IKW, self._lengths).flatten(1)

    def _merged(self, out_XGTW: Tensor) -> Tensor:
        """Heads side by side again."""
        length, width = out_XGTW.shape[2:]
        return (
            out_XGTW.reshape(self._rows, -1, length, width)
            .transpose(1, 2)
            .reshape(self._rows * length, -1)
        )


class Prefill(Causal):
    """Causal, and every row's keys and values go into a slot, behind those that it has."""

    def __init__(
        self, grid: Grid, slots: Sequence[tuple[Block, int]], positions: Sequence[range]
    ) -> None:
        """Positions of every row's tokens; they begin where a block of queries does."""
        super().__init__(grid)
        self.slots, self.positions = slots, positions
        self._behind = any(own.start for own in positions)
        # of a GPU's kernels, made once for all layers
        self._calls: list[tuple[range, flash.Lengths]] | None = None

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """Attended values, N x (H*W)."""
        for row, ((block, slot), own) in enumerate(zip(self.slots, self.positions, strict=True)):
            block.write(layer, slot, heads, row, own)
        if not self._behind:
            return super().__call__(layer, heads)
        if heads.q_XGTW.dtype == torch.bfloat16:
            return self._flash_behind(layer, heads)
        out_XGTW = torch.empty_like(heads.q_XGTW)
        for row, ((block, slot), own) in enumerate(zip(self.slots, self.positions, strict=True)):
            rows = slice(row * block.kv_heads, (row + 1) * block.kv_heads)
            k_XLW, v_XLW = (
                part.float() for part in block.slot(layer, slot, own.start + out_XGTW.shape[2])
            )
            _attend_behind(heads.q_XGTW[rows].float(), k_XLW, v_XLW, own.start, out_XGTW[rows])
        return self._merged(out_XGTW)

    def _flash_behind(self, layer: int, heads: Heads) -> Tensor:
        """Rows with pasts of their own lengths, for a GPU's kernels: as many rows in one call as
        `KEYS_TOGETHER` allows. Padding attends to nothing. Not verified on a GPU.
        """
        length, width = heads.q_XGTW.shape[2:]
        q_BTHW = heads.q_XGTW.view(self._rows, -1, length, width).transpose(1, 2)
        out_BTHW = q_BTHW.new_zeros(q_BTHW.shape)
        if self._calls is None:
            self._calls = [
                (rows, self._lengths_of(rows, q_BTHW.device))
                for rows in _rows_together([own.stop for own in self.positions])
            ]
        for rows, lengths in self._calls:
            owns = [self.positions[row] for row in rows]
            pasts = [
                block.slot(layer, slot, own.stop)
                for (block, slot), own in zip((self.slots[row] for row in rows), owns, strict=True)
            ]
            k_LKW, v_LKW = (
                torch.cat([x_KLW.transpose(0, 1) for x_KLW in parts])
                for parts in zip(*pasts, strict=True)
            )
            q_IHW = torch.cat(
                [q_BTHW[row, : len(own)] for row, own in zip(rows, owns, strict=True)]
            )
            found = flash.attend(q_IHW, k_LKW, v_LKW, lengths).split([len(own) for own in owns])
            for row, out_IHW in zip(rows, found, strict=True):
                out_BTHW[row, : len(out_IHW)] = out_IHW
        return out_BTHW.view(self._rows * length, -1)

    def _lengths_of(self, rows: range, device: torch.device) -> flash.Lengths:
        owns = [self.positions[row] for row in rows]
        return flash.Lengths([len(own) for own in owns], [own.stop for own in owns], device)


def _rows_together(lengths: Sequence[int]) -> list[range]:
    """Neighbouring rows of at most `KEYS_TOGETHER` keys; a longer row by itself."""
    found: list[range] = []
    keys = 0
    for row, length in enumerate(lengths):
        keys += length
        if not found or keys > KEYS_TOGETHER:
            found.append(range(row, row))
            keys = length
        found[-1] = range(found[-1].start, row + 1)
    return found


def _attend_behind(
    q_XGTW: Tensor, k_XLW: Tensor, v_XLW: Tensor, start: int, out_XGTW: Tensor
) -> None:
    """As in a causal pass over all L positions, of which the queries are those from `start` on."""
    for block in _blocks(q_XGTW.shape[2]):
        own = slice(start + block.start, start + block.stop)
        p_XML = weights(_block(q_XGTW, block), k_XLW[:, : own.stop], _causal_mask(own, q_XGTW))
        out_XGTW[:, :, block] = weighted(p_XML, v_XLW[:, : own.stop]).view_as(out_XGTW[:, :, block])


class Cached:
    """One new token per row, in the order of blocks; each row reads its own past up to its
    position.

    Blocks read up to bounds of their own, so that short rows do not pay for long ones. Rows behind
    those of all blocks are padding, and attend to nothing.
    """

    def __init__(self, blocks: Sequence[tuple[Block, int, int]], positions_S: Tensor) -> None:
        """Of every block the number of its rows, and the last of their positions."""
        self.rows, self._reads = positions_S.shape[0], list[_BlockRead]()
        start = 0
        for block, count, last in blocks:
            self._reads.append(_BlockRead(block, start, positions_S[start : start + count], last))
            start += count
        self._padding = self.rows - start

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """Attended values, N x (H*W); the G query heads of a key head are rows of one matmul."""
        q_XGW = heads.q_XGTW.squeeze(2)
        group = q_XGW.shape[1]
        if group % MIN_ROWS:
            q_XGW = F.pad(q_XGW, (0, 0, 0, -group % MIN_ROWS))
        if len(self._reads) == 1 and not self._padding:
            out_XGW = self._reads[0](layer, q_XGW, heads, None)
        else:
            out_XGW = torch.zeros_like(q_XGW) if self._padding else torch.empty_like(q_XGW)
            for read in self._reads:
                read(layer, q_XGW[read.own], heads, out_XGW[read.own])
        return out_XGW[:, :group].reshape(self.rows, -1)


def _read_narrow(q_XMW: Tensor, k_XLW: Tensor, v_XLW: Tensor, mask_X1L: Tensor) -> Tensor:
    """Attended values of a bfloat16 cache on a GPU, read once as it lies: scores, weights and sums
    are fp32, what matmuls read is bfloat16. Not verified on a GPU.
    """
    scores_XML = wide_bmm(q_XMW, k_XLW.transpose(1, 2))
    scores_XML.mul_(q_XMW.shape[-1] ** -0.5).add_(mask_X1L)
    p_XML = torch.softmax(scores_XML, dim=-1).to(v_XLW.dtype)
    return wide_bmm(p_XML, v_XLW).to(q_XMW.dtype)


def wide_bmm(one: Tensor, other: Tensor) -> Tensor:
    """A batched product of bfloat16 operands, in fp32; torch has it for GPUs alone."""
    return torch.bmm(one, other, out_dtype=torch.float32)


class _BlockRead:
    """What one step reads and writes of one block; X of its own rows' key heads."""

    def __init__(self, block: Block, start: int, positions_S: Tensor, last: int) -> None:
        count, heads, bound = (
            positions_S.shape[0],
            block.kv_heads,
            round_up(last + 1, POSITION_STEP),
        )
        unseen_SL = torch.arange(bound, device=positions_S.device) > positions_S[:, None]
        mask_SL = torch.zeros(unseen_SL.shape, device=positions_S.device).masked_fill_(
            unseen_SL, -math.inf
        )
        self.block, self.own = block, slice(start * heads, (start + count) * heads)
        self.mask_X1L = mask_SL.repeat_interleave(heads, dim=0).unsqueeze(1)
        self.index_X, self.views = block.index(positions_S), block.read(count, bound)

    def __call__(self, layer: int, q_XMW: Tensor, heads: Heads, out_XMW: Tensor | None) -> Tensor:
        self.block.append(layer, self.index_X, heads.k_XTW[self.own], heads.v_XTW[self.own])
        k_XLW, v_XLW = self.views[layer], self.views[len(self.views) // 2 + layer]
        if q_XMW.dtype == torch.bfloat16:
            found_XMW = _read_narrow(q_XMW, k_XLW, v_XLW, self.mask_X1L)
            return found_XMW if out_XMW is None else out_XMW.copy_(found_XMW)
        if k_XLW.dtype == torch.float32:
            return weighted(weights(q_XMW, k_XLW, self.mask_X1L), v_XLW, out_XMW)
        out_XMW = torch.empty_like(q_XMW) if out_XMW is None else out_XMW
        on_cpu = k_XLW.device.type == "cpu"
        size = max(1, WIDENED // (k_XLW.shape[1] * k_XLW.shape[2])) if on_cpu else len(k_XLW)
        parts = (x.split(size) for x in (q_XMW, k_XLW, v_XLW, self.mask_X1L, out_XMW))
        for q_CMW, k_CLW, v_CLW, mask_C1L, out_CMW in zip(*parts, strict=True):
            weighted(weights(q_CMW, k_CLW.float(), mask_C1L), v_CLW.float(), out_CMW)
        return out_XMW
