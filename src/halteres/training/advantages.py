"""Advantages: how much better than its baseline a turn was.

Every estimator leaves masked episodes out of its baselines and gives their turns 0; and where all
that it compares is equal but for rounding, its advantages are 0: such a batch moves nothing. K
turns of E episodes; R: returns.

| estimator | advantage of a turn | source |
|---|---|---|
| group_std | episode's score minus its group's mean, over its deviation | GRPO, arXiv 2402.03300 |
| group_mean | the same, not divided | Dr. GRPO, arXiv 2503.20783, with `weighting: token` |
| rloo | episode's score minus the mean of the group's others | RLOO, arXiv 2402.14740 |
| reinforce | R: no baseline | Williams 1992 |
| rebn | R minus the mean R of all turns, over their standard deviation | GEM, arXiv 2510.01051 |
| rebn_per_environment | the same within each environment | |
| rebn_leave_one_out | R minus the mean R of other episodes' turns, over the deviation of all | |
| turn_mean | R minus the mean R of the group's turns of the same number | |

Where the policy decides how long an episode is, `rebn` and `turn_mean` are biased: an episode's own
turns are in its baseline, as many as it chose to make. `rebn_leave_one_out`, `reinforce` and the
estimators of whole episodes are not (but for scale): `tests/training/test_estimator_bias.py` counts
all episodes of a small task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

import numpy as np

from halteres.config.settings import Estimator
from halteres.training.turns import BoolArray, FloatArray, IntArray, Turns, returns

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

DEGENERATE = 1e-6
"""Values whose standard deviation is below this (relative to max(1, |mean|)) hold rounding noise,
not signal.
"""


def estimate(turns: Turns, estimator: Estimator, discount: float = 1.0) -> FloatArray:
    """The advantage of every turn, shape (K,), no unit where it is divided by a standard deviation.

    Args:
        turns: of one batch.
        estimator: see the table above.
        discount: what a reward one turn later is worth now; 1: as much. Estimators of whole
            episodes' scores have none.
    """
    return np.where(turns.masked_K, 0.0, _ESTIMATORS[estimator](turns, discount))


def is_degenerate(values: FloatArray) -> bool:
    """True where values teach nothing: fewer than two, or all equal but for rounding."""
    if values.size < 2:
        return True
    return float(values.std(ddof=1)) < DEGENERATE * max(1.0, abs(float(values.mean())))


def centred(values: FloatArray) -> FloatArray:
    """Values minus their mean; zeros where all are equal.

    >>> centred(np.array([0.0, 1.0]))
    array([-0.5,  0.5])
    """
    return np.zeros_like(values) if is_degenerate(values) else values - values.mean()


def standardised(values: FloatArray) -> FloatArray:
    """Values minus their mean, over their standard deviation (ddof=1); zeros where all are equal.

    GRPO and GEM add 1e-4 and 1e-9 to the divisor. Equal values that float32 cannot represent then
    train on rounding noise, with advantages near 1; here they move nothing, so that no such
    constant is needed.

    >>> standardised(np.array([0.0, 1.0, 2.0]))
    array([-1.,  0.,  1.])
    """
    return (
        np.zeros_like(values)
        if is_degenerate(values)
        else (values - values.mean()) / values.std(ddof=1)
    )


def leave_one_out(values: FloatArray) -> FloatArray:
    """Values minus the mean of all others: n / (n - 1) times the centred ones."""
    return centred(values) * (values.size / max(1, values.size - 1))


def _of_scores(rule: Callable[[FloatArray], FloatArray]) -> Callable[[Turns, float], FloatArray]:
    """A rule for the scores of a group's episodes; every turn of an episode gets the episode's
    advantage.
    """

    def estimator(turns: Turns, discount: float) -> FloatArray:
        return _per_group(turns.scores_E, turns.group_E, ~turns.masked_E, rule)[turns.episode_K]

    return estimator


def _rebn(turns: Turns, discount: float) -> FloatArray:
    return _per_group(
        returns(turns, discount), np.zeros_like(turns.episode_K), ~turns.masked_K, standardised
    )


def _rebn_per_environment(turns: Turns, discount: float) -> FloatArray:
    environment_K = turns.environment_E[turns.episode_K]
    return _per_group(returns(turns, discount), environment_K, ~turns.masked_K, standardised)


def _rebn_leave_one_out(turns: Turns, discount: float) -> FloatArray:
    returns_K, used_K = returns(turns, discount), ~turns.masked_K
    used = returns_K[used_K]
    if is_degenerate(used):
        return np.zeros_like(returns_K)
    sum_E = np.bincount(turns.episode_K, np.where(used_K, returns_K, 0.0), turns.num_episodes)
    num_E = np.bincount(turns.episode_K, used_K, turns.num_episodes)
    others_E = len(used) - num_E
    baseline_E = (used.sum() - sum_E) / np.maximum(1, others_E)
    # An episode without others has nothing to be compared with.
    advantages_E = np.where(others_E > 0, 1.0, 0.0)
    return (
        (returns_K - baseline_E[turns.episode_K]) * advantages_E[turns.episode_K] / used.std(ddof=1)
    )


def _turn_mean(turns: Turns, discount: float) -> FloatArray:
    first_K = np.flatnonzero(np.diff(turns.episode_K, prepend=-1))
    turn_K = np.arange(len(turns.episode_K)) - np.repeat(
        first_K, np.diff(first_K, append=len(turns.episode_K))
    )
    longest = int(turn_K.max(initial=0)) + 1
    cell_K = turns.group_E[turns.episode_K] * longest + turn_K
    return _per_group(returns(turns, discount), cell_K, ~turns.masked_K, centred)


def _per_group(
    values: FloatArray, part: IntArray, used: BoolArray, rule: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """The rule applied to each part's used values on their own; 0 for the others."""
    result = np.zeros_like(values)
    for one in np.unique(part[used]):
        chosen = used & (part == one)
        result[chosen] = rule(values[chosen])
    return result


_ESTIMATORS: Mapping[Estimator, Callable[[Turns, float], FloatArray]] = {
    "group_std": _of_scores(standardised),
    "group_mean": _of_scores(centred),
    "rloo": _of_scores(leave_one_out),
    "reinforce": returns,
    "rebn": _rebn,
    "rebn_per_environment": _rebn_per_environment,
    "rebn_leave_one_out": _rebn_leave_one_out,
    "turn_mean": _turn_mean,
}
