"""What a run is now, as one value: `report_of(run)`. A reader writes out what it has room for, and
works nothing out by itself.

Tools, page, terminal and the run's own summary read it: state, progress, outcome, alerts, failure,
figures, and what to do next as a value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from halteres.config import environ
from halteres.config.discovery import find_environment, joined_name, split_name
from halteres.errors import HalteresError
from halteres.next_step import Advice, NextStep, then
from halteres.observe.plots import sparkline
from halteres.observe.sinks import read_reports
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.reading import no_batch
from halteres.runs.reading.alerts import FOR_GOOD, GRAVE, UNHURRIED, Alert, in_force, stalled
from halteres.runs.reading.evaluations import CORRECT, Difference, Outcome, outcome_of
from halteres.runs.reading.failures import (
    Checkpoint,
    FailureReport,
    failure_of,
    last_checkpoint,
    mending,
    read_restarts,
)
from halteres.runs.reading.progress import (
    Given,
    Progress,
    read_given,
    read_progress,
    resumed_at,
)
from halteres.runs.reading.quarantine import Quarantined, read_quarantine
from halteres.runs.reading.status_figures import (
    ENGINE_SHARE,
    HELD_OUT_LOSS,
    HELD_OUT_PER_TOKEN,
    Figure,
    figures_of,
    own_measures,
    time_shares,
    trends_of,
)
from halteres.runs.state import Kind, RunState, Status
from halteres.short_texts import rounded

StateWord = Literal["running", "finished", "crashed"]

_STATE_WORDS: Mapping[Status, StateWord] = {
    "stopped": "finished",
    "completed": "finished",
    "failed": "crashed",
}

TREND_WIDTH, TREND_GROUPS = 16, 8
GAINED_BY: Mapping[Kind, str] = {
    "rl": CORRECT,
    "sft": HELD_OUT_PER_TOKEN,
    "dpo": HELD_OUT_LOSS,
}
"""By what kind of run: the figure of held-out tasks or rows that tells whether it has learnt."""

MUCH_LESS = 0.6  # share of the wanted time with a core, below which a machine is called busy
LITTLE_SIGNAL = 0.8  # share of groups without signal above which what to do is said
SMALL_UPDATE, SMALL_UPDATE_STEPS = 1e-4, 5
"""Below which norm of the update, relative to the base weights, they have hardly moved; after how
many steps that is judged. The built-in model on arithmetic: 1.3e-2 after 5 steps with its learning
rate of 1.5e-3, 1.2e-5 after 8 with 1e-6.
"""

MOST_CHANGES = 8  # settings of a run that a proposed call sets again


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a run that has ended has gained on held-out tasks over its first evaluation, up to the
    last one.
    """

    of: str
    before: float
    after: float
    ci95: list[float] | None  # of the difference
    certain: bool
    step: int  # of the weights that `after` is of
    weights_step: int  # of the run's last weights; where it is higher, those were not evaluated


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run as it was found. What takes longer to read (`outcome`, `no_batch`) is read when it is
    first asked for, and once.
    """

    run: RunDirectory
    state: RunState
    progress: Progress
    given: Given
    alerts: tuple[Alert, ...]  # the last of each rule: grave ones first, then the newest
    failure: FailureReport | None  # of a failed run
    figures: tuple[Figure, ...]
    restarts: Mapping[str, int]  # processes that were started again: how often
    quarantined: Quarantined | None  # tasks that are not drawn any more; None: there are none
    at: float  # unix seconds
    longest_wait_s: float  # how long a call that is proposed may wait

    @property
    def step(self) -> int:
        """Optimiser steps done; the trainer's own row may be there before run.json says so."""
        return max(self.state.step, self.progress.step)

    @property
    def state_word(self) -> StateWord:
        """In W&B's words."""
        return _STATE_WORDS.get(self.state.status, "running")

    @property
    def seconds(self) -> float:
        """From the run's creation to now, or to its end."""
        return max(0.0, (self.state.ended_at or self.at) - self.state.created_at)

    @property
    def minutes(self) -> float:
        """The same in minutes."""
        return round(self.seconds / 60, 1)

    @property
    def eta_minutes(self) -> list[int | float] | None:
        """How long it will still take, at least and at most; None before the first step and after
        the last.
        """
        between = self.progress.remaining_between_s
        if between is None or self.state.status != "running":
            return None
        return [_whole_from_ten(seconds / 60) for seconds in between]

    @property
    def current_alerts(self) -> list[Alert]:
        """The alerts that stand for the run's health."""
        return in_force(self.alerts, self.step)

    @property
    def health(self) -> str:
        """healthy, alert, failing; of a run that has ended, how."""
        if self.state.terminal:
            return self.state.status
        current = self.current_alerts
        # A process that has died will be started again, or take the run along; but some are ended
        # by us.
        are_ended = self.state.status == "stopping" or self.state.phase == "evaluation"
        exits = [facts.get("exit") for facts in self.state.processes.values()]
        if not are_ended and any(code not in (None, 0) for code in exits):
            return "failing"
        if any(alert.rule in GRAVE for alert in current):
            return "failing"
        if current:
            return "alert"
        return "healthy"

    @property
    def pressing(self) -> Alert | None:
        """The alert in force whose remedy comes before anything else; None where the run may be
        waited for.
        """
        current = [alert for alert in self.current_alerts if alert.rule not in UNHURRIED]
        return min(current, key=lambda alert: alert.rule not in (*FOR_GOOD, *GRAVE), default=None)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The newest figures by name; those of the seeds are null where there is none yet.
        `eval_step`: the older step that the evaluation is of; `policy_version`: optimiser steps
        taken, where steps were skipped.
        """
        progress, figures = self.progress, dict[str, float | None]()
        for figure in self.figures:
            figures[figure.kind.name] = figure.value
        found: dict[str, float | None] = {"step": progress.step}
        for name in ("reward_mean", "percent_correct", "eval_percent_correct"):
            found[name] = figures.pop(name, None)
        if progress.evaluation:
            found["eval_step"] = progress.evaluation[-1][0]
        # of held-out tasks; the figure is then of the others alone
        if progress.failed_tasks and progress.failed_tasks[-1][1]:
            found["eval_num_failed"] = progress.failed_tasks[-1][1]
            if progress.evaluated_tasks:
                found["eval_num_tasks"] = progress.evaluated_tasks[-1][1]
        known = {name: value for name, value in figures.items() if value is not None}
        # how many of the cut-off answers were paid says nothing where none was cut off
        if known.get("truncated") == 0:
            known.pop("truncated_paid", None)
        return {**found, **known, **self.skipped}

    @property
    def skipped(self) -> dict[str, Any]:
        """How many steps moved no weight, and how many optimiser steps there were; nothing where
        all steps did.
        """
        skipped, version = self.progress.skipped_steps, self.progress.policy_version
        if skipped:
            return {"skipped_steps": skipped, "policy_version": version}
        return {}

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
    def remarks(self) -> list[str]:
        """Sentences that a reader needs to take the figures for what they are."""
        state, found = self.state, list[str]()
        if self.skipped:
            found.append(
                f"{self.skipped['skipped_steps']} of {self.step} steps moved no weight (all scores "
                "of each group equal): "
                f"the policy version is {self.skipped['policy_version']}"
            )
        if self.silent_share > LITTLE_SIGNAL:
            group_size = self.given.env.get("group_size")
            larger = "larger groups, "
            if group_size:
                larger = f"a group_size above {group_size}, "
            found.append(
                f"{self.silent_share:.0%} of the last steps' groups had equal scores and taught "
                f"nothing: {larger}or tasks that are neither always nor never solved, teach more"
            )
        if state.resumed_from and self.progress.resumed_at:
            of_runs = "; ".join(
                f"steps up to {step} are of run {run_id}" for run_id, step in self.ancestors
            )
            found.append(f"{of_runs}, which this one goes on from")
        if self.quarantined is not None:
            found.append(str(self.quarantined))
        if self.crowded:
            found.append(self.crowded)
        if self.is_unevaluated:
            found.append(
                f"the last evaluation is of step {self.outcome.evaluations[-1].step}; the weights "
                f"are of step {self.weights_step}, and were not evaluated"
            )
        return found

    @property
    def crowded(self) -> str:
        """A sentence on an engine that in the last steps had much less than the core that it
        wanted; else nothing.
        """
        shares = [share for _, share in self.progress.series.get(ENGINE_SHARE, ())[-TREND_GROUPS:]]
        if not shares:
            return ""
        share = sum(shares) / len(shares)
        if share >= MUCH_LESS:
            return ""
        return (
            f"the machine is busy: in the last steps the engine had a core for {share:.0%} of the "
            "time in which it wanted one, and its passes took that much longer"
        )

    @cached_property
    def ancestors(self) -> tuple[tuple[str, int], ...]:
        """The runs that this one goes on from, the first of them first: each with the last step
        that is its own. Of a run that was removed meanwhile no earlier one is known.
        """
        found: list[tuple[str, int]] = []
        state, ends = self.state, self.progress.resumed_at
        while state.resumed_from and ends and state.resumed_from not in dict(found):
            found.insert(0, (state.resumed_from, ends))
            try:
                state = find_run(state.resumed_from).state()
            except HalteresError:
                break
            # an earlier checkpoint of it may be the one that the next began with
            ends = min(ends, resumed_at(state))
        return tuple(found)

    def run_of_step(self, step: int) -> str:
        """The id of the run that made this step: this one, or one that it goes on from."""
        for run_id, ends in self.ancestors:
            if step <= ends:
                return run_id
        return self.run.run_id

    @property
    def weights_step(self) -> int:
        """Optimiser steps that the newest weights have had."""
        if self.outcome.weights.step is None:
            return self.step
        return self.outcome.weights.step

    @property
    def is_unevaluated(self) -> bool:
        """Whether the run has ended with weights that are newer than its last evaluation, which can
        be made up for.
        """
        if self.state.is_on_file or not self.state.terminal or not self.outcome.evaluations:
            return False
        return self.outcome.evaluations[-1].step < self.weights_step

    @property
    def silent_share(self) -> float:
        """Share of the last steps' groups whose scores were all equal; 0 where none is known."""
        silent = [share for _, share in self.progress.without_signal[-TREND_GROUPS:]]
        if silent:
            return sum(silent) / len(silent)
        return 0.0

    @property
    def trend(self) -> dict[str, Any]:
        """Where the figures are going: the reward's curve from first to last, groups that teach
        nothing, and what shows why a run does not learn.
        """
        curve, name = self.progress.reward, "reward_mean"
        if self.state.is_on_file:
            curve, name = self.progress.loss, "loss"
        if not curve:
            return {}
        bars = sparkline([value for _, value in curve], TREND_WIDTH)
        found: dict[str, Any] = {
            name: f"{bars} {rounded(curve[0][1], 3):g}->{rounded(curve[-1][1], 3):g}"
        }
        if self.progress.without_signal:
            found["groups_without_signal"] = rounded(self.silent_share, 3)
        # those are of the groups that were trained on, and a dropped one is not among them
        dropped = self.progress.dropped_groups
        if dropped is not None:
            found["groups_dropped"] = dropped.facts
        found |= trends_of(self.progress.series)
        return found | own_measures(self.progress.first_rows, self.progress.last_rows)

    @property
    def time_shares(self) -> dict[str, float]:
        """Where the time of the last steps went."""
        return time_shares(self.progress.series)

    @property
    def last_checkpoint(self) -> Checkpoint | None:
        """The newest one that training can go on from."""
        return last_checkpoint(self.state)

    @property
    def suggested_wait_s(self) -> int:
        """How long to wait before the next look pays: some ten steps."""
        if self.state.terminal:
            return 0
        if self.progress.step_s is None or self.state.status != "running":
            return 20
        return max(5, min(int(self.longest_wait_s), math.ceil(10 * self.progress.step_s)))

    @cached_property
    def outcome(self) -> Outcome:
        """What the run has come to, so far or in the end."""
        return outcome_of(self.run, self.state)

    @property
    def gain(self) -> Gain | None:
        """Of a run that has ended, what every reader asks next: has it learnt?"""
        if not self.state.terminal:
            return None
        outcome = self.outcome
        of = GAINED_BY.get(self.state.kind, CORRECT)
        difference: Difference | None = outcome.gains.get(of)
        if difference is None or outcome.baseline is None:
            return None
        last = outcome.evaluations[-1]
        return Gain(
            of=of,
            before=rounded(outcome.baseline.figures[of]),
            after=rounded(last.figures[of]),
            ci95=difference.facts["ci95"],
            certain=difference.facts["certain"],
            step=last.step,
            weights_step=self.weights_step,
        )

    @cached_property
    def no_batch(self) -> str | None:
        """One sentence on a run that waits for a batch longer than its steps take."""
        return no_batch.why_no_batch(self.run, self.state, self.progress, self.alerts, self.step)

    @property
    def next(self) -> Advice:
        """What to do after a look at the run."""
        run_id, state = self.run.run_id, self.state
        results = NextStep.of("rl_get_results", run_id)
        match state.status:
            case "pending" | "starting":
                return NextStep.of(
                    "rl_check_status", run_id, wait_s=self.suggested_wait_s, until="running"
                )
            case "stopping":
                return until_it_ends(run_id, self.longest_wait_s)
            case "running":
                pressing = self.pressing
                if pressing and pressing.remedy.first:
                    return pressing.remedy.first
                # Wake at the end where it is near, else at the next evaluation, if there will be
                # one.
                left_s, every = self.progress.remaining_s, self.given.trainer.eval_every
                is_near = left_s is not None and left_s < self.longest_wait_s
                is_last = every <= 0 or (self.step // every + 1) * every > state.total_steps
                if is_near or is_last:
                    return until_it_ends(run_id, self.longest_wait_s)
                return NextStep.of(
                    "rl_check_status", run_id, wait_s=self.suggested_wait_s, until="eval"
                )
            case "completed":
                return results
            case "stopped":
                if self.is_unevaluated and not self.pressing:
                    return self.evaluation_or_more
                more = self.further
                if more:
                    return (results, " or ", more)
                return results
            case "failed":
                return self._after_failure

    @property
    def evaluation_or_more(self) -> Advice:
        """The evaluation of the last weights, which have none; or what else may follow."""
        evaluation, more = NextStep.of("rl_evaluate", self.run.run_id), self.further
        if more:
            return (evaluation, " or ", more)
        return evaluation

    @property
    def further(self) -> NextStep | None:
        """What may follow upon a run that has ended: what an alert in force asks for, else going
        on; None: nothing.
        """
        state = self.state
        if state.code == "policy_cap":
            return None  # it would be ended again at once
        if (call := self._fix) or state.status == "completed":
            return call
        # what its alert asked for is done: it was stopped
        is_done = self.pressing is not None and bool(self.pressing.remedy.steps)
        if state.resumable and not is_done:
            return self.resume_call
        return None

    @property
    def _after_failure(self) -> Advice:
        if fix := self._fix:
            return fix
        if self.state.code == "disk_full":
            return "make room, then ", self.resume_call
        # its own code, no setting of ours
        exited = None
        if self.failure:
            exited = self.failure.exit
        if exited and exited.process == "env":
            logs = NextStep.of("rl_get_logs", self.run.run_id, role="env")
            return then(logs, self.resume_call)
        return self.resume_call

    @property
    def _fix(self) -> NextStep | None:
        """The call that is left of a remedy once its run has ended. A failure has its own, save
        where all is spoilt.
        """
        alert = self.pressing
        if alert is None or (self.state.status == "failed" and alert.rule not in FOR_GOOD):
            return None
        call = alert.remedy.after("rl_stop_training", "rl_get_results").first
        can_be_made = call and (self.state.resumable or "resume_from" not in call.args)
        if can_be_made:
            return call
        return None

    @property
    def resume_call(self) -> NextStep:
        """Start again where it ended: from its checkpoint; without one, with the same settings."""
        state, run_id = self.state, self.run.run_id
        if state.kind == "reward":
            resumed = None
            if state.resumable:
                resumed = run_id
            return NextStep.of("rl_train_reward_model", resume_from=resumed)
        changes = mending(state.code, self.given)
        # of a training on a file another batch size is another run
        has_other_batches = any(name.startswith("data.") for name in changes)
        if state.resumable and not has_other_batches:
            return NextStep.of("rl_start_training", resume_from=run_id, changes=changes)
        given = self.run.own_settings(inherited=state.is_on_file)
        if state.is_on_file:
            own = {name: given.pop(f"data.{name}", None) for name in ("method", "data")}
            return NextStep.of("rl_start_training", **own, changes={**given, **changes})
        if len(given) <= MOST_CHANGES:
            changes = {**given, **changes}
        return NextStep.of("rl_start_training", environment=environment_of(state), changes=changes)


def _whole_from_ten(minutes: float) -> float:
    """Rounded: from ten minutes on without tenths."""
    if minutes < 10:
        return round(minutes, 1)
    return round(minutes)


def report_of(
    run: RunDirectory, state: RunState | None = None, longest_wait_s: float | None = None
) -> RunReport:
    """The run as it is now.

    Args:
        run: which.
        state: where it was read just before, or is just about to be written.
        longest_wait_s: how long a call of the reader may wait; None: as long as everywhere.
    """
    state = state or run.state()
    progress = read_progress(run, state)
    alerts = sorted(
        progress.alerts, key=lambda alert: (alert.rule in GRAVE, alert.step), reverse=True
    )
    hanging = stalled(run, state)  # a supervisor that hangs raises no alert itself
    if hanging is not None:
        alerts = [hanging, *(alert for alert in alerts if alert.rule != hanging.rule)]
    return RunReport(
        run=run,
        state=state,
        progress=progress,
        given=read_given(run),
        alerts=tuple(alerts),
        failure=failure_of(state),
        figures=figures_of(progress.series, state.kind),
        restarts=read_restarts(run.path / "events.jsonl"),
        quarantined=read_quarantine(run),
        at=time.time(),
        longest_wait_s=longest_wait_s or environ.longest_wait_s(),
    )


def until_it_ends(run_id: str, wait_s: float) -> NextStep:
    """Wait for the end, as long as a call may: it wakes at the end."""
    return NextStep.of("rl_check_status", run_id, wait_s=int(wait_s), until="terminal")


def environment_of(state: RunState) -> str:
    """What a new run of the same environment names: its name where that leads to the same file,
    else the file.
    """
    file = Path(state.environment_file)
    if not file.is_file():
        return state.environment
    try:
        if Path(find_environment(state.environment).file_path) == file:
            return state.environment
    except HalteresError:
        pass
    return joined_name(str(file), split_name(state.environment)[1])


def wandb_names(state: RunState, given: Given) -> dict[str, str]:
    """What W&B calls the run."""
    return {"wandb_project": given.run.project, "wandb_run_name": state.default_name}


def sink_facts(run: RunDirectory) -> dict[str, Any]:
    """Where the metrics are forwarded to: `wandb_url`; `wandb` and `wandb_error`, how that sink is;
    `sinks`, of each how it is and what to do.
    """
    reports = read_reports(run.path)
    wandb = reports.get("wandb")
    error = None
    if wandb and wandb.state == "failed":
        error = wandb.note
    notes = {
        name: report.line
        for name, report in reports.items()
        if report.note and report.note != error
    }
    facts: dict[str, Any] = {}
    if wandb:
        facts |= {"wandb_url": wandb.url, "wandb": wandb.state}
    if error:
        facts["wandb_error"] = error
    if notes:
        facts["sinks"] = notes
    return facts
