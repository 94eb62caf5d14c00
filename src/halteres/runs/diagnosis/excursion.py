"""What several rules need: telling once what lasts, the trend of a series, the scale of the rewards.

Owns: the nouns `Finding`, `Excursion`, `Rewards`.
Never: knows a metric's threshold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from halteres.next_step import Remedy
from halteres.observe.metrics import Row

CEILING = 0.9
"""From this share of the scale up, rewards are at their ceiling: little is left to learn, and nothing to alarm."""

SMOOTH, LEAST_LEARNT = 3, 0.05
"""Steps whose mean is a reward to go by; the share of the scale from which on it can be lost."""

HUGE = 1e100


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule has to say."""

    evidence: str  # a sentence with the figures
    remedy: Remedy


class Rule(Protocol):
    """Watches one thing that can go wrong."""

    @property
    def name(self) -> str:
        """As alerts call it."""
        ...

    def observe(self, row: Row) -> Finding | None:
        """Take in one row of metrics.jsonl, in the order of writing; rows that are none of its business pass by."""
        ...


class Excursion:
    """A condition is told once it has held so many times in a row, and again only after it was clearly over as often.

    Args:
        lasting: times in a row before it is told.
        calm: times in a row that it must be clearly over before it may be told again; default: as many.
    """

    def __init__(self, lasting: int, calm: int | None = None) -> None:
        self._lasting, self._calm = lasting, calm or lasting
        self._held = self._over = 0
        self._told = False

    def begins(self, holds: bool, over: bool | None = None) -> bool:
        """One more look. `over`: whether it is clearly over, where that is more than that it does not hold."""
        self._held = self._held + 1 if holds else 0
        self._over = self._over + 1 if (not holds if over is None else over) else 0
        if self._over >= self._calm:
            self._told = False
        if self._held < self._lasting or self._told:
            return False
        self._told = True
        return True


class Rewards:
    """The scale of the rewards as far as it was seen, and where on it the run is."""

    def __init__(self) -> None:
        self.lowest, self.highest = math.inf, -math.inf  # score of any rollout
        self._last: deque[float] = deque(maxlen=SMOOTH)
        self.best = -math.inf  # mean of SMOOTH steps

    def see(self, row: Row) -> None:
        """Take in a trainer's row; without the extremes (an older run's) the mean stands for them."""
        if (mean := number(row, "reward/mean")) is not None:
            self.lowest = min(self.lowest, _or(number(row, "reward/min"), mean))
            self.highest = max(self.highest, _or(number(row, "reward/max"), mean))
            self._last.append(mean)
            if len(self._last) == SMOOTH:
                self.best = max(self.best, fmean(self._last))

    @property
    def span(self) -> float:
        """Highest score less lowest."""
        return max(0.0, self.highest - self.lowest)

    @property
    def collapsed(self) -> bool:
        """Whether more than half of what the policy once scored is lost: it was spoilt, and its other ails follow."""
        had = self.best - self.lowest
        return had > LEAST_LEARNT * self.span and fmean(self._last) < self.best - had / 2

    def at_ceiling(self, mean: float) -> bool:
        """Whether a mean reward is as good as the best answers; where no answer ever scored above 0, none is good."""
        return self.highest > 0 and mean >= self.lowest + CEILING * self.span


def number(row: Row, name: str) -> float | None:
    """A figure of a row, where it has one that can be reckoned with: its square must be a number too."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < HUGE else None


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Rise of the line of least squares from the first to the last value, and that rise in its standard errors.

    >>> trend([0.0, 1.0, 2.0])
    (2.0, inf)
    """
    count = len(values)
    centre, mean = (count - 1) / 2, math.fsum(values) / count
    spread = math.fsum((i - centre) ** 2 for i in range(count))
    slope = math.fsum((i - centre) * (value - mean) for i, value in enumerate(values)) / spread
    left = math.fsum((value - mean - slope * (i - centre)) ** 2 for i, value in enumerate(values))
    error = math.sqrt(left / max(1, count - 2) / spread)
    rise = slope * (count - 1)
    return rise, slope / error if error > 1e-12 else math.copysign(math.inf, slope) if slope else 0.0


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
