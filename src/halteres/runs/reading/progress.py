"""What a run has reached, read from its directory: figures of its steps, alerts, how its processes
are.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halteres.config import environ
from halteres.config.file_training import FILE
from halteres.files import NOT_JSON, open_regular, read_regular
from halteres.observe.metrics import Row, decoded, events_of, read_lines
from halteres.observe.sinks import read_reports
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.alerts import Alert, alerts_of
from halteres.runs.reading.status_figures import (
    HELD_OUT_LOSS,
    HELD_OUT_PER_TOKEN,
    LOSS,
    METRICS,
    REWARD,
    SUCCESS,
    SUCCESS_OF_ALL,
    Series,
)
from halteres.runs.state import RunState
from halteres.short_texts import rounded

RECENT = 8  # steps whose pace is taken for the pace of those to come
EDGE = 12  # rows at each end of the file that are read whole
MANY = 0.5  # from this share of a step's groups on, those that were dropped are reported

FAILED_ROLLOUTS, DROPPED_GROUPS = "rollouts/failed/", "groups/dropped/"
"""Before a reason: counts in an environment's row."""

SEED_ROLES = ("api", "trainer", "env")
"""Processes that every RL run has: clients of the seeds read them without asking whether they are
there.
"""


def conditions(state: RunState) -> dict[str, str]:
    """Every process of the run, in words."""
    roles = list(state.processes)
    if state.kind == "rl":
        roles = list(dict.fromkeys((*SEED_ROLES, *state.processes)))
    return {role: condition(state.processes.get(role, {})) for role in roles}


