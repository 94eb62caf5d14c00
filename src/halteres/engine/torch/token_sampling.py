"""From logits to tokens: temperature, min-p, top-k, top-p, greedy; by the inverse of the cumulative
distribution in fp32.

Log-probabilities, of temperature 1 or of the sampling temperature, are always the model's own over
the full vocabulary: before penalties and grammars change the logits (`logit_shaping`), and before
min-p, top-k and top-p take anything away. No row's parameters change another row's bits: rows that
truncate, or change their logits, are computed apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from halteres.engine.protocol import TopK

COLDEST = 1e-4  # a temperature below this is greedy: logits divided by it would overflow


CANDIDATES = (512, 8192)
"""Likeliest tokens that top-k and top-p look at; those of a row where so many do not hold enough
are looked at again with more, and at last sorted whole.
"""

_SMALLEST = np.nextafter(np.float32(0), np.float32(1))

_SLACK = 1e-6  # more than rounding takes from a cumulative probability


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """How each of N rows is sampled."""

    uniforms_N: np.ndarray  # float32 in [0, 1)
    temperature_N: np.ndarray  # float32; 0 is greedy
    top_k_N: np.ndarray  # int64; below 1 is off
    top_p_N: np.ndarray  # float32; 1 is off
    min_p_N: np.ndarray  # float32; 0 is off
    # bool: log-probabilities are of the sampling temperature; of 1 where that is greedy
    tempered_N: np.ndarray
    num_top_N: np.ndarray  # int64; how many of the most likely tokens go with it

    def __getitem__(self, rows: slice | np.ndarray) -> Shaping:
        return Shaping(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Chosen:
    """What N rows got."""

    tokens_N: Tensor  # int64
    logprobs_N: Tensor
    tops: Mapping[int, TopK]  # of the rows that ask for them


@dataclass(frozen=True, slots=True)
class ShapedRows:
    """M of the rows, whose tokens are drawn from other logits than the model's own."""

    rows_M: np.ndarray  # int64
    logits_MV: Tensor


def choose(logits_NV: Tensor, shaping: Shaping, shaped: ShapedRows | None = None) -> Chosen:
    """A token for each row."""
    raw_NV = torch.log_softmax(logits_NV, dim=1)
    greedy_N = shaping.temperature_N < COLDEST
    warm_N = np.where(greedy_N, np.float32(1), shaping.temperature_N)
    tempered_NV = tempered(logits_NV, raw_NV, warm_N)
    drawn_NV = tempered_NV
    if shaped is not None:
        rows_M = _on(logits_NV, shaped.rows_M)
        of_shaped_MV = torch.log_softmax(shaped.logits_MV, dim=1)
        of_shaped_MV = tempered(shaped.logits_MV, of_shaped_MV, warm_N[shaped.rows_M])
        drawn_NV = tempered_NV.index_copy(0, rows_M, of_shaped_MV)
    tokens_N = _sampled(drawn_NV, shaping)
    if greedy_N.any():
        likeliest_N = logits_NV.argmax(dim=-1)
        if shaped is not None:
            likeliest_N[_on(logits_NV, shaped.rows_M)] = shaped.logits_MV.argmax(dim=-1)
        tokens_N = torch.where(_on(logits_NV, greedy_N), likeliest_N, tokens_N)
    logprobs_N = _of(raw_NV, tokens_N)
    as_sampled_N = shaping.tempered_N & (warm_N != 1)
    if as_sampled_N.any():
        logprobs_N = torch.where(
            _on(logits_NV, as_sampled_N), _of(tempered_NV, tokens_N), logprobs_N
        )
    tops: dict[int, TopK] = {}
    for k in np.unique(shaping.num_top_N[shaping.num_top_N > 0]).tolist():
        # Rows of one k together, never of several: the order of equally likely tokens must not
        # depend on company.
        for source_NV, of_source_N in ((raw_NV, ~as_sampled_N), (tempered_NV, as_sampled_N)):
            rows = np.flatnonzero((shaping.num_top_N == k) & of_source_N)
            if rows.size:
                tops.update(
                    zip(rows.tolist(), most_likely(source_NV[_on(source_NV, rows)], k), strict=True)
                )
    return Chosen(tokens_N, logprobs_N, tops)


