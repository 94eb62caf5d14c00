"""The losses of reward modelling: pairs, rankings, ties, centring; labels of states; and the
metrics beside them.

A sum of weighted losses is never divided by a batch's size here: the caller divides by the weights
of the whole optimiser step, so that it is exact however the step is cut into micro-batches.

Sources: Bradley-Terry with a margin (Llama 2, arXiv 2307.09288) and centring (arXiv 2312.09244), as
TRL 1.16 has them; all pairs of a ranking over their number (InstructGPT, arXiv 2203.02155); ties by
Rao and Kupper (1967); rankings by Plackett and Luce, tied completions in Breslow's way; the score
of a state as the logit that all is right so far (process supervision, arXiv 2305.20050), the mean
over a row's states. Shape suffixes: T texts of a batch end to end, P pairs, C comparisons.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halteres.rewards.preferences import Comparison
from halteres.rewards.torch.batches import Tokens
from halteres.rewards.training_plan import RewardConfig


@dataclass(frozen=True, slots=True)
class Example:
    """One comparison, ready to be computed."""

    comparison: Comparison
    texts: tuple[Tokens, ...]  # of the comparison, in order
    num_tokens: int  # useful ones, as TRL counts: each text with its prompt, and states once
    num_computed: int  # without padding

    @property
    def length(self) -> int:
        """Tokens of its longest text."""
        return max(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts of a batch, the better one first; of a tie, the earlier."""

    better: int  # places among the batch's texts
    worse: int
    comparison: int  # which one it is of
    tied: bool


def pairs_of(comparisons: Sequence[Comparison], *, ties: bool = True) -> list[Pair]:
    """All pairs of each comparison, of texts that lie end to end; without `ties`, of two ranks.
    States have none.
    """
    found: list[Pair] = []
    start = 0
    for c, one in enumerate(comparisons):
        for a, b in combinations(range(len(one.ranks)), 2):
            tied = one.ranks[a] == one.ranks[b]
            if one.ranks[a] <= one.ranks[b]:
                better, worse = (a, b)
            else:
                better, worse = (b, a)
            if (ties or not tied) and not one.labels:
                found.append(Pair(start + better, start + worse, c, tied))
        start += len(one.ranks)
    return found


def comparison_loss(
    scores_T: Tensor,
    comparisons: Sequence[Comparison],
    settings: RewardConfig,
    threshold: Tensor | None = None,
) -> Tensor:
    """The sum over comparisons of weight times loss, a scalar.

    `scores_T`: raw, of all comparisons' texts, end to end. `threshold`: of `rao_kupper`, a scalar
    >= 0: the lead below which a tie is the likelier.
    """
    pairs = pairs_of(comparisons, ties=settings.tie_policy != "drop")
    listwise = settings.listwise_loss == "plackett_luce"
    listed = [listwise and len(one.ranks) > 2 and not one.labels for one in comparisons]
    total = scores_T.new_zeros(())
    if pairs:
        total = total + _pair_losses(scores_T, pairs, comparisons, listed, settings, threshold)
    parts = scores_T.split([len(one.ranks) for one in comparisons])
    for scores_K, one, is_listed in zip(parts, comparisons, listed, strict=True):
        if is_listed:
            total = total + one.weight * plackett_luce(scores_K, one.ranks)
    if any(one.labels for one in comparisons):
        # Binary cross-entropy, of each comparison the mean over its states; of ranked texts
        # nothing.
        label_T = torch.tensor(
            [label for one in comparisons for label in one.labels or (False,) * len(one.ranks)]
        )
        shares = [
            one.weight * bool(one.labels) / len(one.ranks) for one in comparisons for _ in one.ranks
        ]
        target_T = label_T * (1 - 2 * settings.label_smoothing) + settings.label_smoothing
        losses_T = F.binary_cross_entropy_with_logits(
            scores_T, target_T.to(scores_T), reduction="none"
        )
        total = total + (torch.tensor(shares).to(scores_T) * losses_T).sum()
    return total


