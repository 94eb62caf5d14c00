"""What a run has come to: its evaluations, how two differ and how certain that is; figures,
weights, cost, plots.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import msgspec

from halteres.config import environ
from halteres.config.program import EnvironmentProgram
from halteres.errors import EnvironmentFailed, ServerError, boundary
from halteres.files import NOT_JSON, lines_of, open_regular, read_regular
from halteres.observe.metrics import LONGEST_ROW, Row, decoded, merge_by_step, read_rows
from halteres.redaction import Redactor
from halteres.rewards.model_folder import RESULT
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState
from halteres.scores import REWARD_FILE

CONFIDENCE = 0.95

CORRECT, GREEDY, SCORE = "eval/percent_correct", "eval/percent_correct_greedy", "eval/mean_score"
TRUNCATED, LENGTH = "eval/truncated", "eval/completion_lengths"

_SHARES = (CORRECT, GREEDY, TRUNCATED)

AGREES = 1e-4
"""How far the mean of the samples may be from the figure that was reported, to be taken for the
same thing.
"""

_NO_GAIN = ("eval/num_", "eval/policy_version")


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
    # a repeated one counts as often as it was asked; None: not known one by one
    num_tasks: int | None = None
    method: Literal["paired", "unpaired", "none"] = "none"

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def facts(self) -> dict[str, Any]:
        """As answers and results.json have it; four decimals."""
        # + 0: no -0.0
        ci95 = None
        if self.interval:
            ci95 = [round(bound, 4) + 0.0 for bound in self.interval]
        facts = {"delta": round(self.delta, 4) + 0.0, "ci95": ci95, "num_tasks": self.num_tasks}
        return {**facts, "certain": self.certain, "method": self.method}


def paired(pairs: Sequence[Pair], spread: float, confidence: float = CONFIDENCE) -> Difference:
    """The mean difference over tasks that were measured twice.

    It speaks of these two sets of weights on all tasks like these: both the choice of tasks and the
    noise of sampling are in the interval. What another seed of training would have given is not.

    `spread`: how far apart two measurements can be, 1 for shares.

    Source: Bonett and Price (2012), the adjusted Wald interval for a difference of paired
    proportions: the interval of the plain mean after two more tasks, one that gained everything and
    one that lost everything. Here it is used for means over several samples as well, and repeated
    tasks count as one observation of that weight. A t interval fails where few tasks change, for
    then nearly all differences are 0; how often this one holds is simulated in
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


