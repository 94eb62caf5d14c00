"""The tools that look at a run, at several, and at all: rl_check_status, rl_list_runs.

An operator may limit how often a run is looked at, as the seeds do (`min_status_interval_s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from pydantic import Field

from halteres.agent.tool import READS, Caller, Result, RunId, RunIds, WaitSeconds, chosen_run, tool
from halteres.agent.truncation import clipped, significant
from halteres.agent.watching.headline import CORRECT, rounded
from halteres.agent.watching.logs import log_tail
from halteres.agent.watching.look import Look, alert_rows, failure_facts, look_at, sink_facts, wandb_names, why_no_batch
from halteres.agent.watching.next_steps import next_after, until_it_ends
from halteres.agent.watching.waiting import Until, wait_for, wait_for_all
from halteres.config import environ
from halteres.config.operator_policy import load_policy
from halteres.errors import HalteresError, NotReady, UserError, boundary, unknown
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.next_step import worded
from halteres.runs.directory import UNREADABLE, Entry, RunDirectory, known_runs
from halteres.runs.reading.evaluations import outcome_of
from halteres.runs.reading.failures import read_restarts
from halteres.runs.reading.progress import SEED_ROLES, conditions, last_reward
from halteres.runs.state import RunUnreadable, Status, locked

WHY_LENGTH = 200
"""Characters of why there is no evaluation, and of an error in a list."""


class StatusResult(Result):
    """A run as it is now; where it failed also error, code, exit, log_tail, last_checkpoint, resumable.

    Where the operator's policy limits looks: rate_limited, message, next_check_in_seconds, and the figures of the last
    look.
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
    processes: dict[str, str] = {}  # api, trainer, env and more: "running", "exited (N)", "not started"
    wandb_project: str = ""
    wandb_run_name: str = ""
    wandb_url: str | None = None
    wandb: str = ""  # where it is a sink: starting, online, offline, off, failed (then also wandb_error)
    sinks: dict[str, str] = {}  # of each sink, where it is or what is wrong with it
    logs: dict[str, str] = {}  # paths, of a run that ails
    metrics: dict[str, Any] = {}  # step, reward_mean, percent_correct, eval_percent_correct; loss_per_token: minus
    # the mean advantage of a trained token, no error that should fall; kl; kl_reference, implicit_reward_gap and
    # share_of_gain where they are measured; where steps moved no weight: skipped_steps, policy_version; where held-out
    # tasks failed: eval_num_failed, eval_num_tasks that the figure is of
    gain: dict[str, Any] = {}  # of an ended run: of, before, after, ci95 of the difference, certain
    weights: str = ""  # where they have hardly moved
    trend: dict[str, Any] = {}  # reward_mean: its curve; groups_without_signal: share of the last steps' groups
    alerts: list[dict[str, Any]] = []  # rule, step, evidence, remedy
    eval_failed: dict[str, Any] = {}  # step, why: where the newest evaluation gave no figure
    no_evaluation: str = ""  # why there will be no held-out figure
    no_batch: str = ""  # of a run that stands still: why the trajectory server has no batch for it
    failed_rollouts: dict[str, int] = {}  # of all steps, by why: each was replaced by another
    restarts: dict[str, int] = {}  # processes that died and were started again: how often
    runs: list[dict[str, Any]] = []  # where several were asked about: each in brief
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
    """Look at a run: state, step, reward, trend, alerts with remedies, time left. Waits up to `wait_s` for `until`.

    Several runs (`run_ids`) are told in brief; their wait ends once `until` holds of all (an alert or change: of any).
    """
    if not run_ids:
        event = Until.parse(until or "change")
        run = await asyncio.to_thread(chosen_run, run_id)
        woke = await wait_for(run, event, wait_s) if wait_s else None
        return await asyncio.to_thread(_answer, run, woke)
    event = Until.parse(until or "terminal")
    if run_id:
        raise UserError("rl_check_status takes run_id or run_ids.", "", worded("rl_check_status", run_ids=run_ids))
    found = await asyncio.to_thread(lambda: [chosen_run(each) for each in run_ids])
    runs = [*{run.run_id: run for run in found}.values()]
    woke = await wait_for_all(runs, event, wait_s) if wait_s else None
    return await asyncio.to_thread(_answer_on_several, runs, woke)


