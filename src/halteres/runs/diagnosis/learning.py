"""Rules of what is learnt: no variance, no rise, entropy.

Owns: their thresholds.
Never: speaks where rewards are at their ceiling, save to say that nothing is left to learn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from halteres.next_step import Remedy
from halteres.observe.metrics import Row
from halteres.runs.diagnosis.case import Case
from halteres.runs.diagnosis.excursion import Excursion, Finding, Rewards, number, trend


class NoVariance:
    """Nearly all groups have equal scores, step after step: there is no gradient.

    SILENT of all groups, so that one lucky group of many does not hide it; at the ceiling of arithmetic .69 to 1.00 of
    the groups are silent, never more than .94 for STEPS in a row before all answers are right.
    """

    name = "no_reward_variance"
    SILENT, VARIED, STEPS = 0.95, 0.8, 5

    def __init__(self, case: Case, rewards: Rewards) -> None:
        self._case, self._rewards = case, rewards
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        silent, mean = number(row, "groups/without_signal"), number(row, "reward/mean")
        if silent is None or mean is None:
            return None
        if not self._excursion.begins(silent >= self.SILENT, over=silent < self.VARIED):
            return None
        return self._solved(mean) if self._rewards.at_ceiling(mean) else self._stuck(silent, mean)

    def _solved(self, mean: float) -> Finding:
        return Finding(
            evidence=f"Rewards are at their ceiling ({mean:.3g} of {self._rewards.highest:.3g}): all answers of nearly "
            f"every group were equally good in {self.STEPS} steps in a row. Nothing is left to learn.",
            remedy=Remedy((self._case.stop("after_step"), self._case.results()), "only harder tasks would teach more."),
        )

    def _stuck(self, silent: float, mean: float) -> Finding:
        return Finding(
            evidence=f"In {self.STEPS} steps in a row at least {self.SILENT:.0%} of the groups had equal scores "
            f"(now {silent:.0%}, mean reward {mean:.3g}): nothing is learnt from them.",
            remedy=self._remedy(silent, mean),
        )

    def _remedy(self, silent: float, mean: float) -> Remedy:
        if self._rewards.collapsed:
            return self._case.spoilt(self._rewards.best)
        return self._case.unscored() if silent >= 1.0 and mean <= self._rewards.lowest else self._larger()

    def _larger(self) -> Remedy:
        words = "or make the tasks easier. How near the best answers are:"
        return Remedy(self._case.go_on_with(self._case.larger_groups()), words, (self._case.rollouts("best"),))


@dataclass(frozen=True, slots=True)
class _Line:
    """The line of least squares through the mean rewards of some steps."""

    steps: int
    middle: float
    rise: float  # from its first to its last step
    errors: float  # the rise in its standard errors

    @classmethod
    def through(cls, means: Sequence[float]) -> _Line:
        return cls(len(means), fmean(means), *trend(means))

    @property
    def highest_rise(self) -> float:
        """Two standard errors more than was seen."""
        return self.rise + 2 * (self.rise / self.errors if self.errors else 0.0)

    def __str__(self) -> str:
        first, last = self.middle - self.rise / 2, self.middle + self.rise / 2
        return f"Over {self.steps} steps the mean reward went from {first:.3g} to {last:.3g}"


class NotRising:
    """Rewards surely do not rise, or fall, below their ceiling.

    Flat: the line through the last STEPS to MOST steps rises by less than SMALL of what the scale has left, even with
    two standard errors more, and not for certain. Where rewards scatter too much for that, nothing is told.
    Falling: the line through FALLING steps falls by FALL of the scale, and by three standard errors.

    Of runs that rise by .004 a step at most 1 % are told, of flat ones with 256 rollouts a step all, after 34 steps
    (median; tasks of equal difficulty): benchmarks/alerts.py.
    """

    name = "reward_flat"
    STEPS, MOST, SMALL, LASTING = 30, 40, 0.1, 5
    FALLING, FALL = 20, 0.05

    def __init__(self, case: Case, rewards: Rewards) -> None:
        self._case, self._rewards = case, rewards
        self._means: deque[float] = deque(maxlen=self.MOST)
        self._excursion = Excursion(self.LASTING, calm=self.FALLING)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        mean = number(row, "reward/mean")
        if mean is None:
            return None
        self._means.append(mean)
        if len(self._means) < self.FALLING:
            return None
        line, newest = _Line.through(self._means), _Line.through(list(self._means)[-self.FALLING :])
        falls = newest.rise < -self.FALL * self._rewards.span and newest.errors < -3
        without_variance = (number(row, "groups/without_signal") or 0.0) >= NoVariance.SILENT  # that rule's to tell
        holds = (falls or self._is_flat(line)) and not without_variance
        if not self._excursion.begins(holds and not self._rewards.at_ceiling(newest.middle)):
            return None
        return self._falls(newest) if falls else self._stays(line)

    def _is_flat(self, line: _Line) -> bool:
        left = self._rewards.highest - line.middle
        return line.steps >= self.STEPS and line.highest_rise < self.SMALL * left and line.errors < 2

    def _stays(self, line: _Line) -> Finding:
        return Finding(
            evidence=f"{line}, and is not at its ceiling ({self._rewards.highest:.3g}).",
            remedy=Remedy(
                (self._case.rollouts("worst"),),
                "if those are honest tries at the task:",
                self._case.go_on_with(self._case.faster()),
            ),
        )

    def _falls(self, line: _Line) -> Finding:
        slower = Remedy(self._case.go_on_with(self._case.slower()), "a smaller learning rate.")
        remedy = self._case.spoilt(self._rewards.best) if self._rewards.collapsed else slower
        return Finding(evidence=f"{line}: it falls.", remedy=remedy)


class EntropyCollapse:
    """The policy answers the same again and again, though its rewards are not at their ceiling.

    Below LOW of the median of the first three steps. Arithmetic goes from .15 nats per token to .001 to .009, which is
    1 to 6 % of it, as it ought to: rewards are at their ceiling by then. At .87 of the scale it has 29 %, at .91 17 %.
    """

    name = "entropy_collapse"
    LOW, BACK, FIRST, STEPS = 0.1, 0.2, 3, 5

    def __init__(self, case: Case, rewards: Rewards) -> None:
        self._case, self._rewards = case, rewards
        self._first: list[float] = []
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        entropy, mean = number(row, "policy/entropy"), number(row, "reward/mean")
        if entropy is None or mean is None:
            return None
        if len(self._first) < self.FIRST:
            self._first.append(entropy)
            return None
        before = median(self._first)
        low = entropy < self.LOW * before and not self._rewards.at_ceiling(mean)
        if not self._excursion.begins(low, over=entropy > self.BACK * before):
            return None
        changes = {**self._case.slower(), **self._case.larger_groups()}
        return Finding(
            evidence=f"The policy's entropy is {entropy:.2g} nats per token, {entropy / before:.0%} of what it began "
            f"with ({before:.2g}), at a mean reward of {mean:.3g}: it explores no more.",
            remedy=Remedy((self._case.stop(), self._case.begin_anew(changes)), "lost entropy does not come back."),
        )
