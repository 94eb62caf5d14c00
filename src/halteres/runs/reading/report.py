"""A run at one instant: state, health, figures, trend, time left, alerts that matter, how it
failed, why it waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halteres.clients import json_client
from halteres.config import environ
from halteres.errors import HalteresError
from halteres.observe.plots import sparkline
from halteres.observe.sinks import read_reports
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.alerts import FOR_GOOD, GRAVE, UNHURRIED, Alert, in_force, stalled
from halteres.runs.reading.failures import FailedProcess, failed_process
from halteres.runs.reading.progress import Given, Progress, Series, read_given, read_progress
from halteres.runs.servers import servers_of
from halteres.runs.state import RunState, Status
from halteres.short_texts import clipped, rounded

StateWord = Literal["running", "finished", "crashed"]

_STATE_WORDS: Mapping[Status, StateWord] = {
    "stopped": "finished",
    "completed": "finished",
    "failed": "crashed",
}

TREND_WIDTH, TREND_GROUPS = 16, 8
SMALL_UPDATE, SMALL_UPDATE_STEPS = 1e-4, 5
"""Below which norm of the update, relative to the base weights, they have hardly moved; after how
many steps that is judged. The built-in model on arithmetic: 1.3e-2 after 5 steps with its learning
rate of 1.5e-3, 1.2e-5 after 8 with 1e-6.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One that training can go on from."""

    step: int | None
    path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A run as it was found."""

    run: RunDirectory
    state: RunState
    progress: Progress
    given: Given
    alerts: tuple[Alert, ...]  # the last of each rule: grave ones first, then the newest
    failed_process: FailedProcess | None  # of a failed run
    at: float  # unix seconds

    @property
    def step(self) -> int:
        """Optimiser steps done; the trainer's own row may be there before run.json says so."""
        return max(self.state.step, self.progress.step)

    @property
    def state_word(self) -> StateWord:
        """In W&B's words."""
        return _STATE_WORDS.get(self.state.status, "running")

    @property
    def minutes(self) -> float:
        """From the run's creation to now, or to its end."""
        return round(max(0.0, (self.state.ended_at or self.at) - self.state.created_at) / 60, 1)

    @property
    def eta_minutes(self) -> list[int | float] | None:
        """How long it will still take, at least and at most; None before the first step and after
        the last.
        """
        between = self.progress.remaining_between_s
        if between is None or self.state.status != "running":
            return None
        return [
            round(seconds / 60, 1) if seconds < 600 else round(seconds / 60) for seconds in between
        ]

    @property
    def health(self) -> str:
        """healthy, alert, failing; of a run that has ended, how."""
        if self.state.terminal:
            return self.state.status
        current = in_force(self.alerts, self.step)
        # A process that has died will be started again, or take the run along; but some are ended
        # by us.
        are_ended = self.state.status == "stopping" or self.state.phase == "evaluation"
        exits = [facts.get("exit") for facts in self.state.processes.values()]
        if not are_ended and any(code not in (None, 0) for code in exits):
            return "failing"
        if any(alert.rule in GRAVE for alert in current):
            return "failing"
        return "alert" if current else "healthy"

    @property
    def pressing(self) -> Alert | None:
        """The alert in force whose remedy comes before anything else; None where the run may be
        waited for.
        """
        current = [
            alert for alert in in_force(self.alerts, self.step) if alert.rule not in UNHURRIED
        ]
        return min(current, key=lambda alert: alert.rule not in (*FOR_GOOD, *GRAVE), default=None)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The newest figures; those of the seeds are null where there is none yet. `eval_step`: the
        older step that the evaluation is of; `policy_version`: optimiser steps taken, where steps
        were skipped.
        """
        progress = self.progress
        # of held-out tasks; the figure is then of the others alone
        failed = _newest(progress.failed_tasks)
        seeds = {
            "step": progress.step,
            "reward_mean": _newest(progress.reward),
            "percent_correct": _newest(progress.correct or progress.success),
            "eval_percent_correct": _newest(progress.evaluation),
        }
        ours = {
            "eval_step": progress.evaluation[-1][0] if progress.evaluation else None,
            "eval_num_failed": failed or None,
            "eval_num_tasks": _newest(progress.evaluated_tasks) if failed else None,
            "loss_per_token": _newest(progress.loss_per_token),
            "kl": _newest(progress.kl),
            "kl_reference": _newest(progress.kl_reference),
            "implicit_reward_gap": _newest(progress.implicit_reward_gap),
            "share_of_gain": _newest(progress.share_of_gain),
            "accuracy": _newest(progress.preferred),
            "eval_accuracy": _newest(progress.held_out_preferred),
            **self.skipped,
        }
        return {**seeds, **{name: value for name, value in ours.items() if value is not None}}

    @property
    def skipped(self) -> dict[str, Any]:
        """How many steps moved no weight, and how many optimiser steps there were; nothing where
        all steps did.
        """
        skipped, version = self.progress.skipped_steps, self.progress.policy_version
        return {"skipped_steps": skipped, "policy_version": version} if skipped else {}

    @property
    def hardly_moved(self) -> str:
        """A sentence on weights that are nearly the base model's after several steps; else
        nothing.
        """
        norm = self.progress.update_norm
        if norm is None or norm >= SMALL_UPDATE or self.step < SMALL_UPDATE_STEPS:
            return ""
        return (
            f"The weights have hardly moved: the adapter's update has {norm:.1e} of the norm of "
            "the base weights "
            f"(usually above {SMALL_UPDATE:.0e}) after {self.step} steps. A larger learning_rate "
            "moves them more."
        )

    @property
    def trend(self) -> dict[str, Any]:
        """Where the figures are going: the reward's curve from first to last, groups that teach
        nothing.
        """
        curve, silent = (
            self.progress.reward,
            [share for _, share in self.progress.without_signal[-TREND_GROUPS:]],
        )
        if not curve:
            return {}
        bars = sparkline([value for _, value in curve], TREND_WIDTH)
        answer = {
            "reward_mean": f"{bars} {rounded(curve[0][1], 3):g}->{rounded(curve[-1][1], 3):g}"
        }
        return (
            {**answer, "groups_without_signal": rounded(sum(silent) / len(silent), 3)}
            if silent
            else answer
        )

    @property
    def last_checkpoint(self) -> Checkpoint | None:
        """The newest one that training can go on from."""
        newest = self.state.last_checkpoint
        return (
            Checkpoint(step=newest.get("step"), path=newest.get("state_path")) if newest else None
        )

    @property
    def suggested_wait_s(self) -> int:
        """How long to wait before the next look pays: some ten steps."""
        if self.state.terminal:
            return 0
        if self.progress.step_s is None or self.state.status != "running":
            return 20
        return max(5, min(int(environ.longest_wait_s()), math.ceil(10 * self.progress.step_s)))


def snapshot_of(run: RunDirectory) -> RunSnapshot:
    """The run as it is now."""
    state = run.state()
    progress = read_progress(run, state)
    hanging = stalled(run, state)  # a supervisor that hangs raises no alert itself
    raised = [alert for alert in progress.alerts if hanging is None or alert.rule != hanging.rule]
    raised.sort(key=lambda alert: (alert.rule in GRAVE, alert.step), reverse=True)
    return RunSnapshot(
        run=run,
        state=state,
        progress=progress,
        alerts=(*((hanging,) if hanging else ()), *raised),
        given=read_given(run),
        failed_process=failed_process(state),
        at=time.time(),
    )


def _newest(series: Series) -> float | None:
    return rounded(series[-1][1], 3) if series else None


def failure_facts(snapshot: RunSnapshot) -> dict[str, Any]:
    """What the answer on a failed run has beside the rest; nothing for any other."""
    if snapshot.state.status != "failed":
        return {}
    return {
        "error": clipped(error_of(snapshot), 300),
        "code": snapshot.state.code or "internal",
        "exit": snapshot.failed_process.facts if snapshot.failed_process else None,
        "resumable": snapshot.state.resumable,
        "last_checkpoint": snapshot.last_checkpoint,
    }


def error_of(snapshot: RunSnapshot) -> str:
    """The error, with the way on as it is now: a checkpoint may have been written since."""
    failure = snapshot.state.failure
    if failure is None:
        return snapshot.state.error or "The run failed."
    newest = snapshot.last_checkpoint if snapshot.state.resumable else None
    if failure.first:
        way_on = f"{failure.first}, then {'resume' if newest else 'start again'}."
    elif newest:
        way_on = f"`next` goes on from step {newest.step}."
    else:
        way_on = "There is no checkpoint to go on from: `next` starts again."
    return " ".join(part for part in (failure.what, failure.why, way_on) if part)


def wandb_names(state: RunState, given: Given) -> dict[str, str]:
    """What W&B calls the run."""
    return {"wandb_project": given.run.project, "wandb_run_name": state.default_name}


def sink_facts(run: RunDirectory) -> dict[str, Any]:
    """Where the metrics are forwarded to: `wandb_url`; `wandb` and `wandb_error`, how that sink is;
    `sinks`, of each how it is and what to do.
    """
    reports = read_reports(run.path)
    wandb = reports.get("wandb")
    error = wandb.note if wandb and wandb.state == "failed" else None
    notes = {
        name: report.line
        for name, report in reports.items()
        if report.note and report.note != error
    }
    return {
        **({"wandb_url": wandb.url, "wandb": wandb.state} if wandb else {}),
        **({"wandb_error": error} if error else {}),
        **({"sinks": notes} if notes else {}),
    }


QUIET_S, QUIET_STEPS = 10.0, 2.0
"""So long, and for the time of so many steps, no figures came: a run between two steps is no run
without a batch.
"""

_WAITING = {("running", None), ("starting", "trainer"), ("starting", "environment")}
"""Status and phase of a run whose trajectory server is up and whose trainer is at work, or about to
be.
"""

GROUPS_FAILED = "groups_failed"
"""The rule of an environment whose groups all fail: the server sees only that none comes."""

ANSWER_WITHIN_S = 0.5
LENGTH = 160


def why_no_batch(snapshot: RunSnapshot) -> str | None:
    """One sentence on a run that waits for a batch longer than its steps take; None for any
    other.
    """
    if not _waits(snapshot) or (server := servers_of(snapshot.run).trajectories) is None:
        return None
    for alert in snapshot.alerts:
        if alert.rule == GROUPS_FAILED and alert.step > snapshot.step:
            return clipped(alert.evidence, LENGTH)
    try:
        found = json_client.get_json(f"{server.url}/v1/diagnostics", ANSWER_WITHIN_S, server.key)
    except HalteresError:
        return None
    if found.get("batch_ready") and not found.get("parked"):
        return None
    reasons = found.get("reasons")
    first = (
        reasons[0] if isinstance(reasons, list) and reasons and isinstance(reasons[0], dict) else {}
    )
    sentence = found.get("why") or first.get("sentence")
    return clipped(sentence, LENGTH) if isinstance(sentence, str) and sentence else None


def _waits(snapshot: RunSnapshot) -> bool:
    """Whether the trainer wants batches, and has written no figures for a while."""
    if (snapshot.state.status, snapshot.state.phase) not in _WAITING:
        return False
    last = snapshot.state.started_at or snapshot.state.created_at
    try:
        metrics = (snapshot.run.path / "metrics.jsonl").stat()
        last = max(last, metrics.st_mtime) if metrics.st_size else last
    except OSError:
        pass
    return time.time() - last >= max(QUIET_S, QUIET_STEPS * (snapshot.progress.step_s or 0.0))
