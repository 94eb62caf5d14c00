"""Figures by which a reward model is judged, and its calibration, as pure functions of its scores.

Shapes: P pairs, K completions of one prompt. A *lead* is the chosen side's score minus the rejected
side's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halteres.errors import InvalidData
from halteres.rewards.model_folder import Calibration, Side
from halteres.rewards.preferences import Comparison

Floats = npt.NDArray[np.float64]
AnswerScores = Mapping[
    str, tuple[Sequence[float], Sequence[float]]
]  # by a question's id: of its correct, wrong answers

Z_95 = 1.959964  # standard deviations of a normal distribution between which 95 % of it lie
NUM_BINS = 10  # of confidences from 0.5 to 1, for the calibration error
# fewer make a calibration that is said to be uncertain; too few make none
FEW_PAIRS, LEAST_PAIRS = 200, 10
TIES = "Ties"
"""RewardBench 2's subset of questions with several right answers; ids are `tied:ID`, their twins'
with one `ref:ID`.
"""

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

# factor of the leads' mean size within which a temperature lies: all right would ask for 0
WIDEST = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How often something was so, with its 95 % interval (Wilson's: it holds for few cases and near
    0 and 1).
    """

    value: float
    low: float
    high: float
    count: int  # of cases

    @property
    def holds_half(self) -> bool:
        """The cases do not tell it from a coin."""
        return self.low <= 0.5 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigures:
    """How well pairs are told apart."""

    accuracy: Share  # strict, as TRL counts: an equal score is wrong
    half_credit: float  # an equal score counts one half
    mean_margin: float  # of the leads, in the scores' units
    tie_rate: float  # share of equal scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Pairs whose preferred side is told with about the same confidence."""

    low: float
    high: float
    count: int
    confidence: float  # mean; NaN where there are none
    accuracy: float  # share that is right, equal scores one half


@dataclass(frozen=True, slots=True, kw_only=True)
class TieSubset:
    """How a question with several right answers is scored."""

    score: float
    # of questions with many right answers: the worst of them above the best wrong one
    accuracy_tied: float
    accuracy_ref: float  # of the same question's twin, which has one right answer
    # share of tied questions whose gap is wider than the right answers' own spread
    gap_over_spread: float
    both_gaps_over_spread: float  # share of twins of which both gaps are
    mean_excess: float  # of tanh(smaller gap / spread - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """RewardBench 2's score."""

    overall: float  # mean of the subsets
    by_subset: Mapping[str, float]  # best-of-N credit; of Ties its own formula
    ties: TieSubset | None


def share(hits: float, count: int) -> Share:
    """So many of so many.

    >>> found = share(8, 10)
    >>> found.value, round(found.low, 3), round(found.high, 3)
    (0.8, 0.49, 0.943)
    """
    if count == 0:
        return Share(value=math.nan, low=0.0, high=1.0, count=0)
    value, z = hits / count, Z_95
    middle = value + z * z / (2 * count)
    reach = z * math.sqrt(value * (1 - value) / count + z * z / (4 * count * count))
    whole = 1 + z * z / count
    low, high = (middle - reach) / whole, (middle + reach) / whole
    # Of no case or of all, a bound is the share itself, and rounding must not put it on the share's
    # other side.
    return Share(
        value=value, low=max(0.0, min(low, value)), high=min(1.0, max(high, value)), count=count
    )


def pair_figures(leads_P: Floats) -> PairFigures:
    """The figures of some pairs.

    >>> figures = pair_figures(np.array([2.0, 1.0, 0.0, -1.0]))
    >>> figures.accuracy.value, figures.half_credit, figures.mean_margin, figures.tie_rate
    (0.5, 0.625, 0.5, 0.25)
    """
    count = len(leads_P)
    wins, ties = int(np.sum(leads_P > 0)), int(np.sum(leads_P == 0))
    return PairFigures(
        accuracy=share(wins, count),
        half_credit=(wins + ties / 2) / count if count else math.nan,
        mean_margin=float(np.mean(leads_P)) if count else math.nan,
        tie_rate=ties / count if count else math.nan,
    )


def best_of_n_credit(scores_K: Floats, correct_K: npt.NDArray[np.bool_]) -> float:
    """Which part of the completions with the highest score is correct: 1/m where one correct is
    among m equal ones (RewardBench 2, arXiv 2506.01937).

    >>> best_of_n_credit(np.array([1.0, 3.0, 3.0, 0.0]), np.array([False, True, False, False]))
    0.5
    """
    return float(np.mean(correct_K[scores_K == np.max(scores_K)]))


