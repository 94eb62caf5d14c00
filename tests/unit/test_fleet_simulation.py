"""benchmarks/fleet_simulation.py: the same seed gives the same figures, and small cases are what a
person computes.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from fleet_simulation import (
    BASE_S,
    FEW,
    HOUR_S,
    MANY,
    ROW_S,
    Setting,
    SimulatedFleet,
    growing,
    simulated,
)

# one sampler, answers of 500 tokens, nothing by chance
PLAIN = Setting(
    samplers=1,
    staleness=0,
    batch=8,
    mean_tokens=500.0,
    spread=0.0,
    slow_share=0.0,
    hours_to_death=math.inf,
)
EIGHT_S = 500 * (BASE_S + 8 * ROW_S)  # that eight answers at a time take


def test_a_sampler_has_the_published_rates() -> None:
    for rows, rate in (FEW, MANY):
        token_s = BASE_S + rows * ROW_S
        assert rows / token_s == pytest.approx(rate)


def test_on_policy_a_step_is_sampling_training_and_publishing_one_after_the_other() -> None:
    found = SimulatedFleet(PLAIN).run()
    step_s = EIGHT_S + PLAIN.train_s + PLAIN.publish_s
    assert found.steps_per_hour == pytest.approx(HOUR_S / step_s)
    assert found.trainer_idle == pytest.approx(EIGHT_S / step_s)
    assert found.samplers_busy == pytest.approx(EIGHT_S / step_s)
    assert found.rows == pytest.approx(8 * EIGHT_S / step_s)
    assert found.too_old == 0.0


def test_with_staleness_what_is_shorter_is_hidden_by_the_other() -> None:
    """Sampling takes 3.6 s, training and publishing 11 s."""
    found = SimulatedFleet(replace(PLAIN, staleness=1)).run()
    assert found.steps_per_hour == pytest.approx(HOUR_S / (PLAIN.train_s + PLAIN.publish_s))
    assert found.trainer_idle == 0.0
    # two steps overlap: samplers wait for the trainer now
    slow = SimulatedFleet(replace(PLAIN, staleness=1, train_s=1.0, publish_s=0.0)).run()
    assert slow.steps_per_hour == pytest.approx(HOUR_S / EIGHT_S)
    assert slow.samplers_busy == pytest.approx(1.0)


def test_a_group_is_as_late_as_its_sampler_is_slow() -> None:
    slow = SimulatedFleet(replace(PLAIN, slow_share=1.0, slow_factor=3.0)).run()
    step_s = 3 * EIGHT_S + PLAIN.train_s + PLAIN.publish_s
    assert slow.steps_per_hour == pytest.approx(HOUR_S / step_s)


def test_answers_of_a_sampler_that_dies_are_sampled_again_by_another() -> None:
    """Every step's answers are under way when their sampler dies, and are there once all the same."""
    setting = replace(PLAIN, samplers=2, batch=16)
    fleet = SimulatedFleet(setting)
    fleet._ask()
    first, second = fleet.samplers
    busy = first if first._rows else second
    lost = len(busy._rows)
    fleet.clock.after(EIGHT_S / 2, lambda: fleet._dies(busy))
    fleet._run_to(2)
    assert lost >= 8
    assert fleet.deaths == 1
    assert fleet.state.num_accepted in (4, 6)  # two groups a batch; the third may have been drawn
    assert fleet.state.run.step >= 2


def test_the_same_seed_gives_the_same_figures_and_another_gives_others() -> None:
    setting = replace(growing(16, 2), steps=3, warm_up=1, hours_to_death=0.05)
    first = simulated(setting)
    assert first == simulated(setting)
    assert first["deaths"] > 0
    assert first != simulated(replace(setting, seed=1)) | {"seed": 0}


def test_a_longer_staleness_never_makes_the_trainer_wait_longer_here() -> None:
    idle = [
        SimulatedFleet(replace(growing(4, age), steps=4, environments=1)).run().trainer_idle
        for age in (0, 1, 2, 4)
    ]
    assert idle == sorted(idle, reverse=True)
    assert idle[0] > 0.5 > idle[-1]


def test_nothing_is_sampled_in_vain_with_one_environment() -> None:
    """It may have as many groups under way as the next batches lack; several together have more."""
    one = SimulatedFleet(replace(growing(16, 2), steps=3, environments=1)).run()
    several = SimulatedFleet(replace(growing(16, 2), steps=3, environments=8)).run()
    assert one.too_old == 0.0
    assert several.too_old > 0.0
