"""From logits to tokens.

Owns: temperature, top-k, top-p, greedy; the inverse of the cumulative distribution in fp32; the returned
log-probabilities, of temperature 1 or of the sampling temperature, always over the full vocabulary: before top-k and
top-p take anything away.
Never: lets one row's parameters change another row's bits: rows that truncate are computed apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from halteres.engine.protocol import TopK

COLDEST = 1e-4
"""A temperature below this is greedy: logits divided by it would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """How each of N rows is sampled, and what is told of it."""

    uniforms_N: np.ndarray  # float32 in [0, 1)
    temperature_N: np.ndarray  # float32; 0 is greedy
    top_k_N: np.ndarray  # int64; below 1 is off
    top_p_N: np.ndarray  # float32; 1 is off
    tempered_N: np.ndarray  # bool: log-probabilities are of the sampling temperature; of 1 where that is greedy
    told_N: np.ndarray  # int64; how many of the most likely tokens are told

    def __getitem__(self, rows: slice) -> Shaping:
        return Shaping(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Chosen:
    """What N rows got."""

    tokens_N: Tensor  # int64
    logprobs_N: Tensor
    tops: Mapping[int, TopK]  # of the rows that are told of one


def choose(logits_NV: Tensor, shaping: Shaping) -> Chosen:
    """A token for each row."""
    raw_NV = torch.log_softmax(logits_NV, dim=1)
    greedy_N = shaping.temperature_N < COLDEST
    warm_N = np.where(greedy_N, np.float32(1), shaping.temperature_N)
    tempered_NV = tempered(logits_NV, raw_NV, warm_N)
    tokens_N = _sampled(tempered_NV, shaping)
    if greedy_N.any():
        tokens_N = torch.where(_on(logits_NV, greedy_N), logits_NV.argmax(dim=-1), tokens_N)
    logprobs_N = _of(raw_NV, tokens_N)
    as_sampled_N = shaping.tempered_N & (warm_N != 1)
    if as_sampled_N.any():
        logprobs_N = torch.where(_on(logits_NV, as_sampled_N), _of(tempered_NV, tokens_N), logprobs_N)
    return Chosen(tokens_N, logprobs_N, _tops(raw_NV, tempered_NV, as_sampled_N, shaping.told_N))


def tempered(logits_NV: Tensor, raw_NV: Tensor, warm_N: np.ndarray) -> Tensor:
    """log-softmax at each row's temperature, which is above 0; `raw_NV` is that of temperature 1."""
    if not (warm_N != 1).any():
        return raw_NV
    return torch.log_softmax(logits_NV / _on(logits_NV, warm_N)[:, None], dim=1)


def inverted(probs_NV: Tensor, uniforms_NK: Tensor) -> Tensor:
    """The first tokens whose cumulative probability exceeds u * total, N x K; one of probability 0 is never it."""
    cumulative_NV = probs_NV.cumsum(dim=-1)
    targets_NK = uniforms_NK * cumulative_NV[:, -1:]
    tokens_NK = torch.searchsorted(cumulative_NV, targets_NK, right=True)
    return tokens_NK.clamp_(max=probs_NV.shape[1] - 1)


def most_likely(logprobs_NV: Tensor, k: int) -> list[TopK]:
    """The K most likely tokens of each row, the likeliest first; a list of length 1 for each."""
    values_NK, ids_NK = logprobs_NV.topk(k, dim=1)
    ids, values = ids_NK.to(torch.int32).cpu().numpy(), values_NK.float().cpu().numpy()
    return [TopK(k=k, length=1, ids=i.tobytes(), logprobs=v.tobytes()) for i, v in zip(ids, values, strict=True)]


def _tops(raw_NV: Tensor, tempered_NV: Tensor, as_sampled_N: np.ndarray, told_N: np.ndarray) -> dict[int, TopK]:
    """Rows of one k together, never of several: which of equally likely tokens are told must not depend on company."""
    found: dict[int, TopK] = {}
    for k in np.unique(told_N[told_N > 0]).tolist():
        for source_NV, of_source_N in ((raw_NV, ~as_sampled_N), (tempered_NV, as_sampled_N)):
            rows = np.flatnonzero((told_N == k) & of_source_N)
            if rows.size:
                tops = most_likely(source_NV[_on(source_NV, rows)], k)
                found.update(zip(rows.tolist(), tops, strict=True))
    return found


def _sampled(logprobs_NV: Tensor, shaping: Shaping) -> Tensor:
    probs_NV = logprobs_NV.exp()
    uniforms_N1 = _on(logprobs_NV, shaping.uniforms_N)[:, None]
    tokens_N = inverted(probs_NV, uniforms_N1).squeeze(1)
    cut_N = (shaping.top_k_N > 0) | (shaping.top_p_N < 1)
    if cut_N.any():
        rows_M = _on(logprobs_NV, cut_N).nonzero().squeeze(1)
        top_k_M, top_p_M = (_on(logprobs_NV, values[cut_N]) for values in (shaping.top_k_N, shaping.top_p_N))
        tokens_N[rows_M] = _truncated(probs_NV[rows_M], uniforms_N1[rows_M], top_k_M, top_p_M)
    return tokens_N


def _truncated(probs_NV: Tensor, uniforms_N1: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Among the top k, and the smallest set of at least probability p."""
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_NV.shape[1], device=probs_NV.device)
    before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
    outside_NV = (ranks_V >= top_k_N[:, None]) & (top_k_N[:, None] > 0)
    outside_NV |= (before_NV >= top_p_N[:, None]) & (top_p_N[:, None] < 1)
    outside_NV[:, 0] = False
    chosen_N1 = inverted(sorted_NV.masked_fill_(outside_NV, 0.0), uniforms_N1)
    return order_NV.gather(1, chosen_N1).squeeze(1)


def _of(logprobs_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1)


def _on(like: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
