"""A run as it is now: state, health, figures, trend, time left, why it has no batch, how it failed.

Owns: `Look`, which the tools and the page read; which alerts matter now, their order and how much of them an answer has
room for; the exact call that makes sense next.
Never: raises an alert (the supervisor does, and, over a supervisor that hangs, `diagnosis.stalled`); makes the call.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halteres.agent.fitting import clipped, significant
from halteres.clients import plain
from halteres.config import environ
from halteres.errors import HalteresError
from halteres.next_step import worded
from halteres.observe.plots import sparkline
from halteres.observe.sinks import read_reports
from halteres.redaction import Redactor, printable
from halteres.runs.diagnosis import REFUSED, stalled
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.failures import FailedProcess, failed_process, mending
from halteres.runs.reading.outcome import chosen
from halteres.runs.reading.progress import (
    SEED_ROLES,
    Alert,
    Given,
    Progress,
    Series,
    conditions,
    read_given,
    read_progress,
)
from halteres.runs.servers import servers_of
from halteres.runs.state import RunState, Status

RECENT_STEPS = 20
"""A rule that spoke once and has been silent for so long does not stand for the run's health any more."""

GRAVE = ("nan_loss", "stalled", REFUSED)
"""Rules about a run that will not get well by itself."""

FOR_GOOD = ("reward_hacking", "panel_disagrees")
"""A policy that has learnt to please its scorer does not unlearn it by itself."""

UNHURRIED = ("trainer_starved", "env_idle", "env_ahead", "scorer_slow")
"""Rules about the pace alone: such a run learns on, and may be waited for."""

REFUSAL_LENGTH = 300
"""Characters of what is seen where a server's own words are in it."""

EVIDENCE_LENGTH, ALERTS_LENGTH = 150, 480
"""Characters of what is seen, and of all alerts of an answer but the first. A remedy is never cut: it is a call."""


def alarms(run: RunDirectory, state: RunState, progress: Progress) -> tuple[Alert, ...]:
    """The last alert of each rule: grave ones first, then the newest."""
    hanging = stalled(run, state)
    spoken = [alert for alert in progress.alerts if hanging is None or alert.rule != hanging.rule]
    return (*((hanging,) if hanging else ()), *sorted(spoken, key=_weight, reverse=True))


def _weight(alert: Alert) -> tuple[bool, int]:
    return alert.rule in GRAVE, alert.step


def in_force(alerts: Sequence[Alert], step: int) -> list[Alert]:
    """Those that stand for the run's health after so many steps. What a step has disproved since, goes."""
    recent = {"stalled": 0, REFUSED: 0, **dict.fromkeys(FOR_GOOD, step)}
    return [alert for alert in alerts if step - alert.step <= recent.get(alert.rule, RECENT_STEPS)]


def pressing(alerts: Sequence[Alert], step: int) -> Alert | None:
    """The alert in force that should be answered before anything else; None where the run may be waited for."""
    candidates = [alert for alert in in_force(alerts, step) if alert.rule not in UNHURRIED]
    return min(candidates, key=lambda alert: alert.rule not in (*FOR_GOOD, *GRAVE), default=None)


def told_briefly(alerts: Sequence[Alert], state: RunState) -> list[dict[str, Any]]:
    """As many as there is room for, the first one in any case; none beside a failure, which needs the room."""
    if state.status == "failed":
        return []
    told: list[dict[str, Any]] = []
    room = ALERTS_LENGTH
    for brief in map(_brief, alerts):
        room -= len(json.dumps(brief, ensure_ascii=False))
        if told and room < 0:
            break
        told.append(brief)
    return told


def _brief(alert: Alert) -> dict[str, Any]:
    evidence = clipped(alert.evidence, REFUSAL_LENGTH if alert.rule == REFUSED else EVIDENCE_LENGTH)
    return {"rule": alert.rule, "step": alert.step, "evidence": evidence, "remedy": str(alert.remedy)}


def cleaned(line: str) -> str:
    """The line without what only a terminal understands.

    >>> cleaned("10 %\\r50 %\\r\\x1b[32mdone\\x1b[0m")
    'done'
    """
    last = line.rstrip("\r\n").rpartition("\r")[2]
    return printable(last).rstrip()


def matching(wanted: str) -> Callable[[str], bool]:
    """Whether a line holds this text, or one of several that stand between `|`, in small or capital letters.

    >>> [line for line in ("step 7", "Error: [x", "ok") if matching("error|7")(line) or matching("[x")(line)]
    ['step 7', 'Error: [x']
    """
    texts = [text for text in wanted.casefold().split("|") if text] or [wanted.casefold()]

    def matches(line: str) -> bool:
        folded = line.casefold()
        return any(text in folded for text in texts)

    return matches


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
        failed_process=failed_process(run, state),
        at=time.time(),
    )


def _newest(series: Series) -> float | None:
    return significant(series[-1][1]) if series else None


def _minutes(seconds: float) -> int | float:
    minutes = seconds / 60
    return round(minutes, 1) if minutes < 10 else round(minutes)


