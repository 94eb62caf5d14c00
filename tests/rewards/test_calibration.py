"""Calibration: raw scores become probabilities and standard units, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from halteres.errors import InvalidData
from halteres.rewards.calibration import Calibration, fit_calibration
from halteres.scores import Output


def scores(temperature: float, count: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Pairs whose better side is drawn with probability s(difference / temperature)."""
    rng = np.random.default_rng(3)
    first, second = rng.normal(2.0, 3.0, (2, count))
    wins = rng.random(count) < 1 / (1 + np.exp(-(first - second) / temperature))
    return np.where(wins, first, second), np.where(wins, second, first)


def test_the_temperature_that_made_the_pairs_is_found() -> None:
    chosen, rejected = scores(temperature=2.5)
    found = fit_calibration(chosen, rejected, data_digest="d")
    assert found.temperature == pytest.approx(2.5, rel=0.05)
    assert found.calibration_error[1] < 0.02 < found.calibration_error[0]
    assert found.brier_score[1] < found.brier_score[0]
    assert found.num_pairs == 20_000 and not found.warnings


def test_offset_and_scale_are_those_of_the_scores() -> None:
    chosen, rejected = np.array([1.0, 3.0]), np.array([0.0, 0.0])
    by_chosen, by_both = (
        fit_calibration(chosen, rejected, data_digest="d", offset_from=side) for side in ("chosen", "both")
    )
    assert (by_chosen.offset, by_both.offset) == (2.0, 1.0)
    assert by_both.scale == pytest.approx(np.std([1, 3, 0, 0]))
    assert by_both.quantiles["0.5"] == 0.5


@pytest.mark.parametrize(
    ("output", "value"), [("raw", 3.0), ("standardised", 0.5), ("probability", 1 / (1 + np.exp(-1)))]
)
def test_a_score_is_given_in_three_units(output: Output, value: float) -> None:
    assert Calibration(temperature=2.0, offset=1.0, scale=4.0).apply(3.0, output) == pytest.approx(value)


@pytest.mark.parametrize(("raw", "covered"), [(-0.1, False), (0.0, True), (3.0, True), (3.1, False)])
def test_scores_beyond_those_of_the_pairs_are_not_covered(raw: float, covered: bool) -> None:
    found = fit_calibration(np.array([1.0, 3.0]), np.array([0.0, 0.0]), data_digest="d")
    assert found.covers(raw) == covered
    assert Calibration().covers(raw), "without extremes on record nothing is beyond them"


def test_few_pairs_and_pairs_that_tell_nothing_are_warned_of() -> None:
    chosen, rejected = scores(1.0, 100)
    (few,) = fit_calibration(chosen, rejected, data_digest="d").warnings
    assert few.startswith("100 pairs are few")
    easy = fit_calibration(np.full(300, 2.0), np.zeros(300), data_digest="d")
    assert "Every pair is right" in easy.warnings[0] and easy.temperature > 0
    wrong = fit_calibration(np.zeros(300), np.full(300, 2.0), data_digest="d")
    assert "no lower" in wrong.warnings[0] and wrong.apply(2.0, "probability") == pytest.approx(0.5, abs=0.01)


def test_equal_scores_and_another_template_are_refused() -> None:
    with pytest.raises(InvalidData, match="All 6 scores are equal"):
        fit_calibration(np.ones(3), np.ones(3), data_digest="d")
    made = Calibration(template_digest="a" * 64)
    made.check_template("a" * 64)
    with pytest.raises(InvalidData, match="another scoring template"):
        made.check_template("b" * 64)


def test_a_calibration_survives_its_file() -> None:
    chosen, rejected = scores(1.0, 300)
    made = fit_calibration(chosen, rejected, data_digest="d", template_digest="t")
    assert Calibration.model_validate_json(made.model_dump_json()) == made
