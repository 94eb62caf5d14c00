"""Which of several runs is the best by one metric, and whether that is more than chance.

Owns: the nouns `Entrant`, `Verdict`; what a run counts for.
Never: reads a file beyond an evaluation's samples, words an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from halteres.agent.judging.headline import lower_is_better
from halteres.config.settings import Settings
from halteres.observe.metrics import series
from halteres.runs.reading.evaluations import differences
from halteres.runs.reading.intervals import CONFIDENCE, Difference
from halteres.runs.reading.outcome import Outcome
from halteres.runs.state import RunState

LAST_STEPS = 10
"""A training metric counts by its mean over so many, or a fifth of the run: a single step is mostly noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One of the runs that are compared."""

    state: RunState
    outcome: Outcome
    settings: Settings | None  # None: they cannot be read

    def value(self, metric: str) -> float | None:
        """The last evaluation's figure; of a training metric the mean of the last steps."""
        points = series(self.outcome.rows, metric)
        if not points:
            return None
        last = 1 if metric.startswith("eval/") else max(1, min(LAST_STEPS, len(points) // 5))
        return fmean(value for _, value in points[-last:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The best run, and how it stands to the one that comes closest."""

    metric: str
    best: Entrant
    closest: Entrant
    difference: Difference  # of the best to the closest, upwards
    confidence: float  # of the interval
    certain: bool  # it differs from every other, and all have ended


def verdict(entrants: Sequence[Entrant], metric: str) -> Verdict | None:
    """The best by this metric; None where fewer than two have it, or what they were trained for differs.

    `certain` wants an interval without zero to every other run: paired by held-out task where both were asked the
    same, else from the standard errors. The best was chosen among several, so the chance of error is divided by the
    number of the others. Training metrics are never certain: every step has other tasks. Nor is it known what another
    seed of the same settings would have given.
    """
    known = [entrant for entrant in entrants if entrant.value(metric) is not None]
    if len(known) < 2 or len({entrant.state.environment for entrant in known}) > 1:
        return None
    ordered = sorted(known, key=lambda entrant: entrant.value(metric) or 0.0, reverse=not lower_is_better(metric))
    best, *others = ordered
    confidence = 1 - (1 - CONFIDENCE) / len(others)
    found = [_difference(best, other, metric, confidence) for other in others]
    return Verdict(
        metric=metric,
        best=best,
        closest=others[0],
        difference=found[0],
        confidence=confidence,
        certain=all(difference.certain for difference in found) and all(entrant.state.terminal for entrant in known),
    )


def _difference(best: Entrant, other: Entrant, metric: str, confidence: float) -> Difference:
    ends = (other.outcome.evaluations, best.outcome.evaluations)
    if metric.startswith("eval/") and all(ends):
        found = differences(ends[0][-1], ends[1][-1], confidence).get(metric)
        if found is not None:
            return found
    return Difference(delta=(best.value(metric) or 0.0) - (other.value(metric) or 0.0))
