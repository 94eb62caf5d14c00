"""The statistics against other people's, and against chance."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from halteres.runs.reading.evaluations import Pair, paired, unpaired


def pairs_of(before: list[float], after: list[float]) -> list[Pair]:
    return [Pair(before=first, after=second) for first, second in zip(before, after, strict=True)]


def test_of_answers_that_are_right_or_wrong_it_is_the_interval_of_bonett_and_price() -> None:
    """n = 50: 10 gained, 3 lost, 25 right in both, 12 in neither."""
    before = [0.0] * 10 + [1.0] * 3 + [1.0] * 25 + [0.0] * 12
    after = [1.0] * 10 + [0.0] * 3 + [1.0] * 25 + [0.0] * 12
    found = paired(pairs_of(before, after), 1.0)
    gained, lost = 11 / 52, 4 / 52
    margin = 1.959964 * math.sqrt((gained + lost - (gained - lost) ** 2) / 52)
    assert found.delta == pytest.approx(7 / 50)
    assert found.interval == pytest.approx(
        (gained - lost - margin, gained - lost + margin), abs=1e-6
    )
    assert (found.num_tasks, found.method, found.certain) == (50, "paired", False)


Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def learnt(random: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    return random.beta(1, 2, num), random.beta(20, 0.6, num)


def hardly_changed(random: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    return random.beta(0.1, 9.9, num), random.beta(0.1, 4.9, num)


def alike(random: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    chances = random.beta(1, 2, num)
    return chances, chances


@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        pytest.param(learnt, 20 / 20.6 - 1 / 3, id="learnt"),
        pytest.param(hardly_changed, 0.01, id="hardly changed"),
        pytest.param(alike, 0.0, id="alike"),
    ],
)
@pytest.mark.parametrize(("num", "samples"), [(8, 1), (32, 1), (32, 4), (128, 4)])
def test_the_interval_covers_the_truth_as_often_as_it_says(
    draw: Draw, truth: float, num: int, samples: int
) -> None:
    random, trials = np.random.default_rng(1), 600
    covered = 0
    for _ in range(trials):
        before, after = (
            random.binomial(samples, chances) / samples for chances in draw(random, num)
        )
        low, high = paired(pairs_of(list(before), list(after)), 1.0).interval or (0, 0)
        covered += low <= truth <= high
    assert covered / trials >= 0.93, "95 %, less what 600 trials may be off"


def test_repeated_tasks_are_one_observation_of_more_weight() -> None:
    random = np.random.default_rng(2)
    differences = random.normal(0.2, 0.3, 40)
    once = [Pair(before=0.0, after=float(value), weight=3.0) for value in differences]
    thrice = [Pair(before=0.0, after=float(value)) for value in differences for _ in range(3)]
    heavy, many = paired(once, 1.0), paired(thrice, 1.0)
    assert heavy.delta == pytest.approx(many.delta) == pytest.approx(differences.mean())
    assert heavy.interval and many.interval
    assert heavy.interval[1] - heavy.interval[0] > 1.5 * (many.interval[1] - many.interval[0])
    assert heavy.num_tasks == many.num_tasks == 120


def test_tasks_that_all_came_out_alike_are_no_certainty() -> None:
    found = paired(pairs_of([0.0] * 16, [0.0] * 16), 1.0)
    assert found.interval and found.interval[0] < -0.1 and found.interval[1] > 0.1
    assert not found.certain


def test_no_interval_reaches_beyond_what_is_possible() -> None:
    found = paired(pairs_of([0.0] * 16, [1.0] * 16), 1.0)
    assert found.interval and found.interval[1] == 1.0
    assert found.certain


def test_pairing_finds_what_separate_means_do_not() -> None:
    """Tasks differ much more from each other than each from itself."""
    random = np.random.default_rng(3)
    before = random.uniform(0, 0.8, 64)
    after = before + random.normal(0.06, 0.05, 64)
    together = paired(pairs_of(list(before), list(after)), 1.0)
    means = [(float(values.mean()), float(values.std(ddof=1) / 8)) for values in (before, after)]
    apart = unpaired(means[0], means[1])
    assert together.certain and not apart.certain
    assert together.delta == pytest.approx(apart.delta)


def test_standard_errors_of_separate_means_add_in_squares() -> None:
    found = unpaired((0.3, 0.03), (0.5, 0.04))
    assert found.interval == pytest.approx((0.2 - 1.959964 * 0.05, 0.2 + 1.959964 * 0.05))
    assert (found.method, found.certain, found.num_tasks) == ("unpaired", True, None)


def test_without_errors_there_is_no_interval() -> None:
    found = unpaired((0.3, 0.0), (0.5, 0.0))
    assert found.facts == {
        "delta": 0.2,
        "ci95": None,
        "num_tasks": None,
        "certain": False,
        "method": "none",
    }


def test_a_higher_confidence_is_a_wider_interval() -> None:
    pairs = pairs_of([0.1, 0.2, 0.9, 0.4], [0.4, 0.1, 0.9, 0.8])
    wide, narrow = (paired(pairs, 1.0, confidence).interval or (0, 0) for confidence in (0.99, 0.9))
    assert wide[0] < narrow[0] and wide[1] > narrow[1]
