"""Evaluations of a run as they lie on disk, the answers of its first and last evaluated policy, and how two differ."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from halteres.config.program import EnvironmentProgram
from halteres.errors import EnvironmentFailed
from halteres.files import NOT_JSON, lines_of, open_regular, read_regular
from halteres.observe.metrics import LONGEST_ROW, Row, decoded, read_rows
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.intervals import CONFIDENCE, Difference, Pair, paired, unpaired

CORRECT, GREEDY, SCORE = "eval/percent_correct", "eval/percent_correct_greedy", "eval/mean_score"
TRUNCATED, LENGTH = "eval/truncated", "eval/completion_lengths"

_SHARES = (CORRECT, GREEDY, TRUNCATED)

AGREES = 1e-4
"""How far the mean of the samples may be from the figure that was reported, to be taken for the same thing."""

_NO_GAIN = ("eval/num_", "eval/policy_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation."""

    step: int  # of the weights; 0: untrained
    figures: Mapping[str, float]  # by name, `eval/...`
    samples: Path | None = None  # samples.jsonl; may be missing
    success_threshold: float = 0.0  # a score above it is a success


@dataclass(slots=True)
class _Task:
    """What one held-out task came to, over its samples."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count


@dataclass(slots=True)
class _Measured:
    """One figure, task by task."""

    tasks: defaultdict[bytes, _Task] = field(default_factory=lambda: defaultdict(_Task))  # by a hash of what was asked
    low: float = math.inf
    high: float = -math.inf

    def add(self, prompt: bytes, value: float) -> None:
        task = self.tasks[prompt]
        task.total, task.count = task.total + value, task.count + 1
        self.low, self.high = min(self.low, value), max(self.high, value)

    def agrees(self, figure: float) -> bool:
        count = sum(task.count for task in self.tasks.values())
        return abs(math.fsum(task.total for task in self.tasks.values()) / count - figure) < AGREES


def evaluations(run: RunDirectory, rows: Iterable[Row]) -> list[Evaluation]:
    """Every evaluation that was counted, oldest first; `rows`: of metrics.jsonl, one per step."""
    threshold = run.success_threshold
    return [evaluation(run.path, row, threshold) for row in rows if _figures(row)]


def evaluation(folder: Path | None, row: Row, success_threshold: float = 0.0) -> Evaluation:
    """What a row tells of one; `folder`: the run's, None where there is none to find samples in."""
    samples = folder / "evals" / f"step_{row['step']}/samples.jsonl" if folder else None
    return Evaluation(step=row["step"], figures=_figures(row), samples=samples, success_threshold=success_threshold)


def differences(before: Evaluation, after: Evaluation, confidence: float = CONFIDENCE) -> dict[str, Difference]:
    """How much higher each figure of `after` is than the same of `before`.

    Shares, scores, lengths are compared task by task where both have samples of the same prompts. Other figures have
    an interval where the evaluation reports their standard error (`NAME_stderr`), and none else.
    """
    first, second = _measured(before), _measured(after)
    return {
        name: (_paired(first.get(name), second.get(name), name, confidence))
        or _apart(name, before.figures, after.figures, confidence)
        for name in after.figures
        if name in before.figures and not name.endswith("_stderr") and not name.startswith(_NO_GAIN)
    }


def _paired(first: _Measured | None, second: _Measured | None, name: str, confidence: float) -> Difference | None:
    """None where the two were not asked the same, or nearly."""
    if first is None or second is None:
        return None
    shared = first.tasks.keys() & second.tasks.keys()
    if 2 * len(shared) < min(len(first.tasks), len(second.tasks)):
        return None
    spread = 1.0 if name in _SHARES else max(first.high, second.high) - min(first.low, second.low)
    least = min(second.tasks[prompt].count for prompt in shared)
    pairs = [
        Pair(
            before=first.tasks[prompt].mean,
            after=second.tasks[prompt].mean,
            weight=second.tasks[prompt].count / least,
        )
        for prompt in sorted(shared)
    ]
    return paired(pairs, spread, confidence) if spread > 0 else None


def _apart(name: str, before: Mapping[str, float], after: Mapping[str, float], confidence: float) -> Difference:
    error = f"{name}_stderr"
    if error in before and error in after:
        return unpaired((before[name], before[error]), (after[name], after[error]), confidence)
    return Difference(delta=after[name] - before[name])


def _measured(evaluation: Evaluation) -> dict[str, _Measured]:
    """The figures that the samples bear out, task by task."""
    if evaluation.samples is None:
        return {}
    try:
        facts = evaluation.samples.stat()
        found = _read(evaluation.samples, facts.st_size, facts.st_mtime_ns, evaluation.success_threshold)
    except OSError:
        return {}
    reported = evaluation.figures
    return {name: told for name, told in found.items() if name in reported and told.agrees(reported[name])}


