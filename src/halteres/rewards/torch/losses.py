"""The losses of reward modelling: pairs, rankings, ties, centring; labels of states.

Owns: which pairs a ranking has, the loss of each comparison and the weighted sum of a batch.
Never: divides by a batch's size: the caller divides by the weights of the whole optimiser step, so that it is exact
however the step is cut into micro-batches.

Sources: Bradley-Terry with a margin (Llama 2, arXiv 2307.09288) and centring (arXiv 2312.09244), as TRL 1.16 has them;
all pairs of a ranking over their number (InstructGPT, arXiv 2203.02155); ties by Rao and Kupper (1967); rankings by
Plackett and Luce, tied completions in Breslow's way; the score of a state as the logit that all is right so far
(process supervision, arXiv 2305.20050), the mean over a row's states.
Shape suffixes: T texts of a batch end to end, P pairs, C comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from halteres.rewards.training_config import ListwiseLoss, TiePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTexts:
    """The ranks of the texts of one comparison, or the labels of states."""

    ranks: tuple[int, ...]  # 0 is the best
    labels: tuple[bool, ...] = ()  # of states: they are not ranked
    margin: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss is made of."""

    label_smoothing: float = 0.0
    center_rewards_coefficient: float | None = None
    tie_policy: TiePolicy = "soft"
    listwise_loss: ListwiseLoss = "pairs"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of texts, the better one first; of a tie, the earlier."""

    better: tuple[int, ...]  # places among the batch's texts
    worse: tuple[int, ...]
    comparison: tuple[int, ...]  # which comparison each is of
    tied: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.better)


def pairs_of(comparisons: Sequence[RankedTexts], *, ties: bool = True) -> Pairs:
    """All pairs of each comparison, of texts that lie end to end; without `ties`, those of two ranks alone. States have
    none."""
    found: list[tuple[int, int, int, bool]] = []
    start = 0
    for c, one in enumerate(comparisons):
        for a, b in combinations(range(len(one.ranks)), 2):
            tied = one.ranks[a] == one.ranks[b]
            better, worse = (a, b) if one.ranks[a] <= one.ranks[b] else (b, a)
            if (ties or not tied) and not one.labels:
                found.append((start + better, start + worse, c, tied))
        start += len(one.ranks)
    better_P, worse_P, comparison_P, tied_P = zip(*found, strict=True) if found else ((), (), (), ())
    return Pairs(better_P, worse_P, comparison_P, tied_P)


def comparison_loss(
    scores_T: Tensor, comparisons: Sequence[RankedTexts], settings: LossSettings, threshold: Tensor | None = None
) -> Tensor:
    """The sum over comparisons of weight times loss, a scalar.

    Args:
        scores_T: raw scores of all comparisons' texts, end to end.
        comparisons: their ranks, margins and weights.
        settings: the loss.
        threshold: of `rao_kupper`, a scalar >= 0: the lead below which a tie is the likelier.
    """
    pairs = pairs_of(comparisons, ties=settings.tie_policy != "drop")
    listwise = settings.listwise_loss == "plackett_luce"
    listed = [listwise and len(one.ranks) > 2 and not one.labels for one in comparisons]
    total = scores_T.new_zeros(())
    if len(pairs):
        total = total + _pair_losses(scores_T, pairs, comparisons, listed, settings, threshold)
    if any(listed):
        parts = scores_T.split([len(one.ranks) for one in comparisons])
        for scores_K, one, is_listed in zip(parts, comparisons, listed, strict=True):
            if is_listed:
                total = total + one.weight * plackett_luce(scores_K, one.ranks)
    if any(one.labels for one in comparisons):
        total = total + _state_losses(scores_T, comparisons, settings.label_smoothing)
    return total


def _state_losses(scores_T: Tensor, comparisons: Sequence[RankedTexts], smoothing: float) -> Tensor:
    """Binary cross-entropy, of each comparison the mean over its states; of ranked texts nothing."""
    label_T = torch.tensor([label for one in comparisons for label in one.labels or (False,) * len(one.ranks)])
    share_T = torch.tensor([one.weight * bool(one.labels) / len(one.ranks) for one in comparisons for _ in one.ranks])
    target_T = label_T * (1 - 2 * smoothing) + smoothing
    losses_T = F.binary_cross_entropy_with_logits(scores_T, target_T.to(scores_T), reduction="none")
    return (share_T.to(scores_T) * losses_T).sum()


def _pair_losses(
    scores_T: Tensor,
    pairs: Pairs,
    comparisons: Sequence[RankedTexts],
    listed: Sequence[bool],
    settings: LossSettings,
    threshold: Tensor | None,
) -> Tensor:
    counts = [pairs.comparison.count(c) if len(one.ranks) > 2 else 1 for c, one in enumerate(comparisons)]
    device = scores_T.device
    share_P = torch.tensor([comparisons[c].weight / counts[c] for c in pairs.comparison], device=device)
    in_pairs_P = torch.tensor([0.0 if listed[c] else 1.0 for c in pairs.comparison], device=device)
    margin_P = torch.tensor([comparisons[c].margin for c in pairs.comparison], device=device)
    tied_P = torch.tensor(pairs.tied, device=device)
    better_P, worse_P = scores_T[list(pairs.better)], scores_T[list(pairs.worse)]
    lead_P = better_P - worse_P
    asked_P = margin_P if threshold is None else margin_P + threshold
    z_P = lead_P - asked_P
    smoothing = settings.label_smoothing
    loss_P = -(1 - smoothing) * F.logsigmoid(z_P)
    if smoothing:
        loss_P = loss_P - smoothing * F.logsigmoid(-z_P)
    if any(pairs.tied):
        loss_P = torch.where(tied_P, _tie_losses(lead_P, threshold), loss_P)
    total = (share_P * in_pairs_P * loss_P).sum()
    if settings.center_rewards_coefficient:
        total = total + settings.center_rewards_coefficient * (share_P * (better_P + worse_P) ** 2).sum()
    return total


def _tie_losses(lead_P: Tensor, threshold: Tensor | None) -> Tensor:
    """Without a threshold, target 1/2. With one, -log of 1 - s(d - t) - s(-d - t), without cancelling."""
    if threshold is None:
        return -(F.logsigmoid(lead_P) + F.logsigmoid(-lead_P)) / 2
    likely = F.logsigmoid(threshold - lead_P) + F.logsigmoid(threshold + lead_P)
    return -likely - torch.log(-torch.expm1(-2 * threshold))


def plackett_luce(scores_K: Tensor, ranks: Sequence[int]) -> Tensor:
    """-log of choosing the texts in this order, each out of those not yet chosen, per choice. K = 2 is the pair loss.

    Tied texts are each chosen out of all of them and what is below.
    """
    chosen, choices = scores_K.new_zeros(()), 0
    for k, rank in enumerate(ranks):
        rest = [i for i, other in enumerate(ranks) if other >= rank]
        if len(rest) > 1:
            chosen = chosen + torch.logsumexp(scores_K[rest], 0) - scores_K[k]
            choices += 1
    return chosen / choices