def tempered(logits_NV: Tensor, raw_NV: Tensor, warm_N: np.ndarray) -> Tensor:
    """log-softmax at each row's temperature, which is above 0; `raw_NV` is that of temperature
    1.
    """
    if not (warm_N != 1).any():
        return raw_NV
    return torch.log_softmax(logits_NV / _on(logits_NV, warm_N)[:, None], dim=1)


def inverted(probs_NV: Tensor, uniforms_NK: Tensor) -> Tensor:
    """The first tokens whose cumulative probability exceeds u * total, N x K; one of probability 0
    is never it.
    """
    cumulative_NV = probs_NV.cumsum(dim=-1)
    targets_NK = uniforms_NK * cumulative_NV[:, -1:]
    tokens_NK = torch.searchsorted(cumulative_NV, targets_NK, right=True)
    return tokens_NK.clamp_(max=probs_NV.shape[1] - 1)


def most_likely(logprobs_NV: Tensor, k: int) -> list[TopK]:
    """The K most likely tokens of each row, the likeliest first; a list of length 1 for each."""
    values_NK, ids_NK = logprobs_NV.topk(k, dim=1)
    ids, values = ids_NK.to(torch.int32).cpu().numpy(), values_NK.float().cpu().numpy()
    return [
        TopK(k=k, length=1, ids=i.tobytes(), logprobs=v.tobytes())
        for i, v in zip(ids, values, strict=True)
    ]


def _sampled(logprobs_NV: Tensor, shaping: Shaping) -> Tensor:
    probs_NV = logprobs_NV.exp()
    if (shaping.min_p_N > 0).any():
        _leave_out_below(probs_NV, shaping.min_p_N)
    cut_N = (shaping.top_k_N > 0) | (shaping.top_p_N < 1)
    if cut_N.all():
        return _truncated(probs_NV, shaping)
    uniforms_N1 = _on(logprobs_NV, shaping.uniforms_N)[:, None]
    if not cut_N.any():
        return inverted(probs_NV, uniforms_N1).squeeze(1)
    cut_M, whole_M = (_on(logprobs_NV, np.flatnonzero(chosen_N)) for chosen_N in (cut_N, ~cut_N))
    tokens_N = torch.empty_like(uniforms_N1[:, 0], dtype=torch.int64)
    tokens_N[whole_M] = inverted(probs_NV[whole_M], uniforms_N1[whole_M]).squeeze(1)
    tokens_N[cut_M] = _truncated(probs_NV[cut_M], shaping[np.flatnonzero(cut_N)])
    return tokens_N


def _leave_out_below(probs_NV: Tensor, min_p_N: np.ndarray) -> None:
    """Tokens below a share of the likeliest's probability have none, in place; what is left is
    scaled up to 1, which is what top-p then cuts.

    Source: vLLM 0.32 `v1/sample/logits_processor/builtin.py`.
    """
    rows_M = np.flatnonzero(min_p_N > 0)
    places_M = _on(probs_NV, rows_M)
    left_MV = probs_NV[places_M]
    bounds_M1 = left_MV.amax(dim=1, keepdim=True) * _on(probs_NV, min_p_N[rows_M])[:, None]
    left_MV = left_MV.masked_fill(left_MV < bounds_M1, 0.0)
    probs_NV[places_M] = left_MV / left_MV.sum(dim=1, keepdim=True)


def _truncated(probs_NV: Tensor, shaping: Shaping) -> Tensor:
    """Among the top k, and the smallest set of at least probability p.

    A CPU looks at few tokens first: it sorts a large vocabulary for longer than all else of a step
    takes.
    """
    tokens_N = np.full(probs_NV.shape[0], -1)
    for count in CANDIDATES if probs_NV.device.type == "cpu" else ():
        if 4 * count <= probs_NV.shape[1] and (left := _left(tokens_N)) is not None:
            tokens_N[left] = _among_likeliest(probs_NV[left], shaping[left], count)
    if (left := _left(tokens_N)) is not None:
        tokens_N[left] = among_all(probs_NV[left], shaping[left]).cpu().numpy()
    return _on(probs_NV, tokens_N)