def signal_name(number: int) -> str:
    """SIGKILL, or "signal 77" where the system has no name for it."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")


def condition(facts: Mapping[str, Any]) -> str:
    """One process of run.json, in words: "running", "exited (N)" (the seeds' two), "ended by
    SIGKILL" and others.
    """
    code, state = facts.get("exit"), str(facts.get("state") or "")
    # else it was the run that ended it
    if isinstance(code, int) and code < 0 and not state.startswith("ended"):
        return f"ended by {signal_name(-code)}"
    if code is None and not facts.get("pid"):
        return "not started"
    if state:
        return state
    if code is None:
        return "running"
    if isinstance(code, int):
        return f"exited ({code})"
    return "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvaluation:
    """An evaluation that gave no figures."""

    step: int
    why: str

    def __str__(self) -> str:
        return f"evaluation after step {self.step} failed: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroups:
    """Groups of a step, or of a run, that the environment did not send."""

    reasons: Mapping[str, int]
    num_groups: int  # that were scored

    @property
    def are_many(self) -> bool:
        """Whether a step's rewards tell little of its rollouts."""
        return sum(self.reasons.values()) >= MANY * self.num_groups

    @property
    def facts(self) -> dict[str, Any]:
        """As an answer has it: how many, of how many, their share, and how many for each reason."""
        number = sum(self.reasons.values())
        share = rounded(number / self.num_groups, 3)
        return {"number": number, "of": self.num_groups, "share": share, "why": dict(self.reasons)}

    def __str__(self) -> str:
        return (
            f"{sum(self.reasons.values())} of {self.num_groups} groups dropped "
            f"({', '.join(self.reasons)})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a run."""

    status: str
    phase: str | None
    step: int
    total_steps: int
    resumed_at: int  # the step that a resumed run began after; 0 for a fresh one
    # seconds of each of the last steps, without those that shared the engine with an evaluation
    recent_s: tuple[float, ...]
    alerts: tuple[Alert, ...]
    error: str | None
    reward: Series = ()  # mean over the batch, reward units
    success: Series = ()  # share of rollouts whose score is a success
    evaluation: Series = ()  # held-out share correct at temperature 1
    # share of all rollouts that are a success, also of groups that were dropped
    correct: Series = ()
    evaluated_tasks: Series = ()  # held-out tasks that an evaluation's figures are of
    failed_tasks: Series = ()  # ... and those that failed, which they are not of
    # by the failure's code, of all steps
    failed_rollouts: Mapping[str, int] = field(default_factory=dict[str, int])
    # groups of all steps that went on their way to the trainer
    num_sent_groups: int = 0
    # by step
    dropped: Mapping[int, DroppedGroups] = field(default_factory=dict[int, DroppedGroups])
    # every column that a status reads, by its name in metrics.jsonl
    series: Mapping[str, Series] = field(default_factory=dict[str, Series])
    # whole rows from both ends of the file
    first_rows: tuple[Row, ...] = ()
    last_rows: tuple[Row, ...] = ()
    without_signal: Series = ()  # share of groups whose scores are all equal
    # steps that moved no weight: the scores of each of their groups were all equal
    skipped_steps: int = 0
    # optimiser steps that the newest weights have had; less than steps where skipped
    policy_version: int | None = None
    # of what the adapter adds to the base weights, relative to them
    update_norm: float | None = None
    # of a reward model: share of the trained pairs whose better side scores higher
    preferred: Series = ()
    loss: Series = ()  # of every trained step
    sinks: tuple[str, ...] = ()  # where its metrics are forwarded to, a line each
    eval_failed: tuple[FailedEvaluation, ...] = ()  # in the order of their ends
    no_evaluation: str = ""  # why the environment is not evaluated at all
    # seconds that the evaluation after the last step will take, by the newest one
    evaluation_s: float = 0.0

    @property
    def step_s(self) -> float | None:
        """Median seconds of the last steps; None before the first."""
        if self.recent_s:
            return sorted(self.recent_s)[len(self.recent_s) // 2]
        return None

    @property
    def remaining_s(self) -> float | None:
        """Seconds left by the last steps' pace, the last evaluation included, or None before the
        first.
        """
        if self.step_s is None:
            return None
        return self._remaining_s(self.step_s)

    @property
    def remaining_between_s(self) -> tuple[float, float] | None:
        """The same by the faster and by the slower of the last steps (their quartiles)."""
        if not self.recent_s:
            return None
        ordered = sorted(self.recent_s)
        return self._remaining_s(ordered[len(ordered) // 4]), self._remaining_s(
            ordered[len(ordered) * 3 // 4]
        )

    def _remaining_s(self, step_s: float) -> float:
        return step_s * max(0, self.total_steps - self.step) + self.evaluation_s

    @property
    def held_out_loss(self) -> Series:
        """Of a training on a file: nats per token of an answer, or a pair's loss."""
        return self.series.get(HELD_OUT_PER_TOKEN, ()) or self.series.get(HELD_OUT_LOSS, ())

    @property
    def success_rates(self) -> Series:
        """Share of rollouts that are a success: of all of them, or (of a foreign environment) of
        those in the batch.
        """
        return self.correct or self.success

    def tasks_evaluated(self, step: int) -> str:
        """Of how many held-out tasks an evaluation's figures are, where others failed; else
        nothing.
        """
        done, failed = (
            int(dict(series).get(step, 0)) for series in (self.evaluated_tasks, self.failed_tasks)
        )
        if failed:
            return f"of {done} of {done + failed} tasks; {failed} failed, see the run's log 'eval'"
        return ""

    def evaluation_line(self, step: int, share: float) -> str:
        """An evaluation's figure as a sentence."""
        line = f"evaluation after step {step}: {share:.1%} correct on held-out tasks"
        partly = self.tasks_evaluated(step)
        if partly:
            return f"{line} ({partly})"
        return line

    @property
    def dropped_groups(self) -> DroppedGroups | None:
        """Those of this run's own steps together; None where none was dropped."""
        reasons = Counter[str]()
        for step, dropped in self.dropped.items():
            if step > self.resumed_at:
                reasons.update(dropped.reasons)
        num_dropped = reasons.total()
        if not num_dropped:
            return None
        return DroppedGroups(reasons=dict(reasons), num_groups=num_dropped + self.num_sent_groups)

    @property
    def unevaluated(self) -> FailedEvaluation | None:
        """The newest evaluation, where it failed and none came after it."""
        newest = None
        if self.eval_failed:
            newest = self.eval_failed[-1]
        if newest and newest.step > max((step for step, _ in self.evaluation), default=-1):
            return newest
        return None


def read_progress(run: RunDirectory, state: RunState | None = None) -> Progress:
    """Look at the run now; `state`: where it was read just before."""
    state = state or run.state()
    lines, events = read_lines(run.path / "metrics.jsonl"), read_lines(run.path / "events.jsonl")
    decoded_rows = [decoded(_decoder, line) for line in lines]

    series = _series_of([row for row in decoded_rows if row is not None])
    over_steps = {name: series.get(column, ()) for name, column in _NAMES.items()}
    evaluation, evaluated = over_steps["evaluation"], events_of(events, "eval")
    # nothing once the last evaluation is over
    evaluation_s = 0.0
    if evaluated and not (evaluation and evaluation[-1][0] >= state.total_steps):
        evaluation_s = evaluated[-1].get("took_s", 0.0)
    policy_version = _newest(series.get(_VERSION, ()))
    if policy_version is not None:
        policy_version = int(policy_version)
    step = 0
    trained = over_steps["reward"] or over_steps["preferred"] or over_steps["loss"]
    if trained:
        step = trained[-1][0]
    failed_rollouts = Counter[str]()
    for _, counts in _counts(lines, FAILED_ROLLOUTS):
        failed_rollouts.update(counts)
    dropped: dict[int, DroppedGroups] = {}
    for row, counts in _counts(lines, DROPPED_GROUPS):
        others = (row.get(name) for name in ("groups/sent", "groups/kept", "groups/set_aside"))
        num_groups = sum(counts.values()) + sum(other for other in others if isinstance(other, int))
        at = row.get("step")
        if isinstance(at, int):
            dropped[at] = DroppedGroups(reasons=counts, num_groups=num_groups)
    began_after = resumed_at(state)
    num_sent_groups = sum(
        count
        for column in _ON_THEIR_WAY
        for at, count in series.get(column, ())
        if at > began_after
    )
    return Progress(
        status=state.status,
        phase=state.phase,
        step=step,
        total_steps=state.total_steps,
        resumed_at=began_after,
        num_sent_groups=int(num_sent_groups),
        recent_s=_recent_s(decoded_rows, evaluated),
        alerts=alerts_of(events),
        eval_failed=tuple(
            FailedEvaluation(step=it.get("step", 0), why=it.get("error", ""))
            for it in events_of(events, "eval_failed")
        ),
        no_evaluation=next(
            (event.get("error", "") for event in events_of(events, "no_evaluation")), ""
        ),
        error=state.error,
        failed_rollouts=dict(failed_rollouts),
        dropped=dropped,
        skipped_steps=sum(value > 0 for _, value in series.get(_SKIPPED, ())),
        policy_version=policy_version,
        update_norm=_newest(series.get(_NORM, ())),
        sinks=tuple(
            f"{name}: {it.line}"
            for name, it in read_reports(run.path).items()
            if it.state != "starting"
        ),
        evaluation_s=evaluation_s,
        series=series,
        first_rows=_whole(lines[:EDGE]),
        last_rows=_whole(lines[-EDGE:]),
        **over_steps,
    )


def resumed_at(state: RunState) -> int:
    """The step that a resumed run began after; 0 for a fresh one."""
    return int((state.resume_point or {}).get("step", 0))


def last_reward(run: RunDirectory) -> float | None:
    """The newest reward alone, from the end of the file: a list of runs asks for many."""
    try:
        with open_regular(run.path / "metrics.jsonl") as stream:
            stream.seek(max(0, stream.seek(0, 2) - 16 * 1024))
            lines = stream.read().split(b"\n")
    except OSError:
        return None
    rows = (decoded(_decoder, line) for line in reversed(lines))
    rewards = (getattr(row, _REWARD_FIELD) for row in rows if row is not None)
    return next((reward for reward in rewards if reward is not None), None)


_NAMES = {
    "reward": REWARD,
    "success": SUCCESS,
    "evaluation": "eval/percent_correct",
    "evaluated_tasks": "eval/num_tasks",
    "failed_tasks": "eval/num_failed",
    "correct": SUCCESS_OF_ALL,
    "without_signal": "groups/without_signal",
    "preferred": "accuracy",
    "loss": LOSS,
}
"""Series of `Progress` by its own names, and their columns."""

_SKIPPED, _VERSION, _NORM, _STEP_S = (
    "train/skipped",
    "policy/version",
    "policy/update_norm",
    "time/step",
)

_ON_THEIR_WAY = ("groups/sent", "groups/kept")  # counts in an environment's row

_COLUMNS = tuple(
    dict.fromkeys((*_NAMES.values(), *METRICS, _SKIPPED, _VERSION, _NORM, _STEP_S, *_ON_THEIR_WAY))
)

_FIELDS = [f"column_{number}" for number in range(len(_COLUMNS))]

_Row = msgspec.defstruct(
    "_Row",
    [
        ("step", int),
        ("t", float | None, None),  # unix seconds, when it was written
        *(
            (field, float | None, msgspec.field(name=column, default=None))
            for field, column in zip(_FIELDS, _COLUMNS, strict=True)
        ),
    ],
    kw_only=True,
    gc=False,
)
"""What is read of a row of metrics.jsonl: decoding the rest of it would cost ten times as much."""

_decoder = msgspec.json.Decoder(_Row)
_row_decoder = msgspec.json.Decoder(Row)
_REWARD_FIELD = _FIELDS[_COLUMNS.index(REWARD)]
_STEP_S_FIELD = _FIELDS[_COLUMNS.index(_STEP_S)]


def _recent_s(rows: Iterable[Any], evaluated: Sequence[Row]) -> tuple[float, ...]:
    """Seconds of each of the last steps that no evaluation overlapped; where all were overlapped,
    of all of the last.

    Args:
        rows: decoded, in the order of writing.
        evaluated: the events of evaluations that are done.
    """
    spans = [
        (event["t"] - event.get("took_s", 0.0), event["t"]) for event in evaluated if "t" in event
    ]
    undisturbed, every = dict[int, float](), dict[int, float]()
    for row in rows:
        seconds = getattr(row, _STEP_S_FIELD, None)
        if seconds is None:
            continue
        every[row.step] = seconds
        undisturbed.pop(row.step, None)
        at = row.t
        if at is None or not any(at - seconds < end and begin < at for begin, end in spans):
            undisturbed[row.step] = seconds
    chosen = undisturbed or every
    return tuple(seconds for _, seconds in sorted(chosen.items())[-RECENT:])


def _series_of(rows: Sequence[Any]) -> dict[str, Series]:
    """Every column that has values, over the steps; where a step has several, the last holds."""
    found: dict[str, Series] = {}
    for place, column in zip(_FIELDS, _COLUMNS, strict=True):
        values: dict[int, float] = {}
        for row in rows:
            value = getattr(row, place)
            if value is not None:
                values[row.step] = value
        if values:
            found[column] = tuple(sorted(values.items()))
    return found


def _newest(series: Series) -> float | None:
    """The last value; None where there is none."""
    if series:
        return series[-1][1]
    return None


def _whole(lines: Iterable[bytes]) -> tuple[Row, ...]:
    """These rows with all that they hold."""
    found = (decoded(_row_decoder, line) for line in lines)
    return tuple(row for row in found if row is not None)


def _counts(lines: Sequence[bytes], prefix: str) -> list[tuple[Row, dict[str, int]]]:
    """Rows that count something under names with this prefix, and these counts by what comes after
    it.
    """
    mark, found = f'"{prefix}'.encode(), list[tuple[Row, dict[str, int]]]()
    for row in _whole(line for line in lines if mark in line):
        counts = {
            name.removeprefix(prefix): count
            for name, count in row.items()
            if name.startswith(prefix) and isinstance(count, int)
        }
        found.append((row, counts))
    return found


class GivenRun(msgspec.Struct, frozen=True, kw_only=True):
    """Section `run`."""

    wandb_project: str | None = None

    @property
    def project(self) -> str:
        """As `RunSettings.project`."""
        return self.wandb_project or environ.wandb_project()


class GivenTrainer(msgspec.Struct, frozen=True, kw_only=True):
    """Section `trainer`."""

    eval_every: int = 0
    learning_rate: float | None = None


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run, of whatever version, as far as its readers need them."""

    run: GivenRun = GivenRun()
    env: dict[str, Any] = {}
    trainer: GivenTrainer = GivenTrainer()
    data: dict[str, Any] = {}  # section `data`, of a training on a file


def read_given(run: RunDirectory) -> Given:
    """From settings.json and, of a training on a file, file_training.json; nothing was given where
    they cannot be read.
    """
    try:
        given = msgspec.json.decode(read_regular(run.path / "settings.json"), type=Given)
    except (OSError, *NOT_JSON):
        return Given()
    try:
        data = msgspec.json.decode(read_regular(run.path / FILE), type=dict[str, Any])
    except (OSError, *NOT_JSON):
        return given
    return msgspec.structs.replace(given, data=data)
