"""What the rules read and give: a run's settings and the calls that fix it, its history, findings,
debouncing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from halteres.config import environ
from halteres.config.file_training import FILE
from halteres.config.sampler_list import are_exact, samplers_of
from halteres.config.settings import InferenceSettings, TrainerSettings
from halteres.next_step import NextStep, Remedy
from halteres.observe.metrics import Row
from halteres.runs.directory import RunDirectory

Changes = Mapping[str, Any]  # section.field -> new value


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run under observation: its settings, and the calls that an agent can make about it."""

    run_id: str
    environment: str  # by its name, or by its file, as the run was started with it
    trainer: TrainerSettings
    env: Mapping[str, Any] = field(default_factory=dict)  # the environment's effective settings
    # what the run was started with, as `changes` of a new one
    given: Changes = field(default_factory=dict)
    folder: Path | None = None  # the run's; its evaluations' samples lie there
    success_threshold: float = 0.0  # a score above it is a success
    # what samples computes in bfloat16, and not as the engine that trains does
    samples_roughly: bool = False

    @classmethod
    def of(cls, run: RunDirectory) -> RunFacts:
        """Read it from the run's files."""
        settings = run.settings()
        return cls(
            run_id=run.run_id,
            environment=settings.run.environment,
            trainer=settings.trainer,
            env={**run.environment_config(), **settings.env},
            given=run.own_settings(inherited=(run.path / FILE).exists()),
            folder=run.path,
            success_threshold=settings.run.success_threshold,
            samples_roughly=_samples_roughly(settings.inference),
        )

    def logs(self, role: str) -> NextStep:
        """Read a role's log."""
        return NextStep("rl_get_logs", {"run_id": self.run_id, "role": role})

    def rollouts(self, which: Literal["best", "worst"]) -> NextStep:
        """Read rollouts."""
        return NextStep("rl_get_rollouts", {"run_id": self.run_id, "which": which})

    def results(self) -> NextStep:
        """See what was reached."""
        return NextStep("rl_get_results", {"run_id": self.run_id})

    def stop(self, mode: Literal["now", "after_step"] = "now") -> NextStep:
        """Stop it."""
        return NextStep(
            "rl_stop_training", {"run_id": self.run_id, **({} if mode == "now" else {"mode": mode})}
        )

    def resume(self, changes: Changes) -> NextStep:
        """Go on from its newest checkpoint, once it has ended."""
        return NextStep("rl_start_training", {"resume_from": self.run_id, "changes": changes})

    def go_on_with(self, changes: Changes) -> tuple[NextStep, NextStep]:
        """End it with a checkpoint, and go on from that with other settings."""
        return self.stop(), self.resume(changes)

    def begin_anew(self, changes: Changes) -> NextStep:
        """Start again from the base model, with what this run was started with and other
        settings.
        """
        given = {**self.given, **changes}
        # of a training on a file, which has no environment
        method, data = (given.pop(f"data.{name}", None) for name in ("method", "data"))
        if data is not None:
            anew = {"data": data, "method": method, "changes": given}
            return NextStep("rl_start_training", anew)
        return NextStep("rl_start_training", {"environment": self.environment, "changes": given})

    def spoilt(self, best: float) -> Remedy:
        """For a policy that has lost most of what it scored: its checkpoints have lost it too."""
        words = f"the mean reward was {best:.3g} and is lost, updates are too large."
        return Remedy((self.stop(), self.begin_anew(self.rate_times(1 / 4))), words)

    def unscored(self) -> Remedy:
        """Where no answer ever scored: before anything is spent on it, the scorer is looked at."""
        words = "would the scorer know a right answer? If so, easier tasks, or"
        return Remedy((self.rollouts("worst"),), words, self.go_on_with(self.larger_groups()))

    def silent(self) -> Remedy:
        """Where the answers to a task all score the same, some of them right: they are read before
        anything is changed.
        """
        words = "how near are the best answers? Make the tasks easier, or"
        return Remedy((self.rollouts("best"),), words, self.go_on_with(self.larger_groups()))

    def rate_times(self, factor: float = 0.5) -> Changes:
        """A smaller or larger learning rate."""
        return {
            "trainer.learning_rate": float(f"{min(1.0, self.trainer.learning_rate * factor):.3g}")
        }

    def larger_groups(self) -> Changes:
        """Twice as many rollouts of a task, in batches of whole groups."""
        group = 2 * max(1, self.number("group_size") or 4)
        batch = self.number("batch_size") or 0
        whole = -(-batch // group) * group
        return {"env.group_size": group, **({"env.batch_size": whole} if whole != batch else {})}

    def longer_answers(self) -> Changes:
        """Room for answers of twice the length, wherever a limit may cut them."""
        tokens, total = self.number("max_new_tokens"), self.number("max_token_length")
        changes: dict[str, Any] = {}
        if tokens:
            changes = {"env.max_new_tokens": 2 * tokens}
        if total:
            changes["env.max_token_length"] = total = total + (tokens or total)
            if total > self.trainer.max_token_trainer_length:
                changes["trainer.max_token_trainer_length"] = total
        return changes

    @property
    def groups_per_batch(self) -> int | None:
        """Groups in one batch."""
        batch, group = self.number("batch_size"), self.number("group_size")
        if batch and group:
            return batch // group
        return None

    def number(self, name: str) -> int | None:
        """A positive whole number among the environment's settings."""
        value = self.env.get(name)
        if isinstance(value, int) and value > 0:
            return value
        return None


def _samples_roughly(inference: InferenceSettings) -> bool:
    if are_exact(samplers_of(inference.samplers)):
        return False
    if inference.dtype == "auto":
        # as `service.fleet_options` asks a vLLM
        return (inference.device or environ.device()) != "cpu"
    return inference.dtype == "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule sees in one row, or finds with a look."""

    evidence: str  # a sentence with the figures
    remedy: Remedy
    holds: bool = True  # whether the condition holds now; an alert needs it several times in a row
    # whether it is clearly over, where that is more than that it does not hold
    is_over: bool | None = None
    at_once: bool = False  # it is so certain that once is enough


class Debounce:
    """A condition is reported once it has held `lasting` times in a row, and again only after it
    was clearly over `calm` times in a row (default: as many).
    """

    def __init__(self, lasting: int, calm: int | None = None) -> None:
        self._lasting, self._calm = lasting, calm or lasting
        self._num_held = self._num_over = 0
        self._reported = self._ended = False

    def begins(self, holds: bool, is_over: bool | None = None, at_once: bool = False) -> bool:
        """One more look: whether it is to be reported now. The arguments are those of `Finding`."""
        if holds:
            self._num_held = self._num_held + 1
        else:
            self._num_held = 0
        if not holds if is_over is None else is_over:
            self._num_over = self._num_over + 1
        else:
            self._num_over = 0
        self._ended = self._reported and self._num_over >= self._calm
        if self._ended:
            self._reported = False
        begins = (self._num_held >= self._lasting or at_once) and not self._reported
        self._reported |= begins
        return begins

    @property
    def ended(self) -> bool:
        """Whether what was reported has been found over, by the last look."""
        return self._ended

    def found(self, finding: Finding | None) -> Finding | None:
        """The finding, if it is to be reported now; None is no look."""
        self._ended = False
        begins = finding and self.begins(finding.holds, finding.is_over, finding.at_once)
        if begins:
            return finding
        return None


CEILING = 0.9
"""From this share of the scale up, rewards are at their ceiling: little is left to learn, and
nothing to alarm.
"""

SMOOTH, LEAST_LEARNT = 3, 0.05
"""Steps whose mean is a reward to go by; the share of the scale from which on it can be lost."""


class History:
    """The run so far: its mean rewards, their scale and where on it the run is, its evaluations."""

    def __init__(self) -> None:
        self.lowest, self.highest = math.inf, -math.inf  # score of any rollout
        self.best = -math.inf  # mean reward of SMOOTH steps
        self.means: dict[int, float] = {}  # mean reward by step
        self.evaluations: list[Row] = []  # rows of held-out figures, oldest first
        self.environment: Row = {}  # the environment's newest row
        self._first: dict[str, list[float]] = {}

    def see(self, row: Row) -> None:
        """Take in a row, before the rules; without the extremes (an older run's) the mean stands
        for them.
        """
        if row.get("src") == "env":
            self.environment = row
        if any(name.startswith("eval/") for name in row):
            self.evaluations.append(row)
        if (mean := number(row, "reward/mean")) is not None:
            low, high = number(row, "reward/min"), number(row, "reward/max")
            self.lowest = min(self.lowest, mean if low is None else low)
            self.highest = max(self.highest, mean if high is None else high)
            self.means[row["step"]] = mean
            if len(self.means) >= SMOOTH:
                self.best = max(self.best, fmean(self.last_means(SMOOTH)))

    def last_means(self, count: int) -> list[float]:
        """The newest mean rewards, oldest first."""
        return list(self.means.values())[-count:]

    def at_first(self, name: str, value: float) -> float | None:
        """The median of the first three values of this name; None while they come in. `value`: one
        more.
        """
        first = self._first.setdefault(name, [])
        if len(first) == 3:
            return median(first)
        first.append(value)
        return None

    @property
    def span(self) -> float:
        """Highest score less lowest."""
        return max(0.0, self.highest - self.lowest)

    @property
    def collapsed(self) -> bool:
        """Whether more than half of what the policy once scored is lost: it was spoilt, and its
        other ails follow.
        """
        had = self.best - self.lowest
        return (
            had > LEAST_LEARNT * self.span and fmean(self.last_means(SMOOTH)) < self.best - had / 2
        )

    def at_ceiling(self, mean: float) -> bool:
        """Whether a mean reward is as good as the best answers; where no answer ever scored above
        0, none is good.
        """
        return self.highest > 0 and mean >= self.lowest + CEILING * self.span


def components(row: Row, before: str, after: str) -> Iterator[tuple[str, float]]:
    """(component, value) of the metrics whose names are `before`, a component's name and
    `after`.
    """
    for name in row:
        component = name.removeprefix(before).removesuffix(after)
        if (
            name == f"{before}{component}{after}"
            and "/" not in component
            and (value := number(row, name)) is not None
        ):
            yield component, value


def number(row: Row, name: str) -> float | None:
    """A figure of a row, where it has one that can be reckoned with: its square must be a number
    too.
    """
    value = row.get(name)
    if isinstance(value, int | float) and abs(value) < 1e100:
        return float(value)
    return None


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Rise of the line of least squares from the first to the last value, and that rise in its
    standard errors.

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
    return rise, slope / error if error > 1e-12 else math.copysign(
        math.inf, slope
    ) if slope else 0.0


Look = Callable[[RunFacts, History, Row], Finding | None]
"""What a row shows, whether it is wrong or not; None: the row is none of the rule's business."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Watches one thing that can go wrong."""

    name: str  # as alerts call it
    look: Look
    steps: int  # rows in a row, of those that it looks at, in which it must hold
    calm: int | None  # ... in which it must be over before it is reported again; None: as many


def rule(name: str, *, steps: int = 1, calm: int | None = None) -> Callable[[Look], Rule]:
    """Makes a rule of its look at a row."""
    return lambda look: Rule(name=name, look=look, steps=steps, calm=calm)