LINES, LONGEST = 8, 160
"""Lines of the log, and characters of one."""

ERROR_LENGTH = 300
ANSWER_LENGTH, LEAST_LENGTH = 1340, 300
"""Characters of a whole answer, and how many of them the log has at least."""

_STAMP = re.compile(r"^\d{4}-\d\d-\d\d[ T][\d:.,]+Z? (?:[a-z]+ (?=[A-Z]+ ))?")
_LOGGER = re.compile(r"^(?:(?:INFO|DEBUG)|(WARNING|ERROR|CRITICAL)) [\w.]+: ")
_TELLING = re.compile(r"^(?:WARNING|ERROR|CRITICAL|error)\b|\b\w*(?:Error|Exception)\b")


def failure_facts(look: Look) -> dict[str, Any]:
    """What a failed run tells beside the rest; nothing for any other."""
    if look.state.status != "failed":
        return {}
    return {
        "error": clipped(error_of(look), ERROR_LENGTH),
        "code": look.state.code or "internal",
        "exit": look.failed_process.facts if look.failed_process else None,
        "resumable": look.state.resumable,
        "last_checkpoint": look.last_checkpoint,
    }


def log_tail(look: Look, told: dict[str, Any]) -> list[str]:
    """Whole lines from the end of the log of whoever failed, as many as there is room for beside what is told already:
    the last one, then those that tell of trouble, then the newest."""
    written = look.run.log_tail(look.failed_process.process if look.failed_process else "supervisor", 3 * LINES)
    lines = [clipped(_plain(line), LONGEST) for text in written if (line := cleaned(text))]
    room = max(LEAST_LENGTH, ANSWER_LENGTH - len(json.dumps(told, ensure_ascii=False, separators=(",", ":"))))
    kept: list[int] = []
    for number in _by_weight(lines)[:LINES]:
        room -= len(lines[number]) + len('"",')
        if room < 0:
            break
        kept.append(number)
    return [lines[number] for number in sorted(kept)]


def error_of(look: Look) -> str:
    """The error, with the way on as it is now: a checkpoint may have been written since. The log is told beside it."""
    failure = look.state.failure
    if failure is None:
        return look.state.error or "The run failed."
    newest = look.last_checkpoint if look.state.resumable else None
    if failure.first:
        way_on = f"{failure.first}, then {'resume' if newest else 'start again'}."
    elif newest:
        way_on = f"`next` goes on from step {newest['step']}."
    else:
        way_on = "There is no checkpoint to go on from: `next` starts again."
    return " ".join(part for part in (failure.what, failure.why, way_on) if part)


def _plain(line: str) -> str:
    """A line without when and by which logger it was written."""
    text = Redactor.of_this_process().text(_STAMP.sub("", line))  # before the room is measured
    return _LOGGER.sub(lambda found: f"{found[1]}: " if found[1] else "", text)


def _by_weight(lines: Sequence[str]) -> list[int]:
    newest_first = range(len(lines) - 1, -1, -1)
    return sorted(newest_first, key=lambda number: number != len(lines) - 1 and not _TELLING.search(lines[number]))


AILING = ("failing", "failed")
"""Health of a run whose logs are worth a look; rl_start_training has told where they are."""


def seed_facts(look: Look) -> dict[str, Any]:
    """The keys of the seeds that every look at a run tells."""
    return {
        "run_id": look.run.run_id,
        "status": look.state.status,
        "environment": look.state.environment,
        "running_time_minutes": look.minutes,
        "processes": conditions(look.state),
        **wandb_names(look.state, look.given),
        **sink_facts(look.run),
        "logs": {role: str(look.run.log(role)) for role in SEED_ROLES} if look.health in AILING else {},
        "metrics": look.metrics,
    }


def wandb_names(state: RunState, given: Given) -> dict[str, str]:
    """What W&B calls the run."""
    return {"wandb_project": given.run.project, "wandb_run_name": state.default_name}


def sink_facts(run: RunDirectory) -> dict[str, Any]:
    """Where the metrics are forwarded to: `wandb_url`; `wandb` and `wandb_error`, how that sink is; `sinks`, of each
    how it is and what to do."""
    reports = read_reports(run.path)
    wandb = reports.get("wandb")
    error = wandb.note if wandb and wandb.state == "failed" else None
    notes = {name: report.line for name, report in reports.items() if report.note and report.note != error}
    return {
        **({"wandb_url": wandb.url, "wandb": wandb.state} if wandb else {}),
        **({"wandb_error": error} if error else {}),
        **({"sinks": notes} if notes else {}),
    }


QUIET_S, QUIET_STEPS = 10.0, 2.0
"""So long, and for the time of so many steps, nothing came of it: a run between two steps is no run without a batch."""

_WANTED = {("running", None), ("starting", "trainer"), ("starting", "environment")}
"""Status and phase of a run whose trajectory server is up and whose trainer is at work, or about to be."""

FAILING = "groups_failed"
"""What an environment notices whose groups all fail: the server sees only that none comes."""

