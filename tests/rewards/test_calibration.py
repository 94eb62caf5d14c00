"""Calibration: raw scores become probabilities and standard units, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from halteres.errors import InvalidData
from halteres.rewards.evaluation import Scored, calibration_of
from halteres.rewards.metrics import fit_calibration
from halteres.rewards.model_folder import Calibration
from halteres.rewards.preferences import Comparison
from halteres.scores import Output, Score


def scores(temperature: float, count: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Pairs whose better side is drawn with probability s(difference / temperature)."""
    rng = np.random.default_rng(3)
    first, second = rng.normal(2.0, 3.0, (2, count))
    wins = rng.random(count) < 1 / (1 + np.exp(-(first - second) / temperature))
    return np.where(wins, first, second), np.where(wins, second, first)


def test_the_temperature_that_made_the_pairs_is_found() -> None:
    chosen, rejected = scores(temperature=2.5)
    found = fit_calibration(chosen, rejected)
    assert found.temperature == pytest.approx(2.5, rel=0.05)
    assert found.calibration_error[1] < 0.02 < found.calibration_error[0]
    assert found.brier_score[1] < found.brier_score[0]
    assert found.num_pairs == 20_000 and not found.warnings


def test_offset_and_scale_are_those_of_the_scores() -> None:
    chosen, rejected = np.array([1.0, 3.0] * 5), np.zeros(10)
    by_chosen, by_both = (
        fit_calibration(chosen, rejected, offset_from=side) for side in ("chosen", "both")
    )
    assert (by_chosen.offset, by_both.offset) == (2.0, 1.0)
    assert by_both.scale == pytest.approx(np.std([1, 3, 0, 0]))
    assert by_both.quantiles["0.5"] == 0.5


@pytest.mark.parametrize(
    ("output", "value"),
    [("raw", 3.0), ("standardised", 0.5), ("probability", 1 / (1 + np.exp(-1)))],
)
def test_a_score_is_given_in_three_units(output: Output, value: float) -> None:
    assert Calibration(temperature=2.0, offset=1.0, scale=4.0).apply(3.0, output) == pytest.approx(
        value
    )


@pytest.mark.parametrize(
    ("raw", "covered"), [(-0.1, False), (0.0, True), (3.0, True), (3.1, False)]
)
def test_scores_beyond_those_of_the_pairs_are_not_covered(raw: float, covered: bool) -> None:
    found = fit_calibration(np.array([1.0, 3.0] * 5), np.zeros(10))
    assert found.covers(raw) == covered
    assert Calibration().covers(raw), "without extremes on record nothing is beyond them"


def test_few_pairs_and_pairs_that_tell_nothing_are_warned_of() -> None:
    chosen, rejected = scores(1.0, 100)
    (few,) = fit_calibration(chosen, rejected).warnings
    assert few.startswith("100 pairs are few")
    easy = fit_calibration(np.full(300, 2.0), np.zeros(300))
    assert "Every pair is right" in easy.warnings[0] and easy.temperature > 0
    wrong = fit_calibration(np.zeros(300), np.full(300, 2.0))
    assert "no lower" in wrong.warnings[0] and wrong.apply(2.0, "probability") == pytest.approx(
        0.5, abs=0.01
    )


def scored(
    objective: str | None, leads: tuple[float, float], sides: tuple[float, float] = (0.0, 0.0)
) -> Scored:
    """A pair whose sum leads by the first number, and whose own objective by the second."""
    comparison = Comparison(completions=("a", "b"), ranks=(0, 1), objective=objective)
    parts = [{objective: side} for side in (leads[1], 0.0)] if objective else [{}, {}]
    values = (sides[0] + leads[0], sides[1])
    return Scored(
        comparison=comparison,
        scores=tuple(
            Score(value=value, parts=own) for value, own in zip(values, parts, strict=True)
        ),
    )


def test_pairs_that_judge_one_objective_do_not_tell_how_sure_the_sum_is() -> None:
    """The sum leads the wrong way in every row of an objective, which leads rightly itself."""
    judged = [scored("safe", (-1.0, lead)) for lead in (2.0, 1.0, 2.0, -0.5) * 5]
    whole = [scored(None, (lead, 0.0)) for lead in (1.0, 1.0, 1.0, -0.5) * 5]
    own = calibration_of(judged)
    assert own.temperature < 5 and own.quantiles["0.0"] == -1.0, (
        "leads of the objective, range of the sum"
    )
    both = calibration_of([*judged, *whole])
    assert both == calibration_of(whole) and both.num_pairs == 20


def test_too_few_pairs_make_no_calibration() -> None:
    chosen, rejected = scores(1.0, 9)
    with pytest.raises(InvalidData, match=r"Too few ranked pairs .*: 9\. It takes 10 at least"):
        fit_calibration(chosen, rejected)


def test_equal_scores_and_another_template_are_refused() -> None:
    with pytest.raises(InvalidData, match="All 20 scores are equal"):
        fit_calibration(np.ones(10), np.ones(10))
    made = Calibration(template_digest="a" * 64)
    made.check_template("a" * 64)
    with pytest.raises(InvalidData, match="another scoring template"):
        made.check_template("b" * 64)


def test_a_calibration_survives_its_file() -> None:
    chosen, rejected = scores(1.0, 300)
    made = fit_calibration(chosen, rejected)
    assert Calibration.model_validate_json(made.model_dump_json()) == made
