"""Advantages: group-relative, in float64, silent where there is nothing to learn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halteres.errors import InvalidData
from halteres.training.advantages import group_mean, group_relative, group_std, is_degenerate


def test_a_group_is_centred_on_its_mean() -> None:
    assert group_mean(np.array([0.0, 1.0, 1.0, 0.0])).tolist() == [-0.5, 0.5, 0.5, -0.5]


def test_dividing_by_the_deviation_gives_mean_zero_and_deviation_one() -> None:
    advantages = group_std(np.array([0.0, 0.0, 0.0, 1.0]))
    assert advantages.mean() == pytest.approx(0.0, abs=1e-15)
    assert advantages.std(ddof=1) == pytest.approx(1.0)
    assert advantages.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5])


@pytest.mark.parametrize("score", [0.0, 1.0, -0.1, 0.7, 0.81, 1e-9, 1e6 + 0.1])
@pytest.mark.parametrize("baseline", ["group_std", "group_mean"])
def test_equal_scores_move_nothing_and_nothing_divides_by_zero(score: float, baseline: str) -> None:
    """The seed's script divides rounding noise by rounding noise here (environments.md 2.2 A)."""
    with np.errstate(all="raise"):
        (advantages,) = group_relative([[score] * 16], baseline)  # type: ignore[arg-type]
    assert advantages.tolist() == [0.0] * 16


def test_scores_that_are_equal_in_float32_only_up_to_rounding_move_nothing() -> None:
    scores = np.full(16, -0.1, dtype=np.float32).astype(np.float64)
    scores[3] = np.nextafter(np.float32(-0.1), np.float32(0))
    assert is_degenerate(scores)
    assert not group_std(scores).any()


def test_a_group_of_one_moves_nothing() -> None:
    """One score has no deviation; the script makes NaN of it (environments.md 2.2 C)."""
    assert [advantage.tolist() for advantage in group_relative([[0.5], []], "group_std")] == [[0.0], []]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    with pytest.raises(InvalidData, match=r"Sequence 2 of group 1 has the score (nan|-?inf)\."):
        group_relative([[0.0, 1.0], [0.0, 1.0, bad]], "group_std")


def test_groups_do_not_touch_each_other() -> None:
    alone = group_relative([[0.0, 1.0, 5.0]], "group_std")[0]
    beside = group_relative([[100.0, 0.0], [0.0, 1.0, 5.0]], "group_std")[1]
    assert alone.tolist() == beside.tolist()