def kendall_tau(scores_K: Floats, ranks_K: Sequence[int]) -> float | None:
    """Kendall's tau-b between scores (more is better) and ranks (0 is best); None where either are
    all equal.

    >>> round(kendall_tau(np.array([3.0, 1.0, 2.0]), [0, 1, 2]), 3)
    0.333
    """
    goodness_K = -np.asarray(ranks_K, dtype=np.float64)
    first, second = np.triu_indices(len(scores_K), k=1)
    by_score = np.sign(scores_K[first] - scores_K[second])
    by_rank = np.sign(goodness_K[first] - goodness_K[second])
    both = math.sqrt(float(np.sum(by_score != 0)) * float(np.sum(by_rank != 0)))
    return float(np.sum(by_score * by_rank)) / both if both else None


def spearman(x: Floats, y: Floats) -> float | None:
    """Spearman's correlation, equal values at their mean rank; None where either are all equal.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 9.0, 4.0]))
    0.5
    """

    def centred_ranks(values: Floats) -> Floats:
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts).astype(np.float64) - (counts - 1) / 2)[place]
        return ranks - ranks.mean()

    rank_x, rank_y = centred_ranks(x), centred_ranks(y)
    both = math.sqrt(float(rank_x @ rank_x) * float(rank_y @ rank_y))
    return float(rank_x @ rank_y) / both if both else None


def rewardbench_2(scored: Sequence[tuple[Comparison, Floats]]) -> Benchmark | None:
    """RewardBench 2's score (arXiv 2506.01937); None unless all rows have a subset and more than
    two answers.
    """
    if not scored or any(one.kind is None or len(one.completions) <= 2 for one, _ in scored):
        return None
    by_subset: dict[str, float] = {}
    ties: TieSubset | None = None
    for subset in sorted({str(one.kind) for one, _ in scored}):
        rows = [(one, scores) for one, scores in scored if one.kind == subset]
        if subset == TIES and all(one.id.startswith(("ref:", "tied:")) for one, _ in rows):
            questions: dict[str, dict[str, tuple[list[float], list[float]]]] = {
                "ref": {},
                "tied": {},
            }
            for one, scores in rows:
                form, _, name = one.id.partition(":")
                correct = np.array(one.ranks) == 0
                questions[form][name] = scores[correct].tolist(), scores[~correct].tolist()
            ties = tie_subset(questions["ref"], questions["tied"])
            by_subset[subset] = ties.score
        else:
            by_subset[subset] = _mean(
                [best_of_n_credit(scores, np.array(one.ranks) == 0) for one, scores in rows]
            )
    return Benchmark(overall=_mean(list(by_subset.values())), by_subset=by_subset, ties=ties)


def tie_subset(ref: AnswerScores, tied: AnswerScores) -> TieSubset:
    """The score of the subset Ties, by questions with one right answer and, by the same id, their
    twins with several.

    The gap is the worst correct minus the best wrong score, the spread the best minus the worst
    correct one; 0.30 * accuracy_tied + 0.30 * accuracy_ref + 0.20 * gap_over_spread + 0.20 *
    both_gaps_over_spread + 0.01 * mean_excess; where the spread is 0, the excess is the sign of the
    gap.
    """
    gaps_ref, gaps = (
        {name: min(a) - max(b) for name, (a, b) in one.items()} for one in (ref, tied)
    )
    spreads = {name: max(correct) - min(correct) for name, (correct, _) in tied.items()}
    smaller = [(min(gaps_ref[name], gaps[name]), spreads[name]) for name in tied if name in ref]
    accuracy_tied, accuracy_ref = (
        _mean([gap > 0 for gap in one.values()]) for one in (gaps, gaps_ref)
    )
    gap_over_spread = _mean([gaps[name] > spreads[name] for name in tied])
    both = _mean([gap > spread for gap, spread in smaller])
    excess = _mean(
        [math.tanh(gap / spread - 1) if spread else float(np.sign(gap)) for gap, spread in smaller]
    )
    return TieSubset(
        score=0.3 * accuracy_tied
        + 0.3 * accuracy_ref
        + 0.2 * gap_over_spread
        + 0.2 * both
        + 0.01 * excess,
        accuracy_tied=accuracy_tied,
        accuracy_ref=accuracy_ref,
        gap_over_spread=gap_over_spread,
        both_gaps_over_spread=both,
        mean_excess=excess,
    )


