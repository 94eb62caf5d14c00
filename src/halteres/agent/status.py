"""The tools that look at a run, at several, and at all: rl_check_status, rl_list_runs.

A status answer is put together here, by `_status_of`, from a run's report (`runs/reading/report`)
and its figures (`runs/reading/status_figures`). An operator may limit how often a run is looked at,
as the seeds do (`min_status_interval_s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, get_args

import msgspec
from pydantic import Field

from halteres.agent.answer_text import nonempty
from halteres.agent.next_call import LIST_ENVIRONMENTS
from halteres.agent.tool import (
    READS,
    Caller,
    Facts,
    Result,
    RunId,
    RunIds,
    Sentence,
    ShownAlerts,
    WaitSeconds,
    chosen_run,
    tool,
    wait_cut,
)
from halteres.agent.waiting import Until, wait_for, wait_for_all
from halteres.config import environ
from halteres.config.operator_policy import load_policy
from halteres.errors import HalteresError, UserError, boundary, unknown
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.next_step import NextStep
from halteres.runs.directory import UNREADABLE, Entry, RunDirectory, known_runs
from halteres.runs.reading.alerts import REFUSED
from halteres.runs.reading.logs import log_tail
from halteres.runs.reading.progress import (
    SEED_ROLES,
    FailedEvaluation,
    conditions,
    last_reward,
)
from halteres.runs.reading.report import (
    Gain,
    RunReport,
    report_of,
    sink_facts,
    until_it_ends,
    wandb_names,
)
from halteres.runs.state import RunUnreadable, Status
from halteres.short_texts import clipped, rounded

WHY_LENGTH = 200  # characters of why there is no evaluation, and of an error in a list


class StepFailure(Facts):
    """An evaluation that gave no figure."""

    step: int
    why: str


REFUSAL_LENGTH, EVIDENCE_LENGTH = 300, 150
"""Characters of an alert's evidence: where a server's own words are in it, and elsewhere."""

# characters of all alerts of an answer but the first. A remedy is never cut: it is a call.
ALERTS_LENGTH = 480


SEED_METRICS = ("step", "reward_mean", "percent_correct", "eval_percent_correct")


class AlertRow(Facts):
    """What one rule said last; of an alert that was shown whole before, `rule` and `since_step`."""

    rule: str
    step: int = 0
    since_step: int = 0  # at which it was raised
    times: int = 1
    evidence: str = ""
    remedy: Sentence = ""
    over_at: int | None = None  # the step at which its cause was found gone


def alert_rows(report: RunReport, shown: ShownAlerts | None) -> list[AlertRow]:
    """The alerts as an answer has them, as many as there is room for, the first one in any case;
    none next to a failure, which needs the room.

    `shown`: what the reader was shown whole before, and is not again.
    """
    if report.state.status == "failed":
        return []
    rows: list[AlertRow] = []
    room, num_whole, run_id = ALERTS_LENGTH, 0, report.run.run_id
    for alert in report.alerts:
        if alert.is_over:
            continue
        if shown and shown.has(run_id, alert):
            rows.append(AlertRow(rule=alert.rule, since_step=alert.step))
            continue
        length = EVIDENCE_LENGTH
        if alert.rule == REFUSED:
            length = REFUSAL_LENGTH
        evidence = clipped(alert.evidence, length)
        row = AlertRow(rule=alert.rule, step=alert.step, evidence=evidence, remedy=alert.remedy)
        room -= len(row.model_dump_json(exclude_unset=True))
        if num_whole and room < 0:
            break
        rows.append(row)
        num_whole += 1
        if shown:
            shown.add(run_id, alert)
    return rows


class StatusResult(Result):
    """A run as it is now; where it failed also error, code, exit, log_tail, last_checkpoint,
    resumable.

    Where the operator's policy limits looks: rate_limited, message, next_check_in_seconds, and the
    figures of the last look.
    """

    run_id: str = ""
    name: str = ""  # where it was given one
    status: str = ""
    state: str = ""  # in W&B's words: running, finished, crashed
    phase: str | None = None
    environment: str = ""
    step: int = 0
    total_steps: int = 0
    running_time_minutes: float = 0
    eta_minutes: list[int | float] | None = None  # [low, high]
    # api, trainer, env: "running", "exited (N)", "not started"; others that are not as expected
    processes: dict[str, str] = {}
    wandb_project: str = ""
    wandb_run_name: str = ""
    wandb_url: str | None = None
    # where it is a sink: starting, online, offline, off, failed (then also wandb_error)
    wandb: str = ""
    sinks: dict[str, str] = {}  # of each sink, where it is or what is wrong with it
    logs: dict[str, str] = {}  # paths, of a run that is failing or has failed
    # step, reward_mean, percent_correct, eval_percent_correct, and what is not in `trend`;
    # minus loss_per_token is the mean advantage of a trained token, no error that should fall;
    # kl; kl_reference, implicit_reward_gap and share_of_gain where they are measured; where steps
    # moved no weight: skipped_steps, policy_version; where held-out tasks failed: eval_num_failed,
    # eval_num_tasks that the figure is of
    metrics: dict[str, Any] = {}
    gain: Gain | None = None  # of an ended run
    weights: str = ""  # where they have hardly moved
    remarks: list[str] = []  # what the figures are of, and what they do not say
    resumed_from: str | None = None
    wait_cut: str = ""  # where the host's limit ended the wait before the seconds asked for
    # reward_mean: its curve; groups_without_signal: share of the last steps' groups that were
    # trained on; groups_dropped: of all steps, those that the environment never sent; entropy,
    # completion_tokens, truncated and the environment's own measures, from first to last
    trend: dict[str, Any] = {}
    # shares of the last steps' time: batch is the wait for rollouts
    step_time: dict[str, float] = {}
    alerts: list[AlertRow] = []
    alerts_over: list[str] = []  # rules whose cause is gone
    eval_failed: StepFailure | None = None  # the newest evaluation, where it gave no figure
    no_evaluation: str = ""  # why there will be no held-out figure
    no_batch: str = ""  # of a run that stands still: why the trajectory server has no batch for it
    failed_rollouts: dict[str, int] = {}  # of all steps, by why: each was replaced by another
    quarantined_tasks: dict[str, int] = {}  # that are not drawn any more, by why
    restarts: dict[str, int] = {}  # processes that died and were started again: how often
    runs: list[dict[str, Any]] = []  # where several were asked about: each in brief
    log_tail: list[str] = []  # of the process that failed
    health: str = ""  # healthy, alert, failing; of a run that has ended, its status
    woke: str | None = None  # what ended the wait: the event asked for, "terminal", or "wait_s"
    suggested_wait_s: int = 0
    rate_limited: bool = False


@tool(title="Look at a run", hints=READS)
async def rl_check_status(
    caller: Caller,
    run_id: RunId = None,
    run_ids: RunIds = None,
    wait_s: WaitSeconds = 0,
    until: Annotated[
        str | None,
        Field(
            description='wake at "terminal", "running", "eval", "alert", "change" or "step>=N"; '
            'default "change", of several runs "terminal": once all have ended'
        ),
    ] = None,
) -> StatusResult:
    """Look at a run: state, step, reward, trend, alerts with remedies, time left. Waits up to
    `wait_s` for `until`.

    Several runs (`run_ids`) are shown in brief; their wait ends once `until` holds of all (an alert
    or change: of any).
    """
    if not run_ids:
        event = Until.parse(until or "change")
        run = await asyncio.to_thread(chosen_run, run_id)
        woke = None
        if wait_s:
            woke = await wait_for(run, event, wait_s)
        return await asyncio.to_thread(_status_of, caller, run, woke, wait_cut(wait_s))
    event = Until.parse(until or "terminal")
    if run_id:
        several = NextStep.of("rl_check_status", run_ids=run_ids)
        raise UserError("rl_check_status takes run_id or run_ids.", "", several)
    found = await asyncio.to_thread(lambda: [chosen_run(each) for each in run_ids])
    runs = [*{run.run_id: run for run in found}.values()]
    woke = None
    if wait_s:
        woke = await wait_for_all(runs, event, wait_s)
    return await asyncio.to_thread(_status_of_several, caller, runs, woke, wait_cut(wait_s))


def _status_of(caller: Caller, run: RunDirectory, woke: str | None, cut: str) -> StatusResult:
    """The answer on one run, put together from its report.

    Args:
        woke: what ended the wait; None: there was none.
        cut: why the wait was shorter than the one asked for.
    """
    report = report_of(run, longest_wait_s=caller.longest_wait_s)
    state, progress = report.state, report.progress
    if limited := rate_limited_answer(report):
        return StatusResult(**limited, next=until_it_ends(run.run_id, report.longest_wait_s))
    if woke != "wait_s":
        cut = ""
    trend: dict[str, Any] = {}
    of_a_living_run: dict[str, Any] = {}
    if not state.terminal:
        trend = report.trend
        of_a_living_run = {
            "eta_minutes": report.eta_minutes,
            "trend": trend,
            **nonempty(step_time=report.time_shares),
        }
    # rl_start_training has named the logs; they are worth another word where something is wrong
    logs: dict[str, str] = {}
    if report.health in ("failing", "failed"):
        logs = {role: str(run.log(role)) for role in SEED_ROLES}
    code, eval_failed = None, None
    # a failure has a code of its own; it needs the room, and mostly has the same cause
    if state.status != "failed":
        code, eval_failed = state.code, _step_failure(progress.unevaluated)
    answer = StatusResult(
        run_id=run.run_id,
        status=state.status,
        environment=state.environment,
        running_time_minutes=report.minutes,
        processes=_processes(report),
        **wandb_names(state, report.given),
        **sink_facts(run),
        logs=logs,
        metrics=_metrics(report, trend),
        state=report.state_word,
        step=report.step,
        total_steps=state.total_steps,
        alerts=alert_rows(report, caller.shown_alerts),
        health=report.health,
        suggested_wait_s=report.suggested_wait_s,
        **of_a_living_run,
        **nonempty(
            name=state.own_name,
            phase=state.phase,
            code=code,
            note=state.note,
            eval_failed=eval_failed,
            no_evaluation=clipped(progress.no_evaluation, WHY_LENGTH),
            alerts_over=[alert.rule for alert in report.alerts if alert.is_over],
            no_batch=report.no_batch,
            restarts=dict(report.restarts),
            failed_rollouts=dict(progress.failed_rollouts),
            quarantined_tasks=dict(report.quarantined.codes) if report.quarantined else {},
            gain=report.gain,
            weights=report.hardly_moved,
            remarks=report.remarks,
            resumed_from=state.resumed_from,
            woke=woke,
            wait_cut=cut,
        ),
        **_failure_facts(report),
        next=report.next,
    )
    if state.status == "failed":
        answer.log_tail = log_tail(report, len(answer.model_dump_json(exclude_unset=True)))
    return answer


def _step_failure(failed: FailedEvaluation | None) -> StepFailure | None:
    if failed is None:
        return None
    return StepFailure(step=failed.step, why=clipped(failed.why, WHY_LENGTH))


def _processes(report: RunReport) -> dict[str, str]:
    """The seeds' processes; the others where one of them is not as it should be."""
    found = conditions(report.state)
    if report.health in ("failing", "failed"):
        return found
    expected = "running"
    if report.state.terminal:
        expected = "exit"
    return {
        role: condition
        for role, condition in found.items()
        if role in SEED_ROLES or not condition.startswith(expected)
    }