def unpaired(
    before: tuple[float, float], after: tuple[float, float], confidence: float = CONFIDENCE
) -> Difference:
    """The difference of two (mean, standard error), as if they were of different tasks: wider than
    `paired`.

    Standard errors of 0 are those of a single task, or of tasks that all came out alike: then there
    is no interval.
    """
    delta, error = after[0] - before[0], math.hypot(before[1], after[1])
    if error == 0:
        return Difference(delta=delta)
    margin = _quantile(confidence) * error
    return Difference(delta=delta, interval=(delta - margin, delta + margin), method="unpaired")


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation."""

    step: int  # of the weights; 0: untrained
    figures: Mapping[str, float]  # by name, `eval/...`
    samples: Path | None = None  # samples.jsonl; may be missing
    success_threshold: float = 0.0  # a score above it is a success


def evaluations(run: RunDirectory, rows: Iterable[Row]) -> list[Evaluation]:
    """Every evaluation that was counted, oldest first; `rows`: of metrics.jsonl, one per step."""
    threshold = run.success_threshold
    found = (evaluation(run.path, row, threshold) for row in rows)
    return [one for one in found if one.figures]


def evaluation(folder: Path | None, row: Row, success_threshold: float = 0.0) -> Evaluation:
    """One evaluation, read from a row; `folder`: of the run; None: there are no samples to find."""
    samples = None
    if folder:
        samples = folder / "evals" / f"step_{row['step']}/samples.jsonl"
    figures = {
        name: float(value)
        for name, value in row.items()
        if name.startswith("eval/") and _is_finite(value)
    }
    return Evaluation(
        step=row["step"], figures=figures, samples=samples, success_threshold=success_threshold
    )


def differences(
    before: Evaluation, after: Evaluation, confidence: float = CONFIDENCE
) -> dict[str, Difference]:
    """How much higher each figure of `after` is than the same of `before`.

    Shares, scores, lengths are compared task by task where both have samples of the same prompts.
    Other figures have an interval where the evaluation reports their standard error
    (`NAME_stderr`), and none else.
    """
    first, second = _by_task(before), _by_task(after)
    found: dict[str, Difference] = {}
    for name in after.figures:
        if name not in before.figures or name.endswith("_stderr") or name.startswith(_NO_GAIN):
            continue
        by_task = None
        if name in first and name in second:
            by_task = _paired(first[name], second[name], name, confidence)
        error, mean, later = f"{name}_stderr", before.figures[name], after.figures[name]
        apart = Difference(delta=later - mean)
        if error in before.figures and error in after.figures:
            apart = unpaired(
                (mean, before.figures[error]), (later, after.figures[error]), confidence
            )
        found[name] = by_task or apart
    return found


@dataclass(slots=True)
class _Figure:
    # By a hash of the question.
    tasks: defaultdict[bytes, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def values(self) -> list[float]:
        return [value for values in self.tasks.values() for value in values]


def _paired(first: _Figure, second: _Figure, name: str, confidence: float) -> Difference | None:
    """None where the two were not asked the same, or nearly."""
    shared = first.tasks.keys() & second.tasks.keys()
    if 2 * len(shared) < min(len(first.tasks), len(second.tasks)):
        return None
    values = first.values + second.values
    spread = 1.0
    if name not in _SHARES:
        spread = max(values) - min(values)
    least = min(len(second.tasks[prompt]) for prompt in shared)
    pairs = [
        Pair(
            before=math.fsum(first.tasks[prompt]) / len(first.tasks[prompt]),
            after=math.fsum(second.tasks[prompt]) / len(second.tasks[prompt]),
            weight=len(second.tasks[prompt]) / least,
        )
        for prompt in sorted(shared)
    ]
    if spread > 0:
        return paired(pairs, spread, confidence)
    return None


def _by_task(evaluation: Evaluation) -> dict[str, _Figure]:
    """The figures that the samples bear out."""
    if evaluation.samples is None:
        return {}
    try:
        stat = evaluation.samples.stat()
        found = _read(
            evaluation.samples, stat.st_size, stat.st_mtime_ns, evaluation.success_threshold
        )
    except OSError:
        return {}
    return {
        name: figure
        for name, figure in found.items()
        if name in evaluation.figures
        and abs(math.fsum(figure.values) / len(figure.values) - evaluation.figures[name]) < AGREES
    }


class _Sample(msgspec.Struct, gc=False):
    """What is read of a line of samples.jsonl; strangers write others."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    task: msgspec.Raw = msgspec.Raw(b"")  # among those with the same prompt
    score: Any = None
    temperature: Any = None
    tokens: Any = None
    finish: Any = None


_decoder = msgspec.json.Decoder(_Sample)


@lru_cache(maxsize=64)
def _read(file: Path, size: int, mtime_ns: int, success_threshold: float) -> Mapping[str, _Figure]:
    """Every figure of the samples; a file is read once, however many runs it is compared with."""
    found: defaultdict[str, _Figure] = defaultdict(_Figure)
    with open_regular(file) as stream:
        for line in lines_of(stream, LONGEST_ROW):
            sample = decoded(_decoder, line)
            if sample is None or not sample.prompt:
                continue  # torn, of another kind, or of a task that is not named
            prompt = hashlib.blake2b(
                bytes(sample.prompt) + bytes(sample.task), digest_size=16
            ).digest()
            values: dict[str, float] = {}
            if sample.temperature == 0:
                if _is_finite(sample.score):
                    values[GREEDY] = float(sample.score > success_threshold)
            else:  # without a temperature it counts as sampled at 1
                if _is_finite(sample.score):
                    values |= {
                        CORRECT: float(sample.score > success_threshold),
                        SCORE: float(sample.score),
                    }
                if _is_finite(sample.tokens):
                    values[LENGTH] = float(sample.tokens)
                if sample.finish is not None:
                    values[TRUNCATED] = float(sample.finish == "length")
            for name, value in values.items():
                found[name].tasks[prompt].append(value)
    return found


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold; whole numbers may be longer."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One held-out task, answered before and after."""

    prompt: Any  # text, or chat messages
    before: str
    before_score: float  # in the environment's own units
    after: str
    after_score: float
    success_threshold: float = 0.0  # a score above it is a success

    @property
    def learnt(self) -> bool:
        """Whether it was wrong before and right after."""
        return self.after_score > self.success_threshold >= self.before_score

    @property
    def facts(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            "prompt": self.prompt,
            "before": {"completion": self.before, "score": self.before_score},
            "after": {"completion": self.after, "score": self.after_score},
        }


