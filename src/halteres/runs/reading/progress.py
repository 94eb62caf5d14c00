"""What a run has reached, read from its directory.

Owns: the few figures that whoever watches wants to see while a run goes on.
Never: prints, writes, waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halteres.config import environ
from halteres.files import NOT_JSON, open_regular, read_regular
from halteres.observe.metrics import decoded, read_lines
from halteres.observe.sinks import read_reports
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.alerts import Alert, read_alerts
from halteres.runs.state import RunState

Series = tuple[tuple[int, float], ...]
"""(step, value), ascending."""

RECENT = 8
"""Steps whose pace is taken for the pace of those to come."""


MANY = 0.5
"""From this share of a step's groups on, those that were dropped are told of."""

FAILED_ROLLOUTS, DROPPED_GROUPS = "rollouts/failed/", "groups/dropped/"
"""Before a reason: counts in an environment's row."""


class FailedEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation that gave no figures."""

    step: int
    why: str

    def __str__(self) -> str:
        return f"evaluation after step {self.step} failed: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroups:
    """Groups of a step that the environment did not send."""

    reasons: Mapping[str, int]
    num_groups: int  # that were scored

    @property
    def are_many(self) -> bool:
        """Whether a step's rewards tell little of its rollouts."""
        return sum(self.reasons.values()) >= MANY * self.num_groups

    def __str__(self) -> str:
        return f"{sum(self.reasons.values())} of {self.num_groups} groups dropped ({', '.join(self.reasons)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a run."""

    status: str
    phase: str | None
    step: int
    total_steps: int
    resumed_at: int  # the step that a resumed run began after; 0 for a fresh one
    reward: Series  # mean over the batch, reward units
    success: Series  # share of rollouts whose score is a success
    evaluation: Series  # held-out share correct at temperature 1
    recent_s: tuple[float, ...]  # seconds of each of the last steps
    alerts: tuple[Alert, ...]
    error: str | None
    correct: Series = ()  # share of all rollouts that are a success, also of groups that were dropped
    evaluated_tasks: Series = ()  # held-out tasks that an evaluation's figures are of
    failed_tasks: Series = ()  # ... and those that failed, which they are not of
    failed_rollouts: Mapping[str, int] = field(default_factory=dict[str, int])  # by the failure's code, of all steps
    dropped: Mapping[int, DroppedGroups] = field(default_factory=dict[int, DroppedGroups])  # by step
    loss_per_token: Series = ()
    kl: Series = ()  # kl_sample_train_v2: how far sampler and trainer disagree
    kl_reference: Series = ()  # how far the policy is from its reference, nats per token
    implicit_reward_gap: Series = ()  # ... further towards its better answers than towards its worse ones
    share_of_gain: Series = ()  # of the reward's held-out gain, what the worst member of the panel confirms
    without_signal: Series = ()  # share of groups whose scores are all equal
    skipped_steps: int = 0  # steps that moved no weight: the scores of each of their groups were all equal
    policy_version: int | None = None  # optimiser steps that the newest weights have had; less than steps where skipped
    update_norm: float | None = None  # of what the adapter adds to the base weights, relative to them
    preferred: Series = ()  # of a reward model: share of the trained pairs whose better side scores higher
    held_out_preferred: Series = ()  # ... and of the held-out ones
    sinks: tuple[str, ...] = ()  # where its metrics are forwarded to, a line each
    eval_failed: tuple[FailedEvaluation, ...] = ()  # in the order of their ends
    no_evaluation: str = ""  # why the environment is not evaluated at all
    evaluation_s: float = 0.0  # seconds that the evaluation after the last step will take, by the newest one

    @property
    def step_s(self) -> float | None:
        """Median seconds of the last steps; None before the first."""
        return sorted(self.recent_s)[len(self.recent_s) // 2] if self.recent_s else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds left by the last steps' pace, the last evaluation included, or None before the first."""
        return None if self.step_s is None else self.step_s * self._left + self.evaluation_s

    @property
    def remaining_between_s(self) -> tuple[float, float] | None:
        """The same by the faster and by the slower of the last steps (their quartiles)."""
        if not self.recent_s:
            return None
        ordered = sorted(self.recent_s)
        quartiles = ordered[len(ordered) // 4], ordered[len(ordered) * 3 // 4]
        low, high = (step_s * self._left + self.evaluation_s for step_s in quartiles)
        return low, high

    @property
    def success_rates(self) -> Series:
        """Share of rollouts that are a success: of all of them, or (of a foreign environment) of those in the batch."""
        return self.correct or self.success

    def tasks_evaluated(self, step: int) -> str:
        """Of how many held-out tasks an evaluation's figures are, where others failed; else nothing."""
        done, failed = (int(dict(series).get(step, 0)) for series in (self.evaluated_tasks, self.failed_tasks))
        return f"of {done} of {done + failed} tasks; {failed} failed, see the run's log 'eval'" if failed else ""

    def evaluation_line(self, step: int, share: float) -> str:
        """An evaluation's figure as a sentence."""
        partly = self.tasks_evaluated(step)
        return f"evaluation after step {step}: {share:.1%} correct on held-out tasks{f' ({partly})' if partly else ''}"

    @property
    def unevaluated(self) -> FailedEvaluation | None:
        """The newest evaluation, where it failed and none came after it."""
        newest = self.eval_failed[-1] if self.eval_failed else None
        return newest if newest and newest.step > max((step for step, _ in self.evaluation), default=-1) else None

    @property
    def _left(self) -> int:
        return max(0, self.total_steps - self.step)


def read_progress(run: RunDirectory, state: RunState | None = None) -> Progress:
    """Look at the run now; `state`: where it was read just before."""
    state = state or run.state()
    lines = read_lines(run.path / "metrics.jsonl")
    rows = [row for line in lines if (row := decoded(_decoder, line)) is not None]
    events = read_lines(run.path / "events.jsonl")
    reward, evaluation = _series(rows, lambda row: row.reward), _series(rows, lambda row: row.evaluation)
    preferred = _series(rows, lambda row: row.preferred)
    trained = reward or preferred
    evaluated_last = bool(evaluation) and evaluation[-1][0] >= state.total_steps
    return Progress(
        status=state.status,
        phase=state.phase,
        step=trained[-1][0] if trained else 0,
        total_steps=state.total_steps,
        resumed_at=int((state.resume_point or {}).get("step", 0)),
        reward=reward,
        success=_series(rows, lambda row: row.success),
        preferred=preferred,
        held_out_preferred=_series(rows, lambda row: row.held_out_preferred),
        evaluation=evaluation,
        recent_s=tuple(seconds for _, seconds in _series(rows, lambda row: row.step_s)[-RECENT:]),
        alerts=read_alerts(run.path / "events.jsonl"),
        eval_failed=tuple(FailedEvaluation(step=it.step, why=it.error) for it in _events(events, "eval_failed")),
        no_evaluation=next((event.error for event in _events(events, "no_evaluation")), ""),
        error=state.error,
        correct=_series(rows, lambda row: row.correct),
        evaluated_tasks=_series(rows, lambda row: row.num_tasks),
        failed_tasks=_series(rows, lambda row: row.num_failed),
        failed_rollouts=_failed_rollouts(lines),
        dropped=_dropped(lines),
        loss_per_token=_series(rows, lambda row: row.loss_per_token),
        kl=_series(rows, lambda row: row.kl),
        kl_reference=_series(rows, lambda row: row.kl_reference),
        implicit_reward_gap=_series(rows, lambda row: row.implicit_reward_gap),
        share_of_gain=_series(rows, lambda row: row.share_of_gain),
        without_signal=_series(rows, lambda row: row.without_signal),
        skipped_steps=sum(value > 0 for _, value in _series(rows, lambda row: row.skipped)),
        policy_version=next((int(value) for _, value in reversed(_series(rows, lambda row: row.version))), None),
        update_norm=next((value for _, value in reversed(_series(rows, lambda row: row.update_norm))), None),
        sinks=tuple(f"{name}: {it.line}" for name, it in read_reports(run.path).items() if it.state != "starting"),
        evaluation_s=0.0 if evaluated_last else _last_evaluation_s(events),
    )


def last_reward(run: RunDirectory) -> float | None:
    """The newest reward alone, from the end of the file: a list of runs asks for many."""
    try:
        with open_regular(run.path / "metrics.jsonl") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _END_BYTES))
            lines = stream.read().split(b"\n")
    except OSError:
        return None
    rows = (row for line in reversed(lines) if (row := decoded(_decoder, line)) is not None)
    return next((row.reward for row in rows if row.reward is not None), None)