def _answer(run: RunDirectory, woke: str | None) -> StatusResult:
    look = look_at(run)
    state = look.state
    following = next_after(look)
    if snapshot := rate_limited_answer(look):
        return StatusResult(**snapshot, next=until_it_ends(run.run_id))
    failed = look.progress.unevaluated
    occasional = {  # in the answer only where there is something to say
        "name": state.own_name,
        "phase": state.phase,
        "code": state.code,
        "note": state.note,
        "eval_failed": {"step": failed.step, "why": clipped(failed.why, WHY_LENGTH)} if failed else {},
        "no_evaluation": clipped(look.progress.no_evaluation, WHY_LENGTH),
        "no_batch": why_no_batch(look),
        "restarts": read_restarts(run.path / "events.jsonl"),
        "failed_rollouts": dict(look.progress.failed_rollouts),
        "gain": _gain(look),
        "weights": look.hardly_moved,
        "woke": woke,
    }
    answer: dict[str, Any] = {
        "run_id": run.run_id,
        "status": state.status,
        "environment": state.environment,
        "running_time_minutes": look.minutes,
        "processes": conditions(state),
        **wandb_names(state, look.given),
        **sink_facts(run),
        # rl_start_training has named the logs; they are worth another word where something is wrong.
        "logs": {role: str(run.log(role)) for role in SEED_ROLES} if look.health in ("failing", "failed") else {},
        "metrics": look.metrics,
        "state": look.state_word,
        "step": look.step,
        "total_steps": state.total_steps,
        "alerts": alert_rows(look),
        "health": look.health,
        "suggested_wait_s": look.suggested_wait_s,
        **({} if state.terminal else {"eta_minutes": look.eta_minutes, "trend": look.trend}),
        **{name: value for name, value in occasional.items() if value},
        **failure_facts(look),
        "next": following,
    }
    if state.status == "failed":
        answer["log_tail"] = log_tail(look, answer)
    return StatusResult(**answer)


def _gain(look: Look) -> dict[str, Any]:
    """Of a run that has ended, what every reader asks next: has it learnt?"""
    if not look.state.terminal:
        return {}
    outcome = outcome_of(look.run, look.state)
    gain = outcome.gains.get(CORRECT)
    if gain is None or outcome.baseline is None:
        return {}
    before, after = (rounded(one.figures[CORRECT]) for one in (outcome.baseline, outcome.evaluations[-1]))
    return {"of": CORRECT, "before": before, "after": after, **{name: gain.facts[name] for name in ("ci95", "certain")}}


def _answer_on_several(runs: list[RunDirectory], woke: str | None) -> StatusResult:
    """Each in brief; next, what a run that ails or has failed asks for; else to wait on; else to compare."""
    looks = [look_at(run) for run in runs]
    rows = [_row(look) for look in looks]
    ids = [run.run_id for run in runs]
    ailing = (
        look
        for look in looks
        if look.state.status == "failed" or (look.pressing is not None and not look.state.terminal)
    )
    if look := next(ailing, None):
        following = next_after(look)
    elif not all(look.state.terminal for look in looks):
        following = worded("rl_check_status", run_ids=ids, wait_s=int(environ.longest_wait_s()), until="terminal")
    else:
        following = worded("rl_compare_runs", ids) if len(ids) > 1 else next_after(looks[0])
    answer: dict[str, Any] = {"runs": rows, "woke": woke, "next": following}
    return StatusResult(**{name: value for name, value in answer.items() if value is not None})


def _row(look: Look) -> dict[str, Any]:
    """One of several runs; where the operator's policy limits looks, the last one."""
    state = look.state
    row = rate_limited_answer(look) or {
        "run_id": look.run.run_id,
        "name": state.own_name,
        "environment": state.environment,
        "status": state.status,
        "health": None if state.terminal else look.health,
        "step": look.step,
        "total_steps": state.total_steps,
        "eta_minutes": look.eta_minutes,
        "metrics": {name: value for name, value in look.metrics.items() if value is not None and name != "step"},
        "gain": _gain(look),
        "alerts": [alert.rule for alert in look.alerts],
        "error": clipped(state.error, WHY_LENGTH) if state.error else None,
    }
    return {name: value for name, value in row.items() if value not in (None, {}, [])}


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """The last look that was answered in full."""

    at: float  # unix seconds
    status: str
    phase: str | None
    step: int
    metrics: dict[str, Any]


def looks_home() -> Path:
    """The folder of all last looks: HALTERES_HOME/looks."""
    return environ.home() / "looks"


def rate_limited_answer(look: Look) -> dict[str, Any] | None:
    """The answer to a look that comes too early; None where it may be answered in full, and is remembered."""
    try:
        interval_s = load_policy().min_status_interval_s
    except HalteresError:
        return None  # a policy that cannot be read stops whoever starts a run, not whoever watches one
    if interval_s <= 0:
        return None
    file = looks_home() / f"{look.run.run_id}.json"
    with contextlib.ExitStack() as held:
        # Of callers at the same time one is answered in full. Where no lock is to be had, all are.
        with contextlib.suppress(OSError, NotReady):
            looks_home().mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(looks_home() / ".lock", 2.0, "Another look is being remembered."))
        last, now = _last_look(file), max(look.at, time.time())  # it may have waited for the lock
        if last and look.health == "healthy" and (last.status, last.phase) == (look.state.status, look.state.phase):
            left_s = last.at + interval_s - now
            if 0 < left_s <= interval_s:  # a clock that was set back limits nobody for ever
                return {
                    "rate_limited": True,
                    "run_id": look.run.run_id,
                    "message": f"Rate limited. Next check available in {max(1, math.ceil(left_s / 60))} minutes.",
                    "next_check_in_seconds": round(left_s, 1),
                    "status": last.status,
                    "step": last.step,
                    "metrics": last.metrics,
                }
        _remember(file, look, now)
    return None