def before_and_after(run: RunDirectory) -> list[Compared]:
    """Tasks that the first and the last evaluation with answers share, those first that gained
    most.
    """

    def step_of(samples: Path) -> int:
        digits = samples.parent.name.removeprefix("step_")
        if digits.isdecimal():
            return int(digits)
        return -1

    def by_prompt(file: Path) -> dict[str, Row]:
        rows = reversed(read_rows(file))  # of several answers the first
        return {json.dumps([row.get("prompt"), row.get("task")]): row for row in rows}

    def score_of(row: Row) -> float:
        score = row.get("score")
        if isinstance(score, int | float):
            return float(score)
        return 0.0

    files = sorted((run.path / "evals").glob("step_*/samples.jsonl"), key=step_of)
    if len(files) < 2:
        return []
    before, after = by_prompt(files[0]), by_prompt(files[-1])
    shared = [
        Compared(
            prompt=after[prompt].get("prompt"),
            before=str(before[prompt].get("completion", "")),
            before_score=score_of(before[prompt]),
            after=str(after[prompt].get("completion", "")),
            after_score=score_of(after[prompt]),
            success_threshold=run.success_threshold,
        )
        for prompt in reversed(after)
        if prompt in before
    ]
    return sorted(shared, key=lambda task: task.before_score - task.after_score)


LOGGED = "logged.jsonl"  # rows that a foreign environment logged to W&B while it evaluated


def figures_of(program: EnvironmentProgram, folder: Path, output: str) -> dict[str, Any]:
    """Its figures: numbers, each called `eval/...` (where its own name is another, `eval/` is put
    before it).

    Args:
        folder: the environment's `data_dir_to_save_evals`.
        output: what it printed.

    Raises:
        EnvironmentFailed: it gave none.
    """
    how = "`evaluate` has to return them, or to give them to evaluate_log."
    found: Mapping[str, Any] | None = None
    if program.is_foreign:
        how = (
            "`evaluate` has to give them to evaluate_log, or to the next wandb_log under names "
            "that begin with eval/."
        )
        rows = read_rows(folder / LOGGED)
        found = {
            name: value for row in rows for name, value in row.items() if name.startswith("eval/")
        }
        try:
            found |= json.loads(read_regular(folder / "metrics.json"))["results"]["all"]
        except (OSError, *NOT_JSON, TypeError, LookupError):
            found = found or None
    else:
        for line in output.splitlines():
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if isinstance(answer, dict):
                found = answer
    if found is None:
        raise EnvironmentFailed(f"The evaluation of {program.path.name} gave no figures.", how)
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {
        name if name.startswith("eval/") else f"eval/{name}": value
        for name, value in numbers.items()
    }


# metrics that every trained step has: of a policy, of a reward model, of a policy on a file
_TRAINED = ("reward/mean", "num_tokens", "train/loss")