_END_BYTES = 16 * 1024


class _Row(msgspec.Struct, kw_only=True, gc=False):
    """What is read of a row of metrics.jsonl: decoding the rest of it would cost ten times as much."""

    step: int
    reward: float | None = msgspec.field(name="reward/mean", default=None)
    success: float | None = msgspec.field(name="reward/success", default=None)
    evaluation: float | None = msgspec.field(name="eval/percent_correct", default=None)
    num_tasks: float | None = msgspec.field(name="eval/num_tasks", default=None)
    num_failed: float | None = msgspec.field(name="eval/num_failed", default=None)
    correct: float | None = msgspec.field(name="train/percent_correct", default=None)
    loss_per_token: float | None = msgspec.field(name="train/loss_per_token", default=None)
    skipped: float | None = msgspec.field(name="train/skipped", default=None)
    version: float | None = msgspec.field(name="policy/version", default=None)
    update_norm: float | None = msgspec.field(name="policy/update_norm", default=None)
    kl: float | None = msgspec.field(name="kl_sample_train_v2", default=None)
    kl_reference: float | None = msgspec.field(name="policy/kl_reference", default=None)
    implicit_reward_gap: float | None = msgspec.field(name="policy/implicit_reward_gap", default=None)
    share_of_gain: float | None = msgspec.field(name="eval/panel/share_of_gain", default=None)
    without_signal: float | None = msgspec.field(name="groups/without_signal", default=None)
    step_s: float | None = msgspec.field(name="time/step", default=None)
    preferred: float | None = msgspec.field(name="accuracy", default=None)
    held_out_preferred: float | None = msgspec.field(name="eval_accuracy", default=None)


