"""From logits to tokens.

Owns: temperature, top-k, top-p, greedy; the inverse of the cumulative distribution in fp32; the returned
log-probability, which is always of temperature 1 over the full vocabulary.
Never: lets one row's parameters change another row's bits: rows that truncate are computed apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shaping:
    """How each of N rows is sampled."""

    uniforms_N: np.ndarray  # float32 in [0, 1)
    temperature_N: np.ndarray  # float32; 0 is greedy
    top_k_N: np.ndarray  # int64; below 1 is off
    top_p_N: np.ndarray  # float32; 1 is off

    def __getitem__(self, rows: slice) -> Shaping:
        return Shaping(self.uniforms_N[rows], self.temperature_N[rows], self.top_k_N[rows], self.top_p_N[rows])


def choose(logits_NV: Tensor, shaping: Shaping) -> tuple[Tensor, Tensor]:
    """Tokens (int64) and their log-probabilities at temperature 1, N each."""
    logprobs_NV = torch.log_softmax(logits_NV, dim=1)
    tokens_N = _sampled(logits_NV, logprobs_NV, shaping)
    greedy_N = shaping.temperature_N == 0
    if greedy_N.any():
        tokens_N = torch.where(_on(logits_NV, greedy_N), logits_NV.argmax(dim=-1), tokens_N)
    return tokens_N, logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1)


def _sampled(logits_NV: Tensor, logprobs_NV: Tensor, shaping: Shaping) -> Tensor:
    warm_N = np.where(shaping.temperature_N == 0, np.float32(1), shaping.temperature_N)
    if (warm_N != 1).any():
        logprobs_NV = torch.log_softmax(logits_NV / _on(logits_NV, warm_N)[:, None], dim=1)
    probs_NV = logprobs_NV.exp()
    uniforms_N = _on(logits_NV, shaping.uniforms_N)
    tokens_N = _invert(probs_NV, uniforms_N)
    cut_N = (shaping.top_k_N > 0) | (shaping.top_p_N < 1)
    if cut_N.any():
        rows_M = _on(logits_NV, cut_N).nonzero().squeeze(1)
        top_k_M, top_p_M = (_on(logits_NV, values[cut_N]) for values in (shaping.top_k_N, shaping.top_p_N))
        tokens_N[rows_M] = _truncated(probs_NV[rows_M], uniforms_N[rows_M], top_k_M, top_p_M)
    return tokens_N


def _invert(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u * total; one of probability 0 is never it."""
    cumulative_NV = probs_NV.cumsum(dim=-1)
    targets_N1 = uniforms_N[:, None] * cumulative_NV[:, -1:]
    tokens_N = torch.searchsorted(cumulative_NV, targets_N1, right=True).squeeze(1)
    return tokens_N.clamp_(max=probs_NV.shape[1] - 1)


def _truncated(probs_NV: Tensor, uniforms_N: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Among the top k, and the smallest set of at least probability p."""
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_NV.shape[1], device=probs_NV.device)
    before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
    outside_NV = (ranks_V >= top_k_N[:, None]) & (top_k_N[:, None] > 0)
    outside_NV |= (before_NV >= top_p_N[:, None]) & (top_p_N[:, None] < 1)
    outside_NV[:, 0] = False
    chosen_N = _invert(sorted_NV.masked_fill_(outside_NV, 0.0), uniforms_N)
    return order_NV.gather(1, chosen_N[:, None]).squeeze(1)


def _on(like: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