def probabilities(leads: Floats, temperature: float = 1.0) -> Floats:
    """That the chosen side is preferred: s(lead / temperature)."""
    return 0.5 * (1 + np.tanh(leads / (2 * temperature)))  # the sigmoid, without overflow


def reliability(
    leads_P: Floats, temperature: float = 1.0, num_bins: int = NUM_BINS
) -> tuple[Bin, ...]:
    """Confidence max(p, 1 - p) against how often it is right, in equal bins from 0.5 to 1."""
    confidence_P = probabilities(np.abs(leads_P), temperature)
    right_P = np.where(leads_P == 0, 0.5, leads_P > 0)
    place_P = np.minimum((2 * num_bins * (confidence_P - 0.5)).astype(int), num_bins - 1)

    def bin_of(number: int) -> Bin:
        inside = place_P == number
        return Bin(
            low=0.5 + number / (2 * num_bins),
            high=0.5 + (number + 1) / (2 * num_bins),
            count=int(inside.sum()),
            confidence=float(confidence_P[inside].mean()) if inside.any() else math.nan,
            accuracy=float(right_P[inside].mean()) if inside.any() else math.nan,
        )

    return tuple(map(bin_of, range(num_bins)))


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean distance of confidence and accuracy, each bin by its
    pairs.
    """
    total = sum(each.count for each in bins)
    return sum(
        each.count * abs(each.accuracy - each.confidence) for each in bins if each.count
    ) / max(1, total)


def brier_score(leads_P: Floats, temperature: float = 1.0) -> float:
    """Mean of (1 - p)^2, p the probability given to the chosen side."""
    return float(np.mean((1 - probabilities(leads_P, temperature)) ** 2))


def fit_calibration(
    chosen_P: Floats,
    rejected_P: Floats,
    *,
    offset_from: Side = "chosen",
    leads_P: Floats | None = None,
) -> Calibration:
    """The calibration of a model by its raw scores of held-out pairs; InvalidData: too few, or all
    scores are equal.

    Args:
        chosen_P, rejected_P: raw scores, shape (P,).
        offset_from: the sides whose mean score becomes 0: the chosen (InstructGPT: demonstrations
            score 0), or both.
        leads_P: which the pairs judge, where that is not the score: an objective's own; for the
            temperature.
    """
    if len(chosen_P) < LEAST_PAIRS:
        why = (
            f"It takes {LEAST_PAIRS} at least, and {FEW_PAIRS} for a certain temperature; ties "
            "and steps are no pairs."
        )
        fix = "Name more held-out pairs. The model's calibration, if it has one, stays."
        raise InvalidData(f"Too few ranked pairs to calibrate on: {len(chosen_P)}.", why, fix)
    both = np.concatenate([chosen_P, rejected_P])
    scale = float(both.std())
    if scale == 0.0:
        why = f"All {len(both)} scores are equal."
        raise InvalidData(
            "The model cannot be calibrated on these pairs.", why, "Name pairs that it tells apart."
        )
    leads = chosen_P - rejected_P if leads_P is None else leads_P
    # Of the least negative log-likelihood of s(lead / temperature). In 1/temperature the likelihood
    # is concave, so its slope changes its sign once: bisection finds the place.
    size = float(np.abs(leads).mean()) or 1.0
    low, high = math.log(1 / (WIDEST * size)), math.log(WIDEST / size)  # of 1/temperature
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.mean(leads * probabilities(-leads * math.exp(middle)))) > 0:
            low = middle
        else:
            high = middle
    temperature = math.exp(-low)
    before, after = (calibration_error(reliability(leads, each)) for each in (1.0, temperature))
    warnings: list[str] = []
    if len(leads) < FEW_PAIRS:
        warnings.append(
            f"{len(leads)} pairs are few: {FEW_PAIRS} or more make the temperature certain."
        )
    if float(leads.mean()) <= 0:
        warnings.append(
            "The rejected side scores no lower than the chosen one: probabilities are near one "
            "half."
        )
    elif bool(np.all(leads > 0)):
        warnings.append("Every pair is right: these pairs do not tell how sure the model may be.")
    return Calibration(
        temperature=temperature,
        offset=float((chosen_P if offset_from == "chosen" else both).mean()),
        scale=scale,
        offset_from=offset_from,
        num_pairs=len(leads),
        calibration_error=(before, after),
        brier_score=(brier_score(leads), brier_score(leads, temperature)),
        quantiles={str(q): float(np.quantile(both, q)) for q in QUANTILES},
        warnings=tuple(warnings),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
