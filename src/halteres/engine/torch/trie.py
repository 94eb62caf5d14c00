"""The sequences of a micro-batch as a prefix trie on one flat axis: what they share is computed
once.

A sequence shares its longest common prefix with the one before it, which shares with its own
predecessor; in lexicographic order that is the whole trie. What is left of it, its run, is appended
to the flat axis.

Promise: bits of what is attended are those of `attention.Causal` on separate rows: keys of a run
are gathered, contiguous from position 0, so that the sums over them are split at the same keys.

N tokens of the axis, L tokens of a sequence or keys, P log-probabilities (of K targets each), B
sequences, T of the longest. In attention: H query heads, K key heads, G = H / K; R runs side by
side, X = R * K, M = G * queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from halteres.engine.torch import flash
from halteres.engine.torch.attention import KEY_BLOCK, MIN_ROWS, QUERY_BLOCK, weighted, weights
from halteres.engine.torch.model import Attention, BaseModel, Heads
from halteres.engine.torch.projections import LEAST_ROWS, round_up


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence: where its tokens lie, and which of them are its own."""

    path_L: np.ndarray
    start: int  # position of its first own token

    def __len__(self) -> int:
        return len(self.path_L)


@dataclass(frozen=True, slots=True)
class Trie:
    """Runs end to end; the axis ends with at least one token of padding."""

    tokens_N: np.ndarray
    positions_N: np.ndarray
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> Trie:
        """Every sequence after its common prefix with the one before it."""
        runs: list[Run] = []
        size, before = 0, np.empty(0, np.int64)
        for tokens in sequences:
            start = shared_length(before, tokens)
            path_L = np.arange(size - start, size - start + len(tokens))
            if start:
                path_L[:start] = runs[-1].path_L[:start]
            runs.append(Run(path_L, start))
            size, before = size + len(tokens) - start, tokens
        tokens_N, positions_N = np.zeros((2, axis_length(size)), np.int64)
        for run, tokens in zip(runs, sequences, strict=True):
            own = run.path_L[run.start :]
            tokens_N[own], positions_N[own] = tokens[run.start :], np.arange(run.start, len(run))
        return cls(tokens_N, positions_N, tuple(runs))