def _last_look(file: Path) -> LastLook | None:
    try:
        return msgspec.json.decode(read_regular(file), type=LastLook)
    except (OSError, *NOT_JSON):
        return None


def _remember(file: Path, look: Look, now: float) -> None:
    state = look.state
    with contextlib.suppress(OSError):  # a home that cannot be written is no reason not to look
        if state.terminal:
            return file.unlink(missing_ok=True)
        seen = LastLook(at=now, status=state.status, phase=state.phase, step=look.step, metrics=look.metrics)
        replace_file(file, msgspec.json.encode(seen))


ACTIVE = "active"
STATUSES: tuple[str, ...] = (ACTIVE, *get_args(Status), UNREADABLE)

LIST_LENGTH, LONGEST_LIST, USUAL_RUNS = 2200, 7000, 20
"""Characters of the list: for the usual number of runs, and at most. Runs have all their keys as long as there is room;
older ones have fewer, and the oldest are left out."""


class Runs(Result):
    """Runs, newest first. One is {run_id, environment, status, wandb_run_name} (seed keys) and {name, step,
    total_steps, reward, started, minutes, resumed_from}: name and resumed_from where they say something new, step and
    started always, the others as far as the answer stays short (active and newest runs first). Of an unreadable run,
    whose run.json is damaged, the four are told, and the error."""

    runs: list[dict[str, Any]]
    count: int  # of all that fit, also where fewer are listed
    left_out: dict[str, Any] = {}  # where the answer would be too long: runs, details_of so many, more


@tool(title="List runs", hints=READS)
def rl_list_runs(
    caller: Caller,
    status: Annotated[str | None, Field(description="only those: active, running, completed, failed, stopped")] = None,
    limit: Annotated[int, Field(ge=1, le=200)] = 20,
) -> Runs:
    """List runs, newest first, also those that others started."""
    if status is not None and status not in STATUSES:
        raise unknown(UserError, "status", status[:40], STATUSES)
    fitting = [
        run
        for run in known_runs()
        if status is None or run.facts.status == status or (status == ACTIVE and not run.ended)
    ]
    listed = fitting[:limit]
    rows = _listed_rows(listed, min(LONGEST_LIST, LIST_LENGTH * max(1, limit // USUAL_RUNS)))
    brief = sum("step" in row and "minutes" not in row for row in rows)
    cut = {"runs": len(listed) - len(rows), "details_of": brief, "more": "limit=8 tells each in full"}
    active = [run for run in listed if not run.ended]
    if active:
        following = worded("rl_check_status", active[0].run_id)
    elif listed:
        is_completed = listed[0].facts.status == "completed"
        following = worded("rl_get_results" if is_completed else "rl_check_status", listed[0].run_id)
    else:
        following = "rl_list_environments()"
    left_out = {"left_out": cut} if brief or cut["runs"] else {}
    return Runs(runs=rows, count=len(fitting), **left_out, next=following)


def _listed_rows(runs: Sequence[Entry], room: int) -> list[dict[str, Any]]:
    """In brief as many runs as there is room for, active ones first, then the newest; of these in full as many as the
    rest of the room allows. In the order of `runs`."""
    first = sorted(runs, key=lambda run: run.ended)  # stable: within each kind, newest first
    rows: dict[str, dict[str, Any]] = {}
    for run in first:
        row = _brief_row(run)
        if rows and _length(row) > room:
            break
        room -= _length(row)
        rows[run.run_id] = row
    now = time.time()
    for run in first[: len(rows)]:
        row = rows[run.run_id] if run.unreadable else _full_row(rows[run.run_id], run, now)
        room -= _length(row) - _length(rows[run.run_id])
        if room < 0:
            break
        rows[run.run_id] = row
    return [rows[run.run_id] for run in runs if run.run_id in rows]


def _brief_row(run: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run_id": run.run_id,
        "environment": run.facts.environment,
        "status": run.facts.status,
        "wandb_run_name": run.default_name,
    }
    if run.unreadable:
        return {**row, "error": clipped(run.error, WHY_LENGTH)}
    started = datetime.fromtimestamp(run.facts.created_at, UTC).strftime("%Y-%m-%dT%H:%MZ")
    return {**row, "step": run.facts.step, "started": started}


def _full_row(brief: dict[str, Any], run: Entry, now: float) -> dict[str, Any]:
    """Whatever is wrong with one run's files is in its row, and the other runs are listed."""
    facts = run.facts
    try:
        with boundary(RunUnreadable, f"Reading run {run.run_id}"):
            reward = last_reward(RunDirectory(run.path))
            return {
                **brief,
                **({"name": run.own_name} if run.own_name else {}),
                "total_steps": facts.total_steps,
                "reward": None if reward is None else significant(reward),
                "minutes": round(max(0.0, (facts.ended_at or now) - facts.created_at) / 60, 1),
                **({"resumed_from": facts.resumed_from} if facts.resumed_from else {}),
            }
    except RunUnreadable as error:
        return {**brief, "error": clipped(error.what, WHY_LENGTH)}


def _length(row: dict[str, Any]) -> int:
    return len(json.dumps(row, ensure_ascii=False, separators=(",", ":"))) + 1
