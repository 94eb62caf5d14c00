"""The losses, as sums over tokens.

Owns: each loss's formula per token, and which tokens it clipped.
Never: divides by anything: the caller's weights are the normalisation.

Source: the Tinker API's losses. lp: log-probability under the adapter, q: under the sampler, A: advantage, w: weight,
r = exp(lp - q), sg: stop-gradient, lo and hi: thresholds of the ratio, per token.

A token whose advantage is 0 has no loss, so that its q, which on a prompt is nobody's, may be anything finite: so say
the formulas, but for dro, whose quadratic term needs no advantage. There a token is left out only where q is 0 as well:
the filler of prompts, which it would pull towards probability 1.

B datums, T tokens of each, padded at the end with zeros; the padding has no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halteres.engine.losses import CLIP_HIGH, CLIP_LOW

Inputs = Mapping[str, Tensor]
"""Float32 arrays, B x T, by name; of cross_entropy shaped as the log-probabilities."""

Settings = Mapping[str, float]

PerToken = tuple[Tensor, Tensor | None]
"""The loss of each token, and where its ratio was clipped, of losses that clip."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss: which input scales a token, and its value per token."""

    scale: str
    per_token: Callable[[Tensor, Inputs, Settings], PerToken]


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> PerToken:
    """-w * lp, B x T or B x T x K; weights may be negative or fractional."""
    return -inputs["weights"] * logprobs, None


def importance_sampling(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> PerToken:
    """-r * A."""
    return -_log_ratio(logprobs_BT, inputs).exp() * inputs["advantages"], None


def ppo(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> PerToken:
    """-min(r * A, clip(r, lo, hi) * A)."""
    log_ratio_BT = _log_ratio(logprobs_BT, inputs)
    return _clipped_surrogate(log_ratio_BT, log_ratio_BT.detach().exp(), inputs)


def cispo(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> PerToken:
    """-sg(clip(r, lo, hi)) * lp * A (arXiv 2506.13585)."""
    ratio_BT, low_BT, high_BT = _log_ratio(logprobs_BT, inputs).detach().exp(), inputs[CLIP_LOW], inputs[CLIP_HIGH]
    clipped_BT = (ratio_BT < low_BT) | (ratio_BT > high_BT)
    return -ratio_BT.clamp(low_BT, high_BT) * logprobs_BT * inputs["advantages"], clipped_BT


def dro(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> PerToken:
    """-(lp * A - beta / 2 * (lp - q)²) (arXiv 2405.19107)."""
    meant_BT = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    difference_BT = torch.where(meant_BT, logprobs_BT - inputs["logprobs"], 0.0)
    penalty_BT = 0.5 * settings["beta"] * difference_BT.square()
    return penalty_BT - logprobs_BT * inputs["advantages"], None


def gspo(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> PerToken:
    """-min(r * A, clip(r, lo, hi) * A) with the sequence's ratio at every token (arXiv 2507.18071, GSPO-token).

    r = sg(s) * exp(lp - sg(lp)), and s = exp(mean of lp - q over the tokens whose mask is not 0). The mean is of 64
    bits: thresholds lie 3e-4 from 1.
    """
    fixed_BT = logprobs_BT.detach()
    mask_BT = inputs["sequence_ratio_mask"] != 0
    sum_B1 = torch.where(mask_BT, (fixed_BT - inputs["logprobs"]).double(), 0.0).sum(1, keepdim=True)
    mean_BT = (sum_B1 / mask_BT.sum(1, keepdim=True)).expand_as(mask_BT)
    return _clipped_surrogate(mean_BT.to(logprobs_BT.dtype) + (logprobs_BT - fixed_BT), mean_BT.exp(), inputs)


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss("weights", cross_entropy),
    "importance_sampling": Loss("advantages", importance_sampling),
    "ppo": Loss("advantages", ppo),
    "cispo": Loss("advantages", cispo),
    "dro": Loss("advantages", dro),
    "gspo": Loss("advantages", gspo),
}


def _log_ratio(logprobs_BT: Tensor, inputs: Inputs) -> Tensor:
    """lp - q; 0 where the advantage is, so that no ratio is formed there."""
    return torch.where(inputs["advantages"] != 0, logprobs_BT - inputs["logprobs"], 0.0)


def _clipped_surrogate(log_ratio_BT: Tensor, ratio_BT: Tensor, inputs: Inputs) -> PerToken:
    """-min(r * A, clip(r) * A) of r = exp(log ratio); `ratio_BT` is the same without gradient.

    A ratio that is clipped is not formed with gradient: it may overflow, and 0 times infinity is no gradient.
    """
    advantages_BT, low_BT, high_BT = inputs["advantages"], inputs[CLIP_LOW], inputs[CLIP_HIGH]
    clipped_BT = torch.where(advantages_BT >= 0, ratio_BT > high_BT, ratio_BT < low_BT)
    free_BT = torch.where(clipped_BT, 0.0, log_ratio_BT).exp()
    bound_BT = ratio_BT.clamp(low_BT, high_BT).to(free_BT.dtype)
    return -torch.where(clipped_BT, bound_BT, free_BT) * advantages_BT, clipped_BT