def target_cells(
    trie: Trie, targets: Sequence[np.ndarray], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which log-probabilities are computed, and which of them each target of each sequence reads.

    Sequences that share a token share its log-probability where they share the target, too.

    Targets are L or L x K for each sequence. Returns rows_P on the flat axis; targets, P or P x K;
    and numbers among the P for the cells of B x T (`length`), of which padding reads the first.
    """
    rows: list[np.ndarray] = []
    chosen: list[np.ndarray] = []
    cells_BT = np.zeros((len(targets), length), np.int64)
    size = 0
    for i, (run, own) in enumerate(zip(trie.runs, targets, strict=True)):
        new = np.ones(len(run), np.bool_)
        if run.start:
            alike = own[: run.start] == targets[i - 1][: run.start]
            new[: run.start] = ~(alike.all(1) if alike.ndim > 1 else alike)
            cells_BT[i, : run.start] = cells_BT[i - 1, : run.start]
        count = int(new.sum())
        cells_BT[i, : len(run)][new] = np.arange(size, size + count)
        rows.append(run.path_L[new])
        chosen.append(own[new])
        size += count
    padding = axis_length(size) - size
    rows.append(np.full(padding, len(trie.tokens_N) - 1))
    chosen.append(np.zeros((padding, *targets[0].shape[1:]), np.int64))
    return np.concatenate(rows), np.concatenate(chosen), cells_BT


def shared_length(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens of the longest common prefix."""
    length = min(len(one), len(other))
    apart = np.flatnonzero(one[:length] != other[:length])
    return int(apart[0]) if len(apart) else length


def axis_length(size: int) -> int:
    """With padding, of which there is at least one: queries and keys that are none are read
    there.
    """
    return max(2 * LEAST_ROWS, round_up(size + 1, LEAST_ROWS))


KEY_STEP = 16
"""Keys of a matmul are a multiple of this; the last ones of shorter paths are padding, and never
seen. With a rest of 8 keys the backward of a softmax adds up in another order, and 8 scores have
other bits than the same among 16.
"""


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries that are one matmul per run and key head."""

    queries_I: Tensor  # rows of the queries, R x K x G x queries
    place: slice  # of its results among those of all blocks
    mask: Tensor  # R x 1 x 1 x queries x L; or one for all runs
    stop: int  # keys seen

    def of(self, results_IW: Tensor, like_XML: Tensor) -> Tensor:
        """Its own among all blocks' results, X x M x W."""
        return results_IW[self.place].view(*like_XML.shape[:2], -1)

    def scores_into(self, shape: tuple[int, int, int]) -> Tensor:
        """The mask for every run and head, X x M x L: scores are added to it."""
        runs, groups = shape[0], shape[1:]
        size, stop = self.mask.shape[-2:]
        return self.mask.expand(runs, *groups, size, stop).reshape(
            runs * groups[0], groups[1] * size, stop
        )


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Runs of like shape."""

    keys_I: Tensor  # rows of the keys, R x K x L
    order_I: Tensor  # the same rows sorted, as places in keys_I
    offsets_J: Tensor  # where in that order each of the N * K key rows begins
    blocks: tuple[_Block, ...]
    shape: tuple[int, int, int]  # R, K, G


class Heading(Protocol):
    """What attention needs to know of a model: a `BaseModel`, for example."""

    @property
    def heads(self) -> int:
        """Of queries."""
        ...

    @property
    def kv_heads(self) -> int:
        """Of keys and values."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...


class TrieAttention:
    """See `Attention`; of one micro-batch, or of several end to end, for all layers."""

    def __init__(self, tries: Sequence[Trie], base: Heading) -> None:
        device = base.device
        self._device, self._length = device, sum(len(trie.tokens_N) for trie in tries)
        self._sizes = base.kv_heads, base.heads // base.kv_heads
        self.num_results = 0
        found_NH = np.full(self._length * base.heads, -1, np.int64)
        self.buckets = tuple(self._bucket(paths, found_NH) for paths in _buckets(tries))
        for padding in {path.padding for bucket in _buckets(tries) for path in bucket}:
            found_NH[padding * base.heads : (padding + 1) * base.heads] = -1
        # padding reads a row of zeros, so that it has no gradient
        found_NH[found_NH < 0] = self.num_results
        self.found_NH = torch.from_numpy(found_NH).to(device)

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """Attended values, N x (H*W)."""
        width = heads.q_XGTW.shape[-1]
        rows = (
            heads.q_XGTW.view(-1, width),
            heads.k_XTW.view(-1, width),
            heads.v_XTW.view(-1, width),
        )
        out = _TrieBlocks.apply(*rows, self)
        assert isinstance(out, Tensor)  # noqa: S101 - for the type checker
        return out.view(-1, self._sizes[0] * self._sizes[1] * width)

    def results(self, like_JW: Tensor) -> Tensor:
        """Room for one row per query and head of every block, then a row of zeros."""
        results_IW = like_JW.new_empty((self.num_results + 1, like_JW.shape[1]))
        results_IW[-1] = 0
        return results_IW

    def _bucket(self, paths: Sequence[_Path], found_NH: np.ndarray) -> _Bucket:
        kv_heads, group = self._sizes
        runs, padding_R1 = (
            [path.run for path in paths],
            np.array([[path.padding] for path in paths]),
        )
        paths_RL = np.tile(padding_R1, round_up(max(map(len, runs)), KEY_STEP))
        for path_L, run in zip(paths_RL, runs, strict=True):
            path_L[: len(run)] = run.path_L
        keys_I = (paths_RL[:, None] * kv_heads + np.arange(kv_heads)[:, None]).reshape(-1)
        order_I = np.argsort(keys_I, kind="stable")
        offsets_J = np.searchsorted(keys_I[order_I], np.arange(self._length * kv_heads))
        longest = max(len(run) - run.start for run in runs)
        return _Bucket(
            keys_I=self._tensor(keys_I),
            order_I=self._tensor(order_I),
            offsets_J=self._tensor(offsets_J),
            blocks=tuple(
                self._block(runs, padding_R1, first, longest, found_NH)
                for first in range(0, longest, QUERY_BLOCK)
            ),
            shape=(len(runs), kv_heads, group),
        )

    def _block(
        self,
        runs: Sequence[Run],
        padding_R1: np.ndarray,
        first: int,
        longest: int,
        found_NH: np.ndarray,
    ) -> _Block:
        """Queries from number `first` of each run."""
        kv_heads, group = self._sizes
        size = round_up(min(QUERY_BLOCK, longest - first), MIN_ROWS)
        tokens_RM = np.tile(padding_R1, size)
        positions_RM = np.array([run.start for run in runs])[:, None] + np.arange(
            first, first + size
        )
        for tokens_M, run in zip(tokens_RM, runs, strict=True):
            own = run.path_L[run.start + first : run.start + first + size]
            tokens_M[: len(own)] = own
        stop = round_up(min(int(positions_RM.max()) + 1, max(map(len, runs))), KEY_STEP)
        heads_KG1 = np.arange(kv_heads * group).reshape(kv_heads, group, 1)
        queries_I = (tokens_RM[:, None, None] * (kv_heads * group) + heads_KG1).reshape(-1)
        found_NH[queries_I] = np.arange(self.num_results, self.num_results + len(queries_I))
        place = slice(self.num_results, self.num_results + len(queries_I))
        self.num_results = place.stop
        if (positions_RM == positions_RM[0]).all():
            positions_RM = positions_RM[:1]
        unseen_RML = np.arange(stop) > positions_RM[:, :, None]
        mask = self._tensor(np.where(unseen_RML, np.float32(-np.inf), np.float32(0)))
        return _Block(self._tensor(queries_I), place, mask[:, None, None], stop)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


class FlashTrieAttention:
    """What `TrieAttention` computes, by a GPU's kernels in one call: a run's queries are the last
    of its path.

    Gathered keys are computed again in the backward, never kept. Not verified on a GPU; there the
    bits of a gradient depend on the order in which its kernels add.
    """

    def __init__(self, tries: Sequence[Trie], base: BaseModel) -> None:
        device = base.device
        self._length, self._shape = (
            sum(len(trie.tokens_N) for trie in tries),
            (base.heads, base.kv_heads),
        )
        ends = accumulate((len(trie.tokens_N) for trie in tries), initial=0)
        runs = [
            Run(run.path_L + offset, run.start)
            for trie, offset in zip(tries, ends, strict=False)
            for run in trie.runs
            if len(run) > run.start
        ]
        self._lengths = flash.Lengths(
            [len(run) - run.start for run in runs], [len(run) for run in runs], device
        )
        own, paths = (
            np.concatenate([run.path_L[run.start :] for run in runs]),
            np.concatenate([r.path_L for r in runs]),
        )
        self._own_I, self._paths_L = (
            torch.from_numpy(own).to(device),
            torch.from_numpy(paths).to(device),
        )

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """Attended values, N x (H*W); zeros where there is padding."""
        parts = (heads.q_XGTW, heads.k_XTW, heads.v_XTW)
        out_IE = checkpoint(self._attended, *parts, use_reentrant=False, preserve_rng_state=False)
        return out_IE.new_zeros((self._length, out_IE.shape[1])).index_copy(0, self._own_I, out_IE)

    def _attended(self, q_XGTW: Tensor, k_XTW: Tensor, v_XTW: Tensor) -> Tensor:
        num_heads, kv_heads = self._shape
        q_IHW = q_XGTW.view(self._length, num_heads, -1).index_select(0, self._own_I)
        # Gathered in fp32: what flows back into a shared key is a sum, which bfloat16 would round
        # at every addition.
        k_LKW, v_LKW = (
            x_XTW.view(self._length, kv_heads, -1)
            .float()
            .index_select(0, self._paths_L)
            .to(x_XTW.dtype)
            for x_XTW in (k_XTW, v_XTW)
        )
        return flash.attend(q_IHW, k_LKW, v_LKW, self._lengths).flatten(1)


def trie_attention(tries: Sequence[Trie], base: BaseModel) -> Attention:
    """By what queries and keys of this model are read."""
    return (FlashTrieAttention if base.attention_dtype == torch.bfloat16 else TrieAttention)(
        tries, base
    )


class _Path(NamedTuple):
    """A run where it lies among all tokens, and the token that is its trie's padding."""

    run: Run
    padding: int


def _buckets(tries: Sequence[Trie]) -> list[list[_Path]]:
    """Runs that are attended together. Those of one trie that have a bucket alone have one here, in
    the same order: what flows back into shared keys is added up bucket by bucket.
    """
    buckets: list[list[_Path]] = []
    offset = 0
    for trie in tries:
        padding, first = offset + len(trie.tokens_N) - 1, 0
        for runs in alike(trie.runs, len(trie.tokens_N)):
            place = next(
                (i for i in range(first, len(buckets)) if _near(buckets[i][0].run, runs[0])),
                len(buckets),
            )
            buckets += [[]] if place == len(buckets) else []
            buckets[place] += [_Path(Run(run.path_L + offset, run.start), padding) for run in runs]
            first = place + 1
        offset += len(trie.tokens_N)
    return buckets


def joins(trie: Trie, base: BaseModel) -> bool:
    """Whether its bits stay among other tries: sums over keys, and over the queries of a block,
    have to be so short that zeros within them do not change how they are split.
    """
    return (
        max(map(len, trie.runs)) <= KEY_BLOCK
        and base.heads // base.kv_heads * QUERY_BLOCK <= KEY_BLOCK
    )


def _shape(run: Run) -> tuple[int, int]:
    """Blocks of queries, and keys."""
    return -(-(len(run) - run.start) // QUERY_BLOCK), len(run)


def _near(one: Run, other: Run) -> bool:
    (blocks, length), (other_blocks, other_length) = _shape(one), _shape(other)
    return blocks == other_blocks and abs(length - other_length) <= max(
        QUERY_BLOCK, max(length, other_length) // 4
    )


def alike(runs: Sequence[Run], most_keys: int) -> Iterator[list[Run]]:
    """Runs in groups of equally many blocks of queries and like length, of at most so many keys
    together.
    """
    found: list[Run] = []
    for run in sorted((run for run in runs if len(run) > run.start), key=_shape, reverse=True):
        if found and (not _near(found[0], run) or (len(found) + 1) * len(found[0]) > most_keys):
            yield found
            found = []
        found.append(run)
    if found:
        yield found


class _TrieBlocks(Function):
    """Weights and gathered keys are computed again in the backward, never kept."""

    @staticmethod
    def forward(ctx: Any, q_JW: Tensor, k_JW: Tensor, v_JW: Tensor, paths: TrieAttention) -> Tensor:
        found_IW = paths.results(q_JW)
        for bucket in paths.buckets:
            k_XLW, v_XLW = _gathered(k_JW, bucket), _gathered(v_JW, bucket)
            for block in bucket.blocks:
                p_XML = _softmax(q_JW, k_XLW, block, bucket)[1]
                weighted(p_XML, v_XLW[:, : block.stop], block.of(found_IW, p_XML))
        ctx.save_for_backward(q_JW, k_JW, v_JW)
        ctx.paths = paths
        return found_IW.index_select(0, paths.found_NH)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (q_JW, k_JW, v_JW), do_JW, paths = ctx.saved_tensors, grads[0], ctx.paths
        scale = q_JW.shape[1] ** -0.5
        dq_IW = paths.results(q_JW)
        dk_JW, dv_JW = torch.zeros_like(k_JW), torch.zeros_like(v_JW)
        for bucket in paths.buckets:
            k_XLW, v_XLW = _gathered(k_JW, bucket), _gathered(v_JW, bucket)
            dk_XLW, dv_XLW = torch.zeros_like(k_XLW), torch.zeros_like(v_XLW)
            for block in bucket.blocks:
                q_XMW, p_XML = _softmax(q_JW, k_XLW, block, bucket)
                do_XMW = do_JW.index_select(0, block.queries_I).view_as(q_XMW)
                dv_XLW[:, : block.stop].baddbmm_(p_XML.transpose(1, 2), do_XMW)
                dp_XML = torch.bmm(do_XMW, v_XLW[:, : block.stop].transpose(1, 2))
                ds_XML = torch.ops.aten._softmax_backward_data(dp_XML, p_XML, -1, p_XML.dtype)
                block.of(dq_IW, p_XML).baddbmm_(ds_XML, k_XLW[:, : block.stop], beta=0, alpha=scale)
                dk_XLW[:, : block.stop].baddbmm_(ds_XML.transpose(1, 2), q_XMW, alpha=scale)
            dk_JW.add_(_summed(dk_XLW, bucket))
            dv_JW.add_(_summed(dv_XLW, bucket))
        return dq_IW.index_select(0, paths.found_NH), dk_JW, dv_JW, None


def _gathered(rows_JW: Tensor, bucket: _Bucket) -> Tensor:
    """The paths' keys or values, X x L x W."""
    runs, kv_heads, _ = bucket.shape
    return rows_JW.index_select(0, bucket.keys_I).view(runs * kv_heads, -1, rows_JW.shape[1])


def _summed(gathered_XLW: Tensor, bucket: _Bucket) -> Tensor:
    """What was gathered, added up where it came from. `index_add_` takes three times as long."""
    rows_IW = gathered_XLW.view(-1, gathered_XLW.shape[-1])
    return F.embedding_bag(bucket.order_I, rows_IW, bucket.offsets_J, mode="sum")


def _softmax(q_JW: Tensor, k_XLW: Tensor, block: _Block, bucket: _Bucket) -> tuple[Tensor, Tensor]:
    """The block's queries, X x M x W, and their weights, X x M x L."""
    scores_XML = block.scores_into(bucket.shape)
    q_XMW = q_JW.index_select(0, block.queries_I).view(*scores_XML.shape[:2], -1)
    return q_XMW, weights(q_XMW, k_XLW[:, : block.stop], scores_XML)