@lru_cache(maxsize=64)
def _read(file: Path, size: int, mtime_ns: int, success_threshold: float) -> Mapping[str, _Measured]:
    """Every figure of the samples; a file is read once, however many runs it is compared with."""
    found: defaultdict[str, _Measured] = defaultdict(_Measured)
    with open_regular(file) as stream:
        for line in lines_of(stream, LONGEST_ROW):
            sample = decoded(_decoder, line)
            if sample is None or not sample.prompt:
                continue  # torn, of another kind, or of a task that is not told
            prompt = hashlib.blake2b(bytes(sample.prompt) + bytes(sample.task), digest_size=16).digest()
            for name, value in _values(sample, success_threshold):
                found[name].add(prompt, value)
    return found


class _Sample(msgspec.Struct, gc=False):
    """What is read of a line of samples.jsonl; strangers write others."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    task: msgspec.Raw = msgspec.Raw(b"")  # among those with the same prompt
    score: Any = None
    temperature: Any = None
    tokens: Any = None
    finish: Any = None


_decoder = msgspec.json.Decoder(_Sample)


def _values(sample: _Sample, success_threshold: float) -> Iterable[tuple[str, float]]:
    """What one sample tells for which figure. Without a temperature it counts as sampled at 1."""
    score = _number(sample.score)
    correct = None if score is None else float(score > success_threshold)
    if sample.temperature == 0:
        values = {GREEDY: correct}
    else:
        truncated = None if sample.finish is None else float(sample.finish == "length")
        values = {CORRECT: correct, SCORE: score, LENGTH: _number(sample.tokens), TRUNCATED: truncated}
    return [(name, value) for name, value in values.items() if value is not None]


def _number(value: Any) -> float | None:
    return float(value) if _is_finite(value) else None


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold; whole numbers may be longer."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _figures(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name.startswith("eval/") and _is_finite(value)}


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
    """Tasks that the first and the last evaluation with answers share, those first that gained most."""
    files = sorted((run.path / "evals").glob("step_*/samples.jsonl"), key=_step_of)
    if len(files) < 2:
        return []
    before, after, threshold = _by_prompt(files[0]), _by_prompt(files[-1]), run.success_threshold
    shared = [
        Compared(
            prompt=last.get("prompt"),
            before=str(before[prompt].get("completion", "")),
            before_score=_score(before[prompt]),
            after=str(last.get("completion", "")),
            after_score=_score(last),
            success_threshold=threshold,
        )
        for prompt, last in after.items()
        if prompt in before
    ]
    return sorted(shared, key=lambda task: task.before_score - task.after_score)


def _step_of(samples: Path) -> int:
    digits = samples.parent.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def _by_prompt(file: Path) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in read_rows(file):
        found.setdefault(json.dumps([row.get("prompt"), row.get("task")]), row)
    return found


def _score(sample: Row) -> float:
    score = sample.get("score")
    return float(score) if isinstance(score, (int, float)) else 0.0


LOGGED = "logged.jsonl"
"""Rows that a foreign environment logged to W&B while it evaluated."""

EVAL = "eval/"


def figures_of(program: EnvironmentProgram, folder: Path, output: str) -> dict[str, Any]:
    """Its figures: numbers, each named `eval/...` (where its own name is another, `eval/` is put before it).

    Args:
        program: the environment.
        folder: its `data_dir_to_save_evals`.
        output: what it printed.

    Raises:
        EnvironmentFailed: it gave none.
    """
    found = _reported(folder) if program.is_foreign else _printed(output)
    if found is None:
        how = "`evaluate` has to give them to evaluate_log, or to the next wandb_log under names that begin with eval/."
        raise EnvironmentFailed(
            f"The evaluation of {program.path.name} gave no figures.",
            how if program.is_foreign else "`evaluate` has to return them, or to give them to evaluate_log.",
        )
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {name if name.startswith(EVAL) else EVAL + name: value for name, value in numbers.items()}


def _printed(output: str) -> Mapping[str, Any] | None:
    for line in reversed(output.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    return None


class _Results(msgspec.Struct):
    all: dict[str, Any]


class _Report(msgspec.Struct):
    """metrics.json, as far as it is read."""

    results: _Results


def _reported(folder: Path) -> Mapping[str, Any] | None:
    rows = read_rows(folder / LOGGED)
    logged = {name: value for row in rows for name, value in row.items() if name.startswith(EVAL)}
    try:
        reported = msgspec.json.decode(read_regular(folder / "metrics.json"), type=_Report).results.all
    except (OSError, *NOT_JSON):
        reported = {}
    return {**logged, **reported} or None
