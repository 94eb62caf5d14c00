"""The losses, as sums over tokens: each one's formula per token, and its value, gradient and
metrics of a micro-batch.

Nothing is divided by anything: the caller's weights are the normalisation. No loss sees weights of
a model: its gradient is of the log-probabilities, and the pass carries it on.

Source: the Tinker API's losses. lp: log-probability under the adapter, q: under the sampler, A:
advantage, w: weight, r = exp(lp - q), sg: stop-gradient, lo and hi: thresholds of the ratio, per
token.

A token whose advantage is 0 has no loss, so that its q, which on a prompt says nothing, may be
anything finite: so say the formulas, but for dro, whose quadratic term needs no advantage. There a
token is left out only where q is 0 as well: the filler of prompts, which it would pull towards
probability 1.

stable_reinforce is a formula of ours under the hosted service's name: that one's is not public.
Which tokens were sampled is an input, so that no prompt's q counts; the q of a sampled token
counts, whatever its advantage.

B datums, T tokens of each, padded at the end with zeros; the padding has no loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halteres.engine.checks import MAX_SEQUENCE_RATIO, SEQUENCES, loss_not_finite
from halteres.engine.torch.micro_batches import MicroBatch
from halteres.losses import CLIP_HIGH, CLIP_LOW, STABLE_REINFORCE

Inputs = Mapping[str, Tensor]
"""Float32 arrays (int32 SEQUENCES), B x T, by name; of cross_entropy shaped as the
log-probabilities.
"""

Settings = Mapping[str, float]

TokenLosses = tuple[Tensor, Tensor | None]
"""The loss of each token, and where its ratio was clipped, of losses that clip."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss: which input scales a token, and its value per token."""

    scale: str
    per_token: Callable[[Tensor, Inputs, Settings], TokenLosses]


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> TokenLosses:
    """-w * lp, B x T or B x T x K; weights may be negative or fractional."""
    return -inputs["weights"] * logprobs, None