def _metrics(report: RunReport, trend: Mapping[str, Any]) -> dict[str, float | None]:
    """The newest figures, without those whose course is in the trend; the seeds' are there in any
    case.
    """
    return {
        name: value
        for name, value in report.metrics.items()
        if name not in trend or name in SEED_METRICS
    }


def _failure_facts(report: RunReport) -> dict[str, Any]:
    """What the answer on a failed run has as well; nothing for any other."""
    failure = report.failure
    if failure is None:
        return {}
    exited = None
    if failure.exit:
        exited = failure.exit.facts
    return {
        "error": clipped(failure.error, 300),
        "code": failure.code,
        "exit": exited,
        "resumable": failure.resumable,
        "last_checkpoint": failure.last_checkpoint,
    }


def _status_of_several(
    caller: Caller, runs: list[RunDirectory], woke: str | None, cut: str
) -> StatusResult:
    """Each in brief; next, what the first run that fails or has an alert asks for; else to
    wait on; else to compare.
    """
    reports = [report_of(run, longest_wait_s=caller.longest_wait_s) for run in runs]
    rows = [_row(report) for report in reports]
    ids = [run.run_id for run in runs]
    ailing = (
        one
        for one in reports
        if one.state.status == "failed" or (one.pressing is not None and not one.state.terminal)
    )
    if first := next(ailing, None):
        following = first.next
    elif not all(one.state.terminal for one in reports):
        wait_s = int(caller.longest_wait_s)
        following = NextStep.of("rl_check_status", run_ids=ids, wait_s=wait_s, until="terminal")
    else:
        if len(ids) > 1:
            following = NextStep.of("rl_compare_runs", ids)
        else:
            following = reports[0].next
    if woke != "wait_s":
        cut = ""
    return StatusResult(runs=rows, **nonempty(woke=woke, wait_cut=cut), next=following)


