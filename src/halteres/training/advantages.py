"""Advantages: how much better than its group an answer was.

Owns: the group-relative baselines, in float64.
Never: sees tokens; lets a number that is not finite through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from halteres.errors import InvalidData

FloatArray = NDArray[np.float64]
Baseline = Literal["group_std", "group_mean"]

DEGENERATE = 1e-6
"""A group whose standard deviation is below this (relative to max(1, |mean|)) holds rounding noise, not signal."""


def group_relative(groups: Sequence[Sequence[float]], baseline: Baseline) -> tuple[FloatArray, ...]:
    """The advantages of every group of a batch.

    Args:
        groups: the scores of each group, reward units.
        baseline: "group_mean" centres, "group_std" divides by the standard deviation besides.

    Raises:
        InvalidData: a score is NaN or infinite; the message names group and sequence.
    """
    rule = _BASELINES[baseline]
    return tuple(rule(_finite(scores, index)) for index, scores in enumerate(groups))


def group_mean(scores_G: FloatArray) -> FloatArray:
    """Scores minus their mean; zeros where all are equal.

    >>> group_mean(np.array([0.0, 1.0]))
    array([-0.5,  0.5])
    """
    if is_degenerate(scores_G):
        return np.zeros_like(scores_G)
    return scores_G - scores_G.mean()


def group_std(scores_G: FloatArray) -> FloatArray:
    """Scores minus their mean, over their standard deviation (ddof=1); zeros where all are equal.

    Source: GRPO (arXiv 2402.03300), which adds 1e-4 to the divisor. A group of equal scores that float32 cannot
    represent then trains on rounding noise; here it moves nothing, so that no such constant is needed.
    """
    if is_degenerate(scores_G):
        return np.zeros_like(scores_G)
    return (scores_G - scores_G.mean()) / scores_G.std(ddof=1)


def is_degenerate(scores_G: FloatArray) -> bool:
    """True where a group teaches nothing: fewer than two scores, or all equal but for rounding."""
    if scores_G.size < 2:
        return True
    return float(scores_G.std(ddof=1)) < DEGENERATE * max(1.0, abs(float(scores_G.mean())))


_BASELINES: dict[Baseline, Callable[[FloatArray], FloatArray]] = {"group_std": group_std, "group_mean": group_mean}


def _finite(scores: Sequence[float], group: int) -> FloatArray:
    scores_G = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(scores_G).all():
        sequence = int(np.flatnonzero(~np.isfinite(scores_G))[0])
        raise InvalidData(
            f"Sequence {sequence} of group {group} has the score {scores_G[sequence]}.",
            "An advantage made of it would spoil the weights.",
            "Make the environment's scorer return finite numbers, then resume from the last checkpoint.",
        )
    return scores_G
