"""Rules of what is learnt: no variance, no rise, entropy, hacking.

Owns: their thresholds.
Never: speaks where rewards are at their ceiling, save to say that nothing is left to learn.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

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
            remedy=f"{self._case.stop('after_step')} then {self._case.results()}; only harder tasks would teach more.",
        )

    def _stuck(self, silent: float, mean: float) -> Finding:
        return Finding(
            evidence=f"In {self.STEPS} steps in a row at least {self.SILENT:.0%} of the groups had equal scores "
            f"(now {silent:.0%}, mean reward {mean:.3g}): nothing is learnt from them.",
            remedy=self._case.spoilt(self._rewards.best) if self._rewards.collapsed else self._larger(),
        )

    def _larger(self) -> str:
        return (
            f"{self._case.go_on_with(self._case.larger_groups())}, or make the tasks easier: "
            f"{self._case.rollouts('best')} shows how near the best answers are."
        )


class NotRising:
    """Rewards do not rise for STEPS steps, below their ceiling.

    Flat: the line through them rises by less than SMALL of the scale, and by less than two of its standard errors.
    Falling: by more than that, downwards, and three. Arithmetic rises by .5 of the scale in its first ten steps, and a
    mean of 256 rollouts scatters by .03, so that its line over 20 steps is good to .025.
    """

    name = "reward_flat"
    STEPS, SMALL, LASTING = 20, 0.05, 5

    def __init__(self, case: Case, rewards: Rewards) -> None:
        self._case, self._rewards = case, rewards
        self._means: deque[float] = deque(maxlen=self.STEPS)
        self._excursion = Excursion(self.LASTING, calm=self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        mean = number(row, "reward/mean")
        if mean is None:
            return None
        self._means.append(mean)
        if len(self._means) < self.STEPS:
            return None
        rise, errors = trend(self._means)
        without_variance = (number(row, "groups/without_signal") or 0.0) >= NoVariance.SILENT  # that rule's to tell
        stays = rise < self.SMALL * self._rewards.span and errors < 2
        holds = stays and not without_variance and not self._rewards.at_ceiling(fmean(self._means))
        if not self._excursion.begins(holds):
            return None
        falls = rise < -self.SMALL * self._rewards.span and errors < -3
        return self._falls(rise) if falls else self._stays(rise)

    def _stays(self, rise: float) -> Finding:
        return Finding(
            evidence=f"{self._what(rise)}, and is not at its ceiling ({self._rewards.highest:.3g}).",
            remedy=f"{self._case.rollouts('worst')}; if those are honest tries at the task: "
            f"{self._case.go_on_with(self._case.faster())}",
        )

    def _falls(self, rise: float) -> Finding:
        slower = f"{self._case.go_on_with(self._case.slower())}, a smaller learning rate."
        remedy = self._case.spoilt(self._rewards.best) if self._rewards.collapsed else slower
        return Finding(evidence=f"{self._what(rise)}: it falls.", remedy=remedy)

    def _what(self, rise: float) -> str:
        middle = fmean(self._means)
        return f"Over {self.STEPS} steps the mean reward went from {middle - rise / 2:.3g} to {middle + rise / 2:.3g}"


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
            remedy=f"{self._case.stop()} then {self._case.begin_anew(changes)}: lost entropy does not come back.",
        )


@dataclass(frozen=True, slots=True)
class _Exam:
    step: int
    share: float  # of held-out tasks that were right
    error: float | None  # standard error


class Hacking:
    """Held-out answers get worse while rewards rise: the scorer is being pleased, or training tasks learnt by heart.

    The fall must be FALL at least, and two standard errors of the difference (an evaluation of 128 tasks is good to
    .02); without standard errors it must be twice FALL.
    """

    name = "reward_hacking"
    FALL, RISE, STEPS = 0.05, 0.05, 5

    def __init__(self, case: Case, rewards: Rewards) -> None:
        self._case, self._rewards = case, rewards
        self._means: dict[int, float] = {}
        self._best: _Exam | None = None
        self._excursion = Excursion(1)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row, or an evaluation's."""
        step, mean, share = row.get("step"), number(row, "reward/mean"), number(row, "eval/percent_correct")
        if not isinstance(step, int):
            return None
        if mean is not None:
            self._means[step] = mean
        return None if share is None else self._compare(_Exam(step, share, number(row, "eval/percent_correct_stderr")))

    def _compare(self, now: _Exam) -> Finding | None:
        best = self._best
        if best is None or now.share >= best.share:
            self._best = now
            self._excursion.begins(False)
            return None
        then, later = self._mean_around(best.step), self._mean_around(now.step)
        if then is None or later is None or now.step <= best.step:
            return None
        rises = later - then >= self.RISE * self._rewards.span > 0
        if not self._excursion.begins(best.share - now.share >= self._least(best, now) and rises):
            return None
        return Finding(
            evidence=f"From step {best.step} to {now.step} the held-out share correct fell from {best.share:.3g} to "
            f"{now.share:.3g}, while the mean reward rose from {then:.3g} to {later:.3g}.",
            remedy=f"{self._case.rollouts('best')}: see what scores high and is wrong, mend the scorer, then "
            f"{self._case.stop()} and {self._case.begin_anew({})}",
        )

    def _least(self, one: _Exam, other: _Exam) -> float:
        if one.error is None or other.error is None:
            return 2 * self.FALL
        return max(self.FALL, 2 * math.hypot(one.error, other.error))

    def _mean_around(self, step: int) -> float | None:
        """Mean reward of the last steps up to this one; of the first ones for an evaluation before training."""
        upto = [number for number in sorted(self._means) if number <= step][-self.STEPS :]
        steps = upto or sorted(self._means)[: self.STEPS]
        return fmean(self._means[number] for number in steps) if steps else None