def _row(report: RunReport) -> dict[str, Any]:
    """One of several runs; where the operator's policy limits looks, as it was at the last one."""
    limited = rate_limited_answer(report)
    if limited is not None:
        return nonempty(**limited)
    state = report.state
    health = None
    if not state.terminal:
        health = report.health
    metrics = {name: value for name, value in report.metrics.items() if value is not None}
    metrics.pop("step", None)
    return nonempty(
        run_id=report.run.run_id,
        name=state.own_name,
        environment=state.environment,
        status=state.status,
        health=health,
        step=report.step,
        total_steps=state.total_steps,
        eta_minutes=report.eta_minutes,
        metrics=metrics,
        gain=report.gain,
        alerts=[alert.rule for alert in report.alerts if not alert.is_over],
        error=clipped(state.error or "", WHY_LENGTH),
    )


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """The last look that was answered in full."""

    at: float  # unix seconds
    status: str
    phase: str | None
    step: int
    metrics: dict[str, Any]


LOOKS = "looks"  # the folder of all last looks, in HALTERES_HOME


def rate_limited_answer(report: RunReport) -> dict[str, Any] | None:
    """The answer to a look that comes too early; None where it may be answered in full, and is
    remembered.
    """
    try:
        interval_s = load_policy().min_status_interval_s
    except HalteresError:
        # a policy that cannot be read stops a start of a run, not a look at one
        return None
    if interval_s <= 0:
        return None
    file = environ.home() / LOOKS / f"{report.run.run_id}.json"
    now, last, state = report.at, None, report.state
    with contextlib.suppress(OSError, *NOT_JSON):
        last = msgspec.json.decode(read_regular(file), type=LastLook)
    if (
        last
        and report.health == "healthy"
        and (last.status, last.phase) == (state.status, state.phase)
    ):
        left_s = last.at + interval_s - now
        if 0 < left_s <= interval_s:  # a clock may have been set back
            return {
                "rate_limited": True,
                "run_id": report.run.run_id,
                "message": (
                    "Rate limited. Next check available in "
                    f"{max(1, math.ceil(left_s / 60))} minutes."
                ),
                "next_check_in_seconds": round(left_s, 1),
                "status": last.status,
                "step": last.step,
                "metrics": last.metrics,
            }
    with contextlib.suppress(OSError):  # a home that cannot be written is no reason not to look
        file.parent.mkdir(parents=True, exist_ok=True)
        if state.terminal:
            file.unlink(missing_ok=True)
        else:
            seen = LastLook(
                at=now,
                status=state.status,
                phase=state.phase,
                step=report.step,
                metrics=report.metrics,
            )
            replace_file(file, msgspec.json.encode(seen))
    return None