ANSWER_WITHIN_S = 0.5
LENGTH = 160


def why_no_batch(look: Look) -> str | None:
    """One sentence, of a run that waits for a batch longer than its steps take; None of any other."""
    if not _waits(look) or (server := servers_of(look.run).trajectories) is None:
        return None
    if failing := next((alert for alert in look.alerts if alert.rule == FAILING and alert.step > look.step), None):
        return clipped(failing.evidence, LENGTH)
    try:
        told = plain.get_json(f"{server.url}/v1/diagnostics", ANSWER_WITHIN_S, server.key)
    except HalteresError:
        return None
    sentence = None if told.get("batch_ready") and not told.get("parked") else _reason(told)
    return clipped(sentence, LENGTH) if sentence else None


def _waits(look: Look) -> bool:
    """Whether batches are wanted, and nothing has come of it for a while."""
    if (look.state.status, look.state.phase) not in _WANTED:
        return False
    quiet_s = max(QUIET_S, QUIET_STEPS * (look.progress.step_s or 0.0))
    return time.time() - _last_sign(look) >= quiet_s


def _last_sign(look: Look) -> float:
    """When figures were written last, or the run began; unix s."""
    began = look.state.started_at or look.state.created_at
    try:
        metrics = (look.run.path / "metrics.jsonl").stat()
    except OSError:
        return began
    return max(began, metrics.st_mtime) if metrics.st_size else began


def _reason(told: Mapping[str, Any]) -> str | None:
    """The server's own summary, or its first reason."""
    reasons = told.get("reasons")
    first = reasons[0] if isinstance(reasons, list) and reasons and isinstance(reasons[0], dict) else {}
    sentence = told.get("why") or first.get("sentence")
    return sentence if isinstance(sentence, str) else None


EDITS = 8


def next_after(look: Look) -> str:
    """The call, or the calls."""
    run_id = look.run.run_id
    match look.state.status:
        case "pending" | "starting":
            return worded("rl_check_status", run_id, wait_s=look.suggested_wait_s, until="running")
        case "stopping":
            return until_it_ends(run_id)
        case "running":
            call = look.pressing.remedy.first if look.pressing else None
            return call.call if call else _watching(look)
        case "completed":
            return worded("rl_get_results", run_id)
        case "stopped":
            results, more = worded("rl_get_results", run_id), further(look)
            return f"{results} or {more}" if more else results
        case "failed":
            return _remedy(look) or _mending(look)


def further(look: Look) -> str | None:
    """What may follow upon a run that has ended: what an alert in force asks for, else going on; None: nothing."""
    if look.state.code == "policy_cap":
        return None  # it would be ended again at once
    if (call := _remedy(look)) or look.state.status == "completed":
        return call
    nothing_to_learn = look.pressing is not None and look.state.status == "stopped"
    return going_on(look) if look.state.resumable and not nothing_to_learn else None


def _remedy(look: Look) -> str | None:
    """The call that is left of a remedy once its run has ended. A failure has its own, save where all is spoilt."""
    alert = look.pressing
    if alert is None or (look.state.status == "failed" and alert.rule not in FOR_GOOD):
        return None
    call = alert.remedy.after("rl_stop_training", "rl_get_results").first
    return call.call if call and (look.state.resumable or "resume_from" not in call.args) else None


def going_on(look: Look) -> str:
    """Start again where it ended: from its checkpoint; where there is none, with the same settings."""
    if look.state.kind == "reward":
        return worded("rl_train_reward_model", **({"resume_from": look.run.run_id} if look.state.resumable else {}))
    changes = mending(look.state.code, look.given)
    if look.state.resumable:
        return worded("rl_start_training", resume_from=look.run.run_id, changes=changes)
    given = chosen(look.run)
    changes = {**(given if len(given) <= EDITS else {}), **changes}
    return worded("rl_start_training", environment=look.state.environment, changes=changes)


def _watching(look: Look) -> str:
    """Wake at the end where it is near, else at the next evaluation, if there will be one."""
    left, every = look.progress.remaining_s, look.given.trainer.eval_every
    if left is not None and left < environ.longest_wait_s():
        return until_it_ends(look.run.run_id)
    evaluates = every > 0 and (look.step // every + 1) * every <= look.state.total_steps
    if not evaluates:
        return until_it_ends(look.run.run_id)
    return worded("rl_check_status", look.run.run_id, wait_s=look.suggested_wait_s, until="eval")


def until_it_ends(run_id: str) -> str:
    """It wakes at the end: a longer wait costs nothing."""
    return worded("rl_check_status", run_id, wait_s=int(environ.longest_wait_s()), until="terminal")


def _mending(look: Look) -> str:
    if look.state.code == "disk_full":
        return f"make room, then {going_on(look)}"
    if look.failed_process and look.failed_process.process == "env":  # its own code: no setting of ours mends it
        return f"{worded('rl_get_logs', look.run.run_id, role='env')} then {going_on(look)}"
    return going_on(look)