def importance_sampling(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> TokenLosses:
    """-r * A."""
    return -_log_ratio(logprobs_BT, inputs).exp() * inputs["advantages"], None


def ppo(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> TokenLosses:
    """-min(r * A, clip(r, lo, hi) * A)."""
    log_ratio_BT = _log_ratio(logprobs_BT, inputs)
    return _clipped_surrogate(log_ratio_BT, log_ratio_BT.detach().exp(), inputs)


def cispo(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> TokenLosses:
    """-sg(clip(r, lo, hi)) * lp * A (arXiv 2506.13585)."""
    ratio_BT, low_BT, high_BT = (
        _log_ratio(logprobs_BT, inputs).detach().exp(),
        inputs[CLIP_LOW],
        inputs[CLIP_HIGH],
    )
    clipped_BT = (ratio_BT < low_BT) | (ratio_BT > high_BT)
    return -ratio_BT.clamp(low_BT, high_BT) * logprobs_BT * inputs["advantages"], clipped_BT


def dro(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> TokenLosses:
    """-(lp * A - beta / 2 * (lp - q)²) (arXiv 2405.19107)."""
    own_BT = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    difference_BT = torch.where(own_BT, logprobs_BT - inputs["logprobs"], 0.0)
    penalty_BT = 0.5 * settings["beta"] * difference_BT.square()
    return penalty_BT - logprobs_BT * inputs["advantages"], None


def gspo(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> TokenLosses:
    """-min(r * A, clip(r, lo, hi) * A) with the sequence's ratio at every token (arXiv 2507.18071,
    GSPO-token).

    r = sg(s) * exp(lp - sg(lp)), and s = exp(mean of lp - q over the tokens whose mask is not 0).
    The mean is of 64 bits: thresholds lie 3e-4 from 1.
    """
    fixed_BT = logprobs_BT.detach()
    mask_BT = inputs["sequence_ratio_mask"] != 0
    sum_B1 = torch.where(mask_BT, (fixed_BT - inputs["logprobs"]).double(), 0.0).sum(
        1, keepdim=True
    )
    mean_BT = (sum_B1 / mask_BT.sum(1, keepdim=True)).expand_as(mask_BT)
    return _clipped_surrogate(
        mean_BT.to(logprobs_BT.dtype) + (logprobs_BT - fixed_BT), mean_BT.exp(), inputs
    )


def stable_reinforce(logprobs_BT: Tensor, inputs: Inputs, settings: Settings) -> TokenLosses:
    """-w * A * lp + kl_coeff / 2 * (lp - q)² over the sampled tokens, w = sg(min(s, 2)), s =
    exp(mean of lp - q).

    The mean is over the tokens of a datum that one sequence sampled, of 64 bits, and bounded before
    the exponential. S is the largest number of sequences of a datum, and one for what none sampled.
    """
    sequences_BT = inputs[SEQUENCES].long()
    sampled_BT = sequences_BT != 0
    difference_BT = torch.where(sampled_BT, logprobs_BT - inputs["logprobs"], 0.0)
    sum_BS = difference_BT.new_zeros(
        len(sequences_BT), int(sequences_BT.max()) + 1, dtype=torch.float64
    )
    count_BS = torch.zeros_like(sum_BS).scatter_add_(1, sequences_BT, sampled_BT.double())
    sum_BS.scatter_add_(1, sequences_BT, difference_BT.detach().double())
    mean_BT = (sum_BS / count_BS.clamp(min=1)).gather(1, sequences_BT)
    bound = math.log(MAX_SEQUENCE_RATIO)
    weight_BT = mean_BT.clamp(max=bound).exp().to(logprobs_BT.dtype)
    loss_BT = -torch.where(sampled_BT, weight_BT * inputs["advantages"], 0.0) * logprobs_BT
    if settings["kl_coeff"]:  # 0 times a square that overflows is no number
        loss_BT = loss_BT + 0.5 * settings["kl_coeff"] * difference_BT.square()
    return loss_BT, mean_BT > bound


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss("weights", cross_entropy),
    "importance_sampling": Loss("advantages", importance_sampling),
    "ppo": Loss("advantages", ppo),
    "cispo": Loss("advantages", cispo),
    "dro": Loss("advantages", dro),
    "gspo": Loss("advantages", gspo),
    STABLE_REINFORCE: Loss("advantages", stable_reinforce),
}


def _log_ratio(logprobs_BT: Tensor, inputs: Inputs) -> Tensor:
    """lp - q; 0 where the advantage is, so that no ratio is formed there."""
    return torch.where(inputs["advantages"] != 0, logprobs_BT - inputs["logprobs"], 0.0)


def _clipped_surrogate(log_ratio_BT: Tensor, ratio_BT: Tensor, inputs: Inputs) -> TokenLosses:
    """-min(r * A, clip(r) * A) of r = exp(log ratio); `ratio_BT` is the same without gradient.

    A ratio that is clipped is not formed with gradient: it may overflow, and 0 times infinity is no
    gradient.
    """
    advantages_BT, low_BT, high_BT = inputs["advantages"], inputs[CLIP_LOW], inputs[CLIP_HIGH]
    clipped_BT = torch.where(advantages_BT >= 0, ratio_BT > high_BT, ratio_BT < low_BT)
    free_BT = torch.where(clipped_BT, 0.0, log_ratio_BT).exp()
    bound_BT = ratio_BT.clamp(low_BT, high_BT).to(free_BT.dtype)
    return -torch.where(clipped_BT, bound_BT, free_BT) * advantages_BT, clipped_BT


@dataclass(frozen=True, slots=True)
class Value:
    """What a loss makes of a micro-batch."""

    total: float  # summed over tokens and datums
    gradient: Tensor | None  # shaped as the log-probabilities; None in a forward pass
    # `:mean` as its sum over datums
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class PerToken:
    """A loss that is a sum over tokens, with its settings."""

    loss: Loss
    settings: Settings

    def value(self, logprobs: Tensor, batch: MicroBatch, gradient: bool) -> Value:
        """For log-probabilities of B x T, or B x T x K where tokens have several targets."""
        inputs = batch.inputs()
        with torch.set_grad_enabled(gradient):
            leaf = logprobs.detach().requires_grad_(gradient)
            tokens, clipped_BT = self.loss.per_token(leaf, inputs, self.settings)
            _check_finite(tokens.detach(), batch, "loss")
            found = torch.autograd.grad(tokens.sum(), leaf)[0] if gradient else None
        if found is not None:
            _check_finite(found, batch, "gradient of the loss")
        total = float(tokens.detach().double().sum())
        return Value(total, found, _metrics(self.loss.scale, leaf.detach(), clipped_BT, inputs))


def _check_finite(tokens: Tensor, batch: MicroBatch, what: str) -> None:
    """Rows of `tokens` are datums, then come positions."""
    finite = torch.isfinite(tokens)
    if not bool(finite.all()):
        row, position = (~finite).nonzero()[0].tolist()[:2]
        where = f" at datum {batch.examples[row].index}, position {position}"
        raise loss_not_finite(where, what, ratios="logprobs" in batch.inputs())


def _metrics(
    scale: str, logprobs: Tensor, clipped_BT: Tensor | None, inputs: Inputs
) -> dict[str, float]:
    """Counts, and how far the policy is from the sampler: sums, since a request may come in
    chunks.
    """
    live_BT = inputs[scale].flatten(2).any(2) if inputs[scale].ndim > 2 else inputs[scale] != 0
    metrics = {"num_loss_tokens:sum": float(live_BT.sum())}
    if clipped_BT is not None:
        metrics["num_clipped_tokens:sum"] = float((clipped_BT & live_BT).sum())
    if "logprobs" in inputs:
        apart = (logprobs - inputs["logprobs"])[live_BT].double()
        metrics["log_ratio:sum"] = float(apart.sum())
        metrics["log_ratio_squared:sum"] = float(apart.square().sum())
        metrics["log_ratio_abs:max"] = float(apart.abs().max()) if len(apart) else 0.0
    return metrics
