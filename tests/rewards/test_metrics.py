"""The figures of an evaluation, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halteres.rewards import metrics
from halteres.rewards.metrics import tie_subset


def test_accuracy_is_strict_and_half_credit_stands_beside_it() -> None:
    figures = metrics.pair_figures(np.array([0.5, 0.0, -1.0, 2.5]))
    assert (figures.accuracy.value, figures.accuracy.count) == (0.5, 4)
    assert (figures.half_credit, figures.tie_rate, figures.mean_margin) == (0.625, 0.25, 0.5)


def test_the_interval_is_wilsons() -> None:
    """41 of 50: (0.82 + 3.8415/100 ± 1.96 sqrt(0.82 * 0.18 / 50 + 3.8415 / 10000)) / (1 + 3.8415 /
    50).
    """
    found = metrics.share(41, 50)
    assert (found.low, found.high) == pytest.approx((0.69204, 0.90230), abs=1e-5)
    assert not found.holds_half
    assert metrics.share(27, 50).holds_half
    everything = metrics.share(20, 20)
    assert everything.high == 1.0 and everything.low == pytest.approx(20 / (20 + 3.84146), abs=1e-5)


def test_a_share_lies_in_its_interval_whatever_the_rounding() -> None:
    assert all(
        one.low <= one.value <= one.high
        for n in range(1, 200)
        for one in (metrics.share(0, n), metrics.share(n, n))
    )


def test_nothing_is_no_share() -> None:
    none = metrics.share(0, 0)
    assert math.isnan(none.value) and (none.low, none.high) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("scores", "correct", "credit"),
    [
        ([2, 1, 0, 1], [1, 0, 0, 0], 1.0),
        ([2, 2, 2, 1], [1, 0, 0, 0], 1 / 3),
        ([1, 2, 0, 1], [1, 0, 0, 0], 0.0),
        ([2, 2, 2, 1], [1, 1, 0, 0], 2 / 3),
        ([0, 0, 0, 0], [1, 0, 0, 0], 0.25),
    ],
)
def test_best_of_n_gives_a_share_of_the_credit_among_equal_best(
    scores: list[float], correct: list[int], credit: float
) -> None:
    assert metrics.best_of_n_credit(
        np.array(scores, float), np.array(correct, bool)
    ) == pytest.approx(credit)


@pytest.mark.parametrize(
    ("scores", "ranks", "tau"),
    [
        ([4, 3, 2, 1], [0, 1, 2, 3], 1.0),
        ([1, 2, 3, 4], [0, 1, 2, 3], -1.0),
        ([4, 2, 3, 1], [0, 1, 2, 3], 4 / 6),  # five of six pairs agree, one does not
        ([3, 3, 1], [0, 1, 2], 2 / math.sqrt(2 * 3)),  # tau-b: one pair is equal by score
        ([1, 1, 1], [0, 1, 2], None),
    ],
)
def test_kendalls_tau_counts_agreeing_pairs(
    scores: list[float], ranks: list[int], tau: float | None
) -> None:
    assert metrics.kendall_tau(np.array(scores, float), ranks) == (
        tau if tau is None else pytest.approx(tau)
    )


def test_spearman_uses_mean_ranks() -> None:
    """Ranks of y: 1, 2.5, 2.5, 4; of x: 1..4. Covariance 4.5, variances 5 and 4.5."""
    found = metrics.spearman(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 5.0, 5.0, 9.0]))
    assert found == pytest.approx(4.5 / math.sqrt(5 * 4.5))
    assert metrics.spearman(np.ones(3), np.arange(3.0)) is None


def test_calibration_error_and_brier_score() -> None:
    """Two leads of ln 3 (confidence 0.75), one right and one wrong; one of ln 9 (0.9), right."""
    leads = np.log(np.array([3.0, 1 / 3, 9.0]))
    bins = metrics.reliability(leads)
    assert [each.count for each in bins] in (
        [0, 0, 0, 0, 0, 2, 0, 0, 1, 0],
        [0, 0, 0, 0, 2, 0, 0, 0, 1, 0],
    )
    assert metrics.calibration_error(bins) == pytest.approx((2 * 0.25 + 0.1) / 3)
    assert metrics.brier_score(leads) == pytest.approx((0.25**2 + 0.75**2 + 0.1**2) / 3)


def test_a_temperature_divides_the_lead() -> None:
    assert metrics.probabilities(np.array([math.log(9.0)]), temperature=2.0) == pytest.approx(
        [0.75]
    )
    assert metrics.probabilities(np.array([-1e4, 1e4])) == pytest.approx([0.0, 1.0])


def test_the_ties_subset_follows_its_formula() -> None:
    ref = {"a": ([3.0], [1.0]), "b": ([1.0], [2.0])}
    tied = {
        "a": ([4.0, 3.5], [1.5, 0.0]),  # gap 2, spread 0.5
        "b": ([4.0, 2.0], [1.0]),  # gap 1, spread 2
    }
    found = tie_subset(ref, tied)
    excess = (math.tanh(2 / 0.5 - 1) + math.tanh(-1 / 2 - 1)) / 2
    assert (found.accuracy_tied, found.accuracy_ref) == (1.0, 0.5)
    assert (found.gap_over_spread, found.both_gaps_over_spread) == (0.5, 0.5)
    assert found.mean_excess == pytest.approx(excess)
    assert found.score == pytest.approx(0.3 + 0.15 + 0.1 + 0.1 + 0.01 * excess)


def test_answers_without_any_spread_have_the_sign_of_their_gap() -> None:
    same = {"a": ([1.0, 1.0], [0.0])}
    assert tie_subset(same, same).mean_excess == 1.0
