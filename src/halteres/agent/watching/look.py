"""A run as it is now, in the words of an answer.

Owns: the noun `Look`: state, health, figures, trend, time left, how long to wait for news.
Never: waits, says what to do next (`following`), tells how a run failed (`failing`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halteres.agent.watching.current_alerts import GRAVE, alarms, in_force, pressing
from halteres.agent.wording import significant
from halteres.config import environ
from halteres.observe.plots import sparkline
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.alerts import Alert
from halteres.runs.reading.culprit import Culprit, culprit
from halteres.runs.reading.lenient_settings import Given, read_given
from halteres.runs.reading.progress import Progress, Series, read_progress
from halteres.runs.state import RunState, Status

StateWord = Literal["running", "finished", "crashed"]

_STATE_WORDS: Mapping[Status, StateWord] = {"stopped": "finished", "completed": "finished", "failed": "crashed"}
TREND_WIDTH, RECENT = 16, 8

HARDLY, HARDLY_STEPS = 1e-4, 5
"""From which norm of the update on, relative to the base weights, they have moved; after how many steps that is judged.
The built-in model on arithmetic: 1.3e-2 after 5 steps with its learning rate of 1.5e-3, 1.2e-5 after 8 with 1e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a run."""

    run: RunDirectory
    state: RunState
    progress: Progress
    given: Given
    alerts: tuple[Alert, ...]  # newest first
    culprit: Culprit | None  # of a failed run
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
        """How long it will still take, at least and at most; None before the first step and after the last."""
        between = self.progress.remaining_between_s
        if between is None or self.state.status != "running":
            return None
        return [_minutes(seconds) for seconds in between]

    @property
    def health(self) -> str:
        """healthy, alert, failing; of a run that has ended, how."""
        if self.state.terminal:
            return self.state.status
        current = in_force(self.alerts, self.step)
        if self._is_limping or any(alert.rule in GRAVE for alert in current):
            return "failing"
        return "alert" if current else "healthy"

    @property
    def pressing(self) -> Alert | None:
        """The alert in force whose remedy comes before anything else."""
        return pressing(self.alerts, self.step)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The newest figures; those of the seeds are null where there is none yet. `eval_step`: the older step that the
        evaluation is of; `policy_version`: optimiser steps taken, where steps were skipped."""
        progress = self.progress
        seeds = {
            "step": progress.step,
            "reward_mean": _newest(progress.reward),
            "percent_correct": _newest(progress.correct or progress.success),
            "eval_percent_correct": _newest(progress.evaluation),
        }
        ours = {
            "eval_step": progress.evaluation[-1][0] if progress.evaluation else None,
            **self._failed_tasks,
            "loss_per_token": _newest(progress.loss_per_token),
            "kl": _newest(progress.kl),
            "kl_reference": _newest(progress.kl_reference),
            "implicit_reward_gap": _newest(progress.implicit_reward_gap),
            "share_of_gain": _newest(progress.share_of_gain),
            "accuracy": _newest(progress.preferred),
            "eval_accuracy": _newest(progress.held_out_preferred),
            **(self.skipped or {}),
        }
        return {**seeds, **{name: value for name, value in ours.items() if value is not None}}

    @property
    def _failed_tasks(self) -> dict[str, float | None]:
        """Where held-out tasks failed: how many, and of how many others the newest figure is."""
        failed = _newest(self.progress.failed_tasks)
        return {"eval_num_failed": failed, "eval_num_tasks": _newest(self.progress.evaluated_tasks)} if failed else {}

    @property
    def skipped(self) -> dict[str, Any]:
        """How many steps moved no weight, and how many optimiser steps there were; nothing where all steps did."""
        progress = self.progress
        if not progress.skipped_steps:
            return {}
        return {"skipped_steps": progress.skipped_steps, "policy_version": progress.policy_version}

    @property
    def hardly_moved(self) -> str:
        """A sentence on weights that are nearly the base model's after several steps; else nothing."""
        norm = self.progress.update_norm
        if norm is None or norm >= HARDLY or self.step < HARDLY_STEPS:
            return ""
        return (
            f"The weights have hardly moved: the adapter's update has {norm:.1e} of the norm of the base weights "
            f"(usually above {HARDLY:.0e}) after {self.step} steps. A larger learning_rate moves them more."
        )

    @property
    def trend(self) -> dict[str, Any]:
        """Where the figures are going: the reward's curve from first to last, groups that teach nothing."""
        curve, silent = self.progress.reward, [share for _, share in self.progress.without_signal[-RECENT:]]
        if not curve:
            return {}
        bars = sparkline([value for _, value in curve], TREND_WIDTH)
        answer = {"reward_mean": f"{bars} {significant(curve[0][1]):g}->{significant(curve[-1][1]):g}"}
        return {**answer, "groups_without_signal": significant(sum(silent) / len(silent))} if silent else answer

    @property
    def last_checkpoint(self) -> dict[str, Any] | None:
        """The newest one that training can go on from: step, path."""
        newest = self.state.last_checkpoint
        return {"step": newest.get("step"), "path": newest.get("state_path")} if newest else None

    @property
    def suggested_wait_s(self) -> int:
        """How long to wait before the next look pays: some ten steps."""
        if self.state.terminal:
            return 0
        if self.progress.step_s is None or self.state.status != "running":
            return 20
        return max(5, min(int(environ.longest_wait_s()), math.ceil(10 * self.progress.step_s)))

    @property
    def _is_limping(self) -> bool:
        """A process has died, and will be started again or take the run along; none that we have ended."""
        exits = (facts.get("exit") for facts in self.state.processes.values())
        are_ended = self.state.status == "stopping" or self.state.phase == "evaluation"
        return not are_ended and any(code not in (None, 0) for code in exits)


def look_at(run: RunDirectory) -> Look:
    """Look now."""
    state = run.state()
    progress = read_progress(run, state)
    return Look(
        run=run,
        state=state,
        progress=progress,
        alerts=alarms(run, state, progress),
        given=read_given(run),
        culprit=culprit(run, state),
        at=time.time(),
    )


def _newest(series: Series) -> float | None:
    return significant(series[-1][1]) if series else None


def _minutes(seconds: float) -> int | float:
    minutes = seconds / 60
    return round(minutes, 1) if minutes < 10 else round(minutes)