def _left(tokens_N: np.ndarray) -> np.ndarray | slice | None:
    """The rows that have no token yet; as a slice where they are all, which copies nothing."""
    left_M = np.flatnonzero(tokens_N < 0)
    return None if not left_M.size else slice(None) if left_M.size == tokens_N.size else left_M


def among_all(probs_NV: Tensor, shaping: Shaping) -> Tensor:
    """A token for each row that truncates; sorts whole vocabularies."""
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    top_k_N1, top_p_N1, uniforms_N1 = (
        _on(probs_NV, values_N)[:, None]
        for values_N in (shaping.top_k_N, shaping.top_p_N, shaping.uniforms_N)
    )
    ranks_V = torch.arange(probs_NV.shape[1], device=probs_NV.device)
    before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
    outside_NV = (ranks_V >= top_k_N1) & (top_k_N1 > 0)
    outside_NV |= (before_NV >= top_p_N1) & (top_p_N1 < 1)
    outside_NV[:, 0] = False
    chosen_N1 = inverted(sorted_NV.masked_fill_(outside_NV, 0.0), uniforms_N1)
    return order_NV.gather(1, chosen_N1).squeeze(1)


def _among_likeliest(probs_NV: Tensor, shaping: Shaping, count: int) -> np.ndarray:
    """What `among_all` gives, bit for bit; -1 where the likeliest tokens do not hold enough to say
    it.

    At least `count` tokens, where so many can be drawn, reach a bound that as many maxima of
    disjoint parts of the vocabulary reach; to find it costs a tenth of `topk`.
    """
    rows, vocabulary = probs_NV.shape
    parts = 4 * count
    maxima_NP = probs_NV[:, : vocabulary // parts * parts].view(rows, -1, parts).amax(dim=1)
    bounds_N = np.maximum(
        maxima_NP.topk(count, dim=1, sorted=False).values.amin(dim=1).numpy(), _SMALLEST
    )
    settings = zip(shaping.uniforms_N, shaping.top_k_N.tolist(), shaping.top_p_N, strict=True)
    return np.array(
        [
            _of_candidates(probs_V, (probs_V >= bound).nonzero()[0], *setting)
            for probs_V, bound, setting in zip(probs_NV.numpy(), bounds_N, settings, strict=True)
        ]
    )


def _of_candidates(
    probs_V: np.ndarray, ids_C: np.ndarray, uniform: np.float32, top_k: int, top_p: np.float32
) -> int:
    """Cumulative sums as torch makes them on a CPU: in float64, each rounded to float32."""
    order_C = np.argsort(-probs_V[ids_C], kind="stable")
    sorted_C = probs_V[ids_C[order_C]]
    cumulative_C = sorted_C.cumsum(dtype=np.float64).astype(np.float32)
    count = len(ids_C)
    if not (0 < top_k <= count or cumulative_C[-1] >= top_p + _SLACK):
        return -1
    if top_p < 1:
        inside_C = cumulative_C - sorted_C < top_p
        count = max(1, int(np.count_nonzero(inside_C)))
        if not inside_C[1:count].all():  # by a rounding error, a gap
            return -1
    count = min(count, top_k) if top_k > 0 else count
    chosen = np.searchsorted(cumulative_C[:count], uniform * cumulative_C[count - 1], side="right")
    return int(ids_C[order_C[min(chosen, count - 1)]])


def _of(logprobs_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1)


def _on(like: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)


# so that u * total < total in fp32 for every u: the inverse of a cumulative sum never runs past its
# end
_BITS = 23


def as_seed(seed: int) -> int:
    """Any integer as 64 unsigned bits."""
    return seed & 0xFFFF_FFFF_FFFF_FFFF


def uniforms(seeds_N: np.ndarray, samples_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """float32 in [0, 1), one per row; all arguments uint64 arrays."""
    x_N = _mixed(seeds_N + np.uint64(0x9E3779B97F4A7C15))
    x_N = _mixed(x_N ^ (samples_N * np.uint64(0xD1B54A32D192ED03)))
    x_N = _mixed(x_N ^ (positions_N * np.uint64(0x8CB92BA72F3D8DD7)))
    return (x_N >> np.uint64(64 - _BITS)).astype(np.float32) * np.float32(2.0**-_BITS)


def _mixed(x_N: np.ndarray) -> np.ndarray:
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))
