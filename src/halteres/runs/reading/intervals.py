"""Differences of means over tasks, with their confidence intervals.

Owns: the statistics.
Never: reads a file, knows what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One task, measured twice."""

    before: float
    after: float
    weight: float = 1.0  # how many held-out tasks were this one: generators repeat themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much higher the second mean is than the first."""

    delta: float
    interval: tuple[float, float] | None = None  # None: nothing is known about its size
    num_tasks: int | None = None  # a repeated one counts as often as it was asked; None: not known one by one
    method: Literal["paired", "unpaired", "none"] = "none"

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def facts(self) -> dict[str, Any]:
        """As answers and results.json have it; four decimals."""
        ci95 = [round(bound, 4) + 0.0 for bound in self.interval] if self.interval else None  # + 0: no -0.0
        facts = {"delta": round(self.delta, 4) + 0.0, "ci95": ci95, "num_tasks": self.num_tasks}
        return {**facts, "certain": self.certain, "method": self.method}


def paired(pairs: Sequence[Pair], spread: float, confidence: float = CONFIDENCE) -> Difference:
    """The mean difference over tasks that were measured twice.

    It speaks of these two sets of weights on all tasks like these: both the choice of tasks and the noise of sampling
    are in the interval. What another seed of training would have given is not.

    Args:
        pairs: at least one.
        spread: how far apart two measurements can be: 1 for shares.
        confidence: of the interval.

    Source: Bonett and Price (2012), the adjusted Wald interval for a difference of paired proportions: the interval
    of the plain mean after two more tasks, one that gained everything and one that lost everything. Here it is used
    for means over several samples as well, and repeated tasks count as one observation of that weight. A t interval
    fails where few tasks change, for then nearly all differences are 0; how often this one holds is simulated in
    `tests/runs/test_intervals.py`.
    """
    observed = [(pair.after - pair.before, pair.weight) for pair in pairs]
    num = math.fsum(weight for _, weight in observed)
    delta = math.fsum(weight * difference for difference, weight in observed) / num
    adjusted = [*observed, (spread, 1.0), (-spread, 1.0)]
    centre = math.fsum(weight * difference for difference, weight in adjusted) / (num + 2)
    squares = math.fsum((weight * (difference - centre)) ** 2 for difference, weight in adjusted)
    margin = _quantile(confidence) * math.sqrt(squares) / (num + 2)
    low, high = max(-spread, centre - margin), min(spread, centre + margin)
    return Difference(delta=delta, interval=(low, high), num_tasks=round(num), method="paired")


def unpaired(before: tuple[float, float], after: tuple[float, float], confidence: float = CONFIDENCE) -> Difference:
    """The difference of two (mean, standard error), as if they were of different tasks: wider than `paired`.

    Standard errors of 0 are those of a single task, or of tasks that all came out alike: then there is no interval.
    """
    delta, error = after[0] - before[0], math.hypot(before[1], after[1])
    if error == 0:
        return Difference(delta=delta)
    margin = _quantile(confidence) * error
    return Difference(delta=delta, interval=(delta - margin, delta + margin), method="unpaired")


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