def _pair_losses(
    scores_T: Tensor,
    pairs: Sequence[Pair],
    comparisons: Sequence[Comparison],
    listed: Sequence[bool],
    settings: RewardConfig,
    threshold: Tensor | None,
) -> Tensor:
    counts = Counter(pair.comparison for pair in pairs)

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=scores_T.device)

    share_P = column(
        [comparisons[pair.comparison].weight / counts[pair.comparison] for pair in pairs]
    )
    in_pairs_P = column([0.0 if listed[pair.comparison] else 1.0 for pair in pairs])
    margin_P = column([comparisons[pair.comparison].margin for pair in pairs])
    better_P, worse_P = (
        scores_T[[pair.better for pair in pairs]],
        scores_T[[pair.worse for pair in pairs]],
    )
    lead_P = better_P - worse_P
    z_P = lead_P - (margin_P if threshold is None else margin_P + threshold)
    smoothing = settings.label_smoothing
    loss_P = -(1 - smoothing) * F.logsigmoid(z_P)
    if smoothing:
        loss_P = loss_P - smoothing * F.logsigmoid(-z_P)
    if any(pair.tied for pair in pairs):
        if threshold is None:  # target 1/2
            tied_P = -(F.logsigmoid(lead_P) + F.logsigmoid(-lead_P)) / 2
        else:  # -log of 1 - s(d - t) - s(-d - t), without cancelling
            likely = F.logsigmoid(threshold - lead_P) + F.logsigmoid(threshold + lead_P)
            tied_P = -likely - torch.log(-torch.expm1(-2 * threshold))
        loss_P = torch.where(column([pair.tied for pair in pairs]), tied_P, loss_P)
    total = (share_P * in_pairs_P * loss_P).sum()
    if settings.center_rewards_coefficient:
        total = (
            total
            + settings.center_rewards_coefficient * (share_P * (better_P + worse_P) ** 2).sum()
        )
    return total


def plackett_luce(scores_K: Tensor, ranks: Sequence[int]) -> Tensor:
    """-log of choosing the texts in this order, per choice; K = 2 is the pair loss. Each is chosen
    out of those not yet chosen, tied texts out of all of them and what is below.
    """
    chosen, choices = scores_K.new_zeros(()), 0
    for k, rank in enumerate(ranks):
        rest = [i for i, other in enumerate(ranks) if other >= rank]
        if len(rest) > 1:
            chosen = chosen + torch.logsumexp(scores_K[rest], 0) - scores_K[k]
            choices += 1
    return chosen / choices


@dataclass(slots=True)
class Interval:
    """Sums over the steps since the last report; its metrics have TRL's names, extremes are true
    ones.
    """

    losses: list[float] = field(default_factory=list)  # of each step
    scores: list[float] = field(default_factory=list)
    # better minus worse, of each pair; of a state, towards its label
    leads: list[float] = field(default_factory=list)
    # ... by kind, and by objective: objective/NAME
    leads_of: dict[str, list[float]] = field(default_factory=dict)
    num_ties: int = 0
    num_pairs: int = 0
    useful_tokens: int = 0
    computed_tokens: int = 0  # with padding
    padding_tokens: int = 0
    began_cpu_s: float = field(default_factory=time.process_time)

    def add(
        self, examples: Sequence[Example], scores: Sequence[float], computed: int, padding: int
    ) -> None:
        """Count a forward pass: of so many tokens, of which so many are padding."""
        comparisons = [one.comparison for one in examples]
        for pair in pairs_of(comparisons):
            self.num_pairs += 1
            self.num_ties += pair.tied
            if not pair.tied:
                self._add_lead(
                    comparisons[pair.comparison], scores[pair.better] - scores[pair.worse]
                )
        states = [(one, k) for one in comparisons for k in range(len(one.ranks))]
        for score, (one, k) in zip(scores, states, strict=True):
            if one.labels:
                self._add_lead(one, score if one.labels[k] else -score)
        self.scores += scores
        self.useful_tokens += sum(one.num_tokens for one in examples)
        self.padding_tokens += padding
        self.computed_tokens += computed

    def _add_lead(self, comparison: Comparison, lead: float) -> None:
        self.leads.append(lead)
        for name in (comparison.kind, comparison.objective and f"objective/{comparison.objective}"):
            if name:
                self.leads_of.setdefault(name, []).append(lead)

    def metrics(self) -> dict[str, float]:
        """Of the interval."""
        seconds = time.process_time() - self.began_cpu_s
        leads = {f"/{kind}": np.array(self.leads_of[kind]) for kind in sorted(self.leads_of)}
        if self.leads:
            leads = {"": np.array(self.leads), **leads}
        else:
            leads = {}
        return {
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "min_reward": min(self.scores),
            "mean_reward": float(np.mean(self.scores)),
            "max_reward": max(self.scores),
            **{f"accuracy{of}": float((own > 0).mean()) for of, own in leads.items()},
            **{f"margin{of}": float(own.mean()) for of, own in leads.items()},
            "tie_rate": self.num_ties / max(1, self.num_pairs),
            "padding_share": self.padding_tokens / self.computed_tokens,
            "tokens_per_cpu_s": self.useful_tokens / seconds if seconds > 0 else 0.0,
        }