ACTIVE = "active"
STATUSES: tuple[str, ...] = (ACTIVE, *get_args(Status), UNREADABLE)

LIST_LENGTH, LONGEST_LIST, USUAL_RUNS = 2200, 7000, 20
"""Characters of the list: for the usual number of runs, and at most. Runs have all their keys as
long as there is room; older ones have fewer, and the oldest are left out.
"""


class ListedRun(Facts):
    """A run in a list; of an unreadable one, whose run.json is damaged, the first four and the
    error.
    """

    run_id: str
    environment: str
    status: str
    wandb_run_name: str
    step: int = 0
    started: str = ""
    name: str = ""  # where it was given one
    total_steps: int = 0
    reward: float | None = None
    minutes: float = 0
    resumed_from: str = ""
    error: str = ""

    @property
    def length(self) -> int:
        """Characters that it takes."""
        return len(self.model_dump_json(exclude_unset=True)) + 1


class LeftOut(Facts):
    """How many runs are not listed, of how many the details are not, and how to see more."""

    runs: int
    details_of: int
    more: str


class Runs(Result):
    """Runs, newest first. name and resumed_from where they say something new, step and started
    always, the others as far as the answer stays short: active and newest runs first.
    """

    runs: list[ListedRun]
    count: int  # of all that fit, also where fewer are listed
    left_out: LeftOut | None = None  # where the answer would be too long


