"""Which baselines are biased where the policy decides how long an episode is: every batch of a
small task is counted.

An episode stops at once, or goes on to a second turn and takes one of two actions there. Two
episodes make a batch; its expected gradient, summed over all nine batches by their probabilities,
is compared with the gradient of the expected return.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from halteres.config.settings import Estimator
from halteres.training.advantages import estimate
from halteres.training.turns import returns, turns_of

from .test_advantages import episodes

GO, LEFT = 0.6, 0.3  # probabilities of going on, and of the second turn's first action


@dataclass(frozen=True)
class Episode:
    probability: float
    rewards: tuple[float, ...]
    # per turn, the gradient of its action's log-probability by both logits
    scores: tuple[tuple[float, float], ...]


def task(stop: float, go: float, left: float, right: float) -> tuple[Episode, ...]:
    """All episodes, by what each action is paid."""
    went = (1 - GO, 0.0)
    return (
        Episode(1 - GO, (stop,), ((-GO, 0.0),)),
        Episode(GO * LEFT, (go, left), (went, (0.0, 1 - LEFT))),
        Episode(GO * (1 - LEFT), (go, right), (went, (0.0, -LEFT))),
    )


def true_gradient(all_episodes: tuple[Episode, ...]) -> np.ndarray:
    return sum(
        (e.probability * sum(e.rewards) * np.sum(e.scores, axis=0) for e in all_episodes),
        start=np.zeros(2),
    )


def expected_gradient(all_episodes: tuple[Episode, ...], estimator: Estimator) -> np.ndarray:
    """Per episode, over all batches of two. The division by a standard deviation is undone: it is
    no baseline.
    """
    total = np.zeros(2)
    for pair in product(all_episodes, repeat=2):
        turns = turns_of(episodes([list(episode.rewards) for episode in pair]))
        advantages_K = estimate(turns, estimator)
        if estimator.startswith("rebn"):
            advantages_K = advantages_K * returns(turns, 1.0).std(ddof=1)
        scores = [score for episode in pair for score in episode.scores]
        total += (
            np.prod([e.probability for e in pair])
            * (advantages_K[:, None] * np.array(scores)).sum(axis=0)
            / 2
        )
    return total


MIXED = task(stop=0.2, go=0.5, left=1.0, right=-0.4)
EQUAL = task(stop=0.0, go=1.0, left=-1.0, right=-1.0)  # whatever is done earns 0


@pytest.mark.parametrize(
    ("estimator", "scale"),
    [("reinforce", 1.0), ("rloo", 1.0), ("rebn_leave_one_out", 1.0), ("group_mean", 0.5)],
)
def test_without_ones_own_turns_in_it_a_baseline_does_not_bend_the_gradient(
    estimator: Estimator, scale: float
) -> None:
    """A group's mean holds the episode's own score: one of two, so that half of the gradient is
    left, in all turns.
    """
    assert expected_gradient(MIXED, estimator) == pytest.approx(
        scale * true_gradient(MIXED), abs=1e-12
    )


def test_the_mean_over_all_turns_rewards_length_where_there_is_nothing_to_learn() -> None:
    """Longer episodes pull the mean down by their own last turn, and so seem better than it."""
    assert true_gradient(EQUAL) == pytest.approx([0.0, 0.0], abs=1e-12)
    assert expected_gradient(EQUAL, "rebn")[0] > 0.05
    assert expected_gradient(EQUAL, "rebn_leave_one_out") == pytest.approx([0.0, 0.0], abs=1e-12)


def test_the_mean_over_turns_of_one_number_weighs_late_turns_less() -> None:
    """A turn that no other episode reached has nothing to be compared with."""
    kept = expected_gradient(MIXED, "turn_mean") / true_gradient(MIXED)
    assert kept == pytest.approx([0.5, 0.5 * GO], abs=1e-12)
