"""The rules of what is learnt wrongly: rewards rise, and held-out answers, or the panel, do not.

Owns: their thresholds; which evaluations are compared, and how certain that must be.
Never: evaluates, computes an interval or a share (`rewards.panel`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from halteres.next_step import Remedy
from halteres.observe.metrics import Row
from halteres.rewards.panel import PROXY, Divergence, Transfer, divergences, transfers
from halteres.runs.diagnosis.case import Case
from halteres.runs.diagnosis.excursion import CEILING, Excursion, Finding, Rewards, number
from halteres.runs.reading.evaluations import CORRECT, SCORE, Evaluation, differences, evaluation


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What held-out answers and rewards did between two evaluations."""

    before: Evaluation
    after: Evaluation
    then: float  # mean reward around the first
    later: float  # ... and around the second

    @property
    def rise(self) -> float:
        """Of the mean reward."""
        return self.later - self.then

    def highest_gain(self, name: str, confidence: float) -> float:
        """The most that this held-out figure can have risen; unbounded where nothing is known of its error."""
        difference = differences(self.before, self.after, confidence).get(name)
        return difference.interval[1] if difference and difference.interval else math.inf

    def __str__(self) -> str:
        first, last = self.before.figures[CORRECT], self.after.figures[CORRECT]
        went = "fell" if last < first else "went"
        return (
            f"From step {self.before.step} to {self.after.step} the held-out share correct {went} from {first:.3g} to "
            f"{last:.3g}, while the mean reward rose from {self.then:.3g} to {self.later:.3g}."
        )


class Hacking:
    """Held-out answers do not follow the rewards: the scorer is being pleased, or training tasks learnt by heart.

    Worse: below the best evaluation so far by FALL, for certain, while rewards rose by RISE of the scale. Left behind:
    rewards rose by STRONG of the scale since the first evaluation, and held-out answers, for certain, by less than
    FOLLOWS of that. Either must hold at two evaluations in a row; a fall that leaves only AT_ONCE for chance is told at
    once. Evaluations are compared task by task where their samples are there, by their standard errors otherwise; where
    neither is known, nothing is told.

    Certain: each of the pairs that could have been compared so far has its part of CHANCE, since the best was chosen
    by looking. Of runs whose held-out share never falls at most 1 % are told within 20 evaluations, of those that fall
    from .6 to .4 over five (128 tasks, 4 samples) over 99 %: benchmarks/alerts.py.
    """

    name = "reward_hacking"
    FALL, RISE, STEPS = 0.05, 0.05, 5
    STRONG, FOLLOWS = 0.5, 0.25
    CHANCE, AT_ONCE, IN_A_ROW = 0.01, 0.002, 2

    def __init__(self, case: Case, rewards: Rewards) -> None:
        self._case, self._rewards = case, rewards
        self._means: dict[int, float] = {}
        self._seen: list[Evaluation] = []
        self._held = 0  # evaluations in a row
        self._excursion = Excursion(1, calm=self.IN_A_ROW)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row, or an evaluation's."""
        step, mean = row.get("step"), number(row, "reward/mean")
        if not isinstance(step, int):
            return None
        if mean is not None:
            self._means[step] = mean
        if number(row, CORRECT) is None:
            return None
        return self._look(evaluation(self._case.folder, row, self._case.success_threshold))

    def _look(self, now: Evaluation) -> Finding | None:
        self._seen.append(now)
        earlier = [one for one in self._seen if one.step < now.step]
        if not earlier or not self._means:
            return None
        best = max(earlier, key=lambda one: (one.figures[CORRECT], one.step))
        from_best, from_first = self._stretch(best, now), self._stretch(earlier[0], now)
        worse = self._is_worse(from_best, self.CHANCE)
        holds = worse or self._is_left_behind(from_first)
        self._held = self._held + 1 if holds else 0
        certain = self._held >= self.IN_A_ROW or self._is_worse(from_best, self.AT_ONCE)
        if not self._excursion.begins(certain, over=not holds):
            return None
        return Finding(
            evidence=str(from_best if worse else from_first),
            remedy=Remedy(
                (self._case.stop(), self._case.rollouts("best")),
                "see what scores high and is wrong, mend the scorer, then",
                (self._case.begin_anew({}),),
            ),
        )

    def _is_worse(self, stretch: _Stretch, chance: float) -> bool:
        before, after = stretch.before.figures[CORRECT], stretch.after.figures[CORRECT]
        if before - after < self.FALL or not stretch.rise >= self.RISE * self._rewards.span > 0:
            return False
        return stretch.highest_gain(CORRECT, self._confidence(chance)) < 0

    def _is_left_behind(self, stretch: _Stretch) -> bool:
        span, due = self._rewards.span, self.FOLLOWS * stretch.rise
        if not stretch.rise >= self.STRONG * span > 0 or stretch.after.figures[CORRECT] + due / span >= CEILING:
            return False
        confidence = self._confidence(self.CHANCE)
        if stretch.highest_gain(CORRECT, confidence) >= due / span:
            return False
        return SCORE not in stretch.after.figures or stretch.highest_gain(SCORE, confidence) < due

    def _confidence(self, chance: float) -> float:
        """Of two-sided intervals of which one bound is looked at."""
        return 1 - 2 * chance / math.comb(len(self._seen), 2)

    def _stretch(self, before: Evaluation, after: Evaluation) -> _Stretch:
        return _Stretch(before, after, self._mean_around(before.step), self._mean_around(after.step))

    def _mean_around(self, step: int) -> float:
        """Mean reward of the last steps up to this one; of the first ones for an evaluation before training."""
        steps = sorted(self._means)
        nearest = [number for number in steps if number <= step][-self.STEPS :] or steps[: self.STEPS]
        return fmean(self._means[number] for number in nearest)


class PanelDisagrees:
    """Most of what the trained reward has gained on held-out answers does not show in the panel; or a rubric's criteria
    of presence rise while those of correctness fall. Compared with the first evaluation; told of the worst member."""

    name = "panel_disagrees"

    def __init__(self, case: Case) -> None:
        self._case = case
        self._base: Row | None = None
        self._excursion = Excursion(1)

    def observe(self, row: Row) -> Finding | None:
        """An evaluation's row."""
        if number(row, f"eval/{PROXY}") is None:
            return None
        if self._base is None:
            self._base = row
            return None
        low = [transfer for transfer in transfers(self._base, row) if transfer.is_low]
        diverging = list(divergences(self._base, row))
        if not self._excursion.begins(bool(low or diverging)):
            return None
        return Finding(
            evidence=_shares(low) if low else _diverging(diverging[0]),
            remedy=Remedy(
                (self._case.stop(), self._case.rollouts("best")),
                "see what the reward pays for and the panel does not; then mend `rewards` and start again from an "
                "earlier checkpoint.",
            ),
        )


def _shares(low: Sequence[Transfer]) -> str:
    worst = min(low, key=lambda transfer: transfer.panel)
    return (
        f"Held out, the reward gained {worst.proxy:.2g} standard deviations and '{worst.member}' of the panel "
        f"{worst.panel:.2g}: {worst.share or 0:.0%} of the gain transfers."
    )


def _diverging(found: Divergence) -> str:
    return (
        f"By '{found.component}', criteria of presence rose by {found.presence:.2g} and those of correctness fell by "
        f"{-found.correctness:.2g}."
    )