_decoder = msgspec.json.Decoder(_Row)


_counts_decoder = msgspec.json.Decoder(dict[str, Any])


def _counts(lines: Sequence[bytes], prefix: str) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """Rows that count something under names with this prefix, and these counts by what comes after it."""
    mark, found = f'"{prefix}'.encode(), list[tuple[dict[str, Any], dict[str, int]]]()
    for line in lines:
        if mark in line and (row := decoded(_counts_decoder, line)) is not None:
            counts = {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}
            found.append((row, {name: count for name, count in counts.items() if isinstance(count, int)}))
    return found


def _failed_rollouts(lines: Sequence[bytes]) -> dict[str, int]:
    total = Counter[str]()
    for _, counts in _counts(lines, FAILED_ROLLOUTS):
        total.update(counts)
    return dict(total)


def _dropped(lines: Sequence[bytes]) -> dict[int, DroppedGroups]:
    found = dict[int, DroppedGroups]()
    for row, counts in _counts(lines, DROPPED_GROUPS):
        others = (row.get(name) for name in ("groups/sent", "groups/kept", "groups/set_aside"))
        num_groups = sum(counts.values()) + sum(other for other in others if isinstance(other, int))
        if isinstance(step := row.get("step"), int):
            found[step] = DroppedGroups(reasons=counts, num_groups=num_groups)
    return found


class _Event(msgspec.Struct, kw_only=True, gc=False):
    """What is read of a row of events.jsonl."""

    type: str
    step: int = 0
    took_s: float = 0.0
    error: str = ""


_event_decoder = msgspec.json.Decoder(_Event)


def _events(lines: Sequence[bytes], kind: str) -> list[_Event]:
    """Events of this kind; most lines are looked at and not decoded."""
    mark, found = b'"' + kind.encode() + b'"', list[_Event]()
    for line in lines:
        if mark in line and (event := decoded(_event_decoder, line)) is not None:
            found.append(event)
    return [event for event in found if event.type == kind]


def _last_evaluation_s(lines: Sequence[bytes]) -> float:
    """How long the newest evaluation took; 0 before the first."""
    evaluated = _events(lines, "eval")
    return evaluated[-1].took_s if evaluated else 0.0


def _series(rows: Sequence[_Row], value_of: Callable[[_Row], float | None]) -> Series:
    """One metric over the steps; where a step was told twice, the last word holds."""
    values = {row.step: value for row in rows if (value := value_of(row)) is not None}
    return tuple(sorted(values.items()))


class GivenRun(msgspec.Struct, frozen=True, kw_only=True):
    """Section `run`."""

    wandb_project: str | None = None
    wandb_entity: str | None = None

    @property
    def project(self) -> str:
        """As `RunSettings.project`."""
        return self.wandb_project or environ.wandb_project()


class GivenTrainer(msgspec.Struct, frozen=True, kw_only=True):
    """Section `trainer`."""

    eval_every: int = 0
    learning_rate: float | None = None


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What was given."""

    run: GivenRun = GivenRun()
    env: dict[str, Any] = {}
    trainer: GivenTrainer = GivenTrainer()


def read_given(run: RunDirectory) -> Given:
    """The run's settings, as far as they matter here; nothing was given where they cannot be read."""
    try:
        return msgspec.json.decode(read_regular(run.path / "settings.json"), type=Given)
    except (OSError, *NOT_JSON):
        return Given()