_NO_METRICS = ("step", "t", "src")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where the newest weights are."""

    step: int | None  # optimiser steps they have had
    sampler: str | None  # tinker:// path to sample from
    state: str | None  # tinker:// path to train on from
    peft_dir: Path | None  # a PEFT adapter, once the run has ended
    reward_model: Path | None = None  # its folder, once a run that trains one has completed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a run has taken so far; where it goes on from another, that one's share is not in it."""

    minutes: float  # by the clock, start-up and evaluations included
    tokens: int  # sampled for training; on a file, of the answers that were trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has come to, so far or in the end."""

    rows: Sequence[Row]  # metrics, one per step
    evaluations: Sequence[Evaluation]  # oldest first
    weights: Weights
    cost: Cost
    # the last evaluation over the first; nothing where there is only one
    gains: Mapping[str, Difference]

    @property
    def final(self) -> dict[str, float]:
        """The last trained step's metrics and the last evaluation's."""
        trained = next(
            (row for row in reversed(self.rows) if any(name in row for name in _TRAINED)), {}
        )
        last = {}
        if self.evaluations:
            last = self.evaluations[-1].figures
        return {
            **{
                k: v
                for k, v in trained.items()
                if k not in _NO_METRICS and not k.startswith("eval/")
            },
            **last,
        }

    @property
    def baseline(self) -> Evaluation | None:
        """The first evaluation; of the untrained model where its step is 0."""
        if self.evaluations:
            return self.evaluations[0]
        return None


def outcome_of(run: RunDirectory, state: RunState) -> Outcome:
    """Read it now; at any time of a run."""
    rows, checkpoints = merge_by_step(run.metrics()), run.checkpoints()
    found = evaluations(run, rows)
    newest = next(
        (row for row in reversed(checkpoints) if row.get("sampler_path") or row.get("final")), {}
    )
    resumable = next((row for row in reversed(checkpoints) if row.get("state_path")), {})
    adapter, model = run.path / "adapter", run.path / RESULT
    began = int((state.resume_point or {}).get("step", 0))
    # on a file nothing is sampled
    name = "tokens/action"
    if state.is_on_file:
        name = "tokens/trained"
    tokens = [row.get(name) for row in rows if row["step"] > began]
    return Outcome(
        rows=rows,
        evaluations=found,
        weights=Weights(
            step=newest.get("step"),
            sampler=newest.get("sampler_path"),
            state=resumable.get("state_path"),
            peft_dir=adapter if adapter.is_dir() else None,
            reward_model=model if (model / REWARD_FILE).is_file() else None,
        ),
        cost=Cost(
            minutes=((state.ended_at or time.time()) - state.created_at) / 60,
            tokens=round(math.fsum(count for count in tokens if isinstance(count, int | float))),
        ),
        gains=differences(found[0], found[-1]) if len(found) > 1 else {},
    )


PLOT = "plot.png"

_drawing = threading.Lock()  # tools run in threads, and matplotlib's fonts are not made for several


def draw(run: RunDirectory, state: RunState, rows: Sequence[Row], file: Path) -> None:
    """Draw one run; ServerError where matplotlib cannot: it reads fonts and caches of the
    machine.
    """
    alerts = [
        (event["rule"], event["step"])
        for event in run.events()
        if event.get("type") == "alert"
        and isinstance(event.get("rule"), str)
        and isinstance(event.get("step"), int)
    ]
    with _drawing, boundary(ServerError, "Plotting"):
        from halteres.observe import plots

        title = f"{state.name}: {state.status} at step {state.step} of {state.total_steps}"
        if state.kind == "reward":
            plot = plots.plot_reward_training
        elif state.is_on_file:
            plot = plots.plot_file_training
        else:
            plot = plots.plot_run
        plot(rows, file, Redactor.of_this_process().text(title), alerts)


def picture_of(run: RunDirectory, state: RunState, rows: Sequence[Row]) -> Path:
    """The run's own picture once it has ended, else one drawn now, in the cache."""
    own = run.path / PLOT
    if state.terminal and own.exists():
        return own
    file = _cache() / f"plot-{run.run_id}.png"
    draw(run, state, rows, file)
    return file


def comparison_of(curves: Mapping[str, Sequence[Row]], metrics: Sequence[str]) -> Path:
    """One picture of several runs, by label, in the cache; the same runs and metrics always have
    the same file.
    """
    known = hashlib.sha256(repr((sorted(curves), list(metrics))).encode()).hexdigest()[:12]
    file, redactor = _cache() / f"compare-{known}.png", Redactor.of_this_process()
    with _drawing, boundary(ServerError, "Plotting"):
        from halteres.observe import plots

        labelled = {redactor.text(label): rows for label, rows in curves.items()}
        plots.plot_runs(labelled, file, f"{len(curves)} runs", *metrics)
    return file


def _cache() -> Path:
    folder = environ.home() / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