@tool(title="List runs", hints=READS)
def rl_list_runs(
    caller: Caller,
    status: Annotated[
        str | None, Field(description="only those: active, running, completed, failed, stopped")
    ] = None,
    limit: Annotated[int, Field(ge=1, le=200)] = 20,
) -> Runs:
    """List runs, newest first, also those that others started."""
    if status is not None and status not in STATUSES:
        raise unknown(UserError, "status", status[:40], STATUSES)
    found = [
        run
        for run in known_runs()
        if status is None or run.facts.status == status or (status == ACTIVE and not run.ended)
    ]
    listed = found[:limit]
    rows = _listed_rows(listed, min(LONGEST_LIST, LIST_LENGTH * max(1, limit // USUAL_RUNS)))
    brief = sum({"step", "minutes"} & row.model_fields_set == {"step"} for row in rows)
    left_out = LeftOut(
        runs=len(listed) - len(rows), details_of=brief, more="limit=8 tells each in full"
    )
    following = LIST_ENVIRONMENTS
    # the newest run that goes on comes first, else the newest
    by_interest = sorted(listed, key=lambda run: run.ended)
    if by_interest:
        first = by_interest[0]
        following = NextStep.of("rl_check_status", first.run_id)
        if first.ended and first.facts.status == "completed":
            following = NextStep.of("rl_get_results", first.run_id)
    cut = {}
    if brief or left_out.runs:
        cut = {"left_out": left_out}
    return Runs(runs=rows, count=len(found), **cut, next=following)


def _listed_rows(runs: Sequence[Entry], room: int) -> list[ListedRun]:
    """In brief as many runs as there is room for, active ones first, then the newest; of these in
    full as many as the rest of the room allows. In the order of `runs`.
    """
    first = sorted(runs, key=lambda run: run.ended)  # stable: within each kind, newest first
    rows: dict[str, ListedRun] = {}
    for run in first:
        row = _brief_row(run)
        if rows and row.length > room:
            break
        room -= row.length
        rows[run.run_id] = row
    for run in first[: len(rows)]:
        if run.unreadable:
            row = rows[run.run_id]
        else:
            row = _full_row(rows[run.run_id], run)
        room -= row.length - rows[run.run_id].length
        if room < 0:
            break
        rows[run.run_id] = row
    return [rows[run.run_id] for run in runs if run.run_id in rows]


def _brief_row(run: Entry) -> ListedRun:
    facts = run.facts
    more: dict[str, Any] = {"error": clipped(run.error, WHY_LENGTH)}
    if not run.unreadable:
        more = {
            "step": facts.step,
            "started": f"{datetime.fromtimestamp(facts.created_at, UTC):%Y-%m-%dT%H:%MZ}",
        }
    return ListedRun(
        run_id=run.run_id,
        environment=facts.environment,
        status=facts.status,
        wandb_run_name=run.default_name,
        **more,
    )


def listed_run(run: Entry) -> ListedRun:
    """A run in a list, with all that there is room for in no answer of many runs."""
    brief = _brief_row(run)
    if run.unreadable:
        return brief
    return _full_row(brief, run)


def _full_row(brief: ListedRun, run: Entry) -> ListedRun:
    """Whatever is wrong with one run's files is in its row, and the other runs are listed."""
    facts = run.facts
    try:
        with boundary(RunUnreadable, f"Reading run {run.run_id}"):
            more = {
                "total_steps": facts.total_steps,
                "reward": rounded(last_reward(RunDirectory(run.path)), 3),
                "minutes": round(
                    max(0.0, (facts.ended_at or time.time()) - facts.created_at) / 60, 1
                ),
                **nonempty(name=run.own_name, resumed_from=facts.resumed_from),
            }
    except RunUnreadable as error:
        more = {"error": clipped(error.what, WHY_LENGTH)}
    return brief.model_copy(update=more)
