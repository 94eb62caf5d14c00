"""The tool that looks at a run: rl_check_status.

An operator may limit how often a run is looked at, as the seeds do (`min_status_interval_s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field

from halteres.agent.arguments import RunId, RunIds, WaitSeconds, chosen_run
from halteres.agent.caller import Caller
from halteres.agent.fitting import clipped
from halteres.agent.tool import READS, Result, tool
from halteres.agent.watching.headline import CORRECT, rounded
from halteres.agent.watching.look import (
    Look,
    failure_facts,
    log_tail,
    look_at,
    next_after,
    seed_facts,
    told_briefly,
    until_it_ends,
    why_no_batch,
)
from halteres.agent.watching.stopping import Until, wait_for, wait_for_all
from halteres.config import environ
from halteres.config.policies import load_policy
from halteres.errors import HalteresError, NotReady, UserError
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.next_step import worded
from halteres.runs.directory import RunDirectory
from halteres.runs.lock import locked
from halteres.runs.reading.failures import read_restarts
from halteres.runs.reading.outcome import outcome_of

LOCK = ".lock"
WITHIN_S = 2.0
"""A look is remembered within milliseconds."""


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """What was told, and when."""

    at: float  # unix seconds
    status: str
    phase: str | None
    step: int
    metrics: dict[str, Any]


def limited(look: Look) -> dict[str, Any] | None:
    """What a look that comes too early is told instead; None where it may be told everything, and is remembered."""
    interval_s = _interval_s()
    if interval_s <= 0:
        return None
    with _alone():
        return _limited(look, interval_s)


def looks_home() -> Path:
    """The folder of all looks: HALTERES_HOME/looks."""
    return environ.home() / "looks"


def _limited(look: Look, interval_s: float) -> dict[str, Any] | None:
    file = looks_home() / f"{look.run.run_id}.json"
    last, now = _read(file), max(look.at, time.time())  # whoever waited for the lock has looked before the other told
    if last and look.health == "healthy" and (last.status, last.phase) == (look.state.status, look.state.phase):
        left_s = last.at + interval_s - now
        if 0 < left_s <= interval_s:  # a clock that was set back limits nobody for ever
            return _answer(look, last, left_s)
    _remember(file, look, now)
    return None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Of callers at the same time one gets the full look, and the others what it remembered. Where no lock is to be
    had, all of them do: it is no reason not to look."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotReady):
            looks_home().mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(looks_home() / LOCK, WITHIN_S, "Another look is being remembered."))
        yield


def _answer(look: Look, last: LastLook, left_s: float) -> dict[str, Any]:
    return {
        "rate_limited": True,
        "run_id": look.run.run_id,
        "message": f"Rate limited. Next check available in {max(1, math.ceil(left_s / 60))} minutes.",
        "next_check_in_seconds": round(left_s, 1),
        "status": last.status,
        "step": last.step,
        "metrics": last.metrics,
    }


def _interval_s() -> float:
    try:
        return load_policy().min_status_interval_s
    except HalteresError:
        return 0.0  # a policy that cannot be read stops whoever starts a run, not whoever watches one


def _read(file: Path) -> LastLook | None:
    try:
        return msgspec.json.decode(read_regular(file), type=LastLook)
    except (OSError, *NOT_JSON):
        return None


def _remember(file: Path, look: Look, now: float) -> None:
    """A home that cannot be written is no reason not to look."""
    state = look.state
    with contextlib.suppress(OSError):
        if state.terminal:
            return file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        seen = LastLook(at=now, status=state.status, phase=state.phase, step=look.step, metrics=look.metrics)
        replace_file(file, msgspec.json.encode(seen))


WHY_LENGTH = 200
"""Characters of why there is no evaluation."""


class Looked(Result):
    """A run as it is now; where it failed also error, code, exit, log_tail, last_checkpoint, resumable.

    Where the operator's policy limits looks: rate_limited, message, next_check_in_seconds, and what was told last.
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
) -> Looked:
    """Look at a run: state, step, reward, trend, alerts with remedies, time left. Waits up to `wait_s` for `until`.

    Several runs (`run_ids`) are told in brief; their wait ends once `until` holds of all (an alert or change: of any).
    """
    if run_ids:
        return await _several(run_id, run_ids, wait_s, Until.parse(until or "terminal"))
    wanted = Until.parse(until or "change")
    run = await asyncio.to_thread(chosen_run, run_id)
    woke = await wait_for(run, wanted, wait_s) if wait_s else None
    return await asyncio.to_thread(_told, run, woke)


async def _several(run_id: str | None, run_ids: list[str], wait_s: float, until: Until) -> Looked:
    if run_id:
        raise UserError("rl_check_status takes run_id or run_ids.", "", worded("rl_check_status", run_ids=run_ids))
    found = {run.run_id: run for run in await asyncio.to_thread(lambda: [*map(chosen_run, run_ids)])}
    runs = [*found.values()]
    woke = await wait_for_all(runs, until, wait_s) if wait_s else None
    looks = await asyncio.to_thread(lambda: [*map(look_at, runs)])
    rows = await asyncio.to_thread(lambda: [*map(_row, looks)])
    answer: dict[str, Any] = {"runs": rows, **({"woke": woke} if woke else {})}
    return Looked(**answer, next=_next_of_several(looks))


def _row(look: Look) -> dict[str, Any]:
    """One of several runs; where the operator's policy limits looks, what was told last."""
    state, alerts = look.state, [alert.rule for alert in look.alerts]
    row = limited(look) or {
        "run_id": look.run.run_id,
        "name": state.own_name,
        "environment": state.environment,
        "status": state.status,
        "health": None if state.terminal else look.health,
        "step": look.step,
        "total_steps": state.total_steps,
        "eta_minutes": look.eta_minutes,
        "metrics": {name: value for name, value in look.metrics.items() if value is not None and name != "step"},
        "gain": _gain(look) if state.terminal else None,
        "alerts": alerts,
        "error": clipped(state.error, WHY_LENGTH) if state.error else None,
    }
    return {name: value for name, value in row.items() if value not in (None, {}, [])}


def _next_of_several(looks: list[Look]) -> str:
    """What a run that ails, or has failed, asks for; else to wait on; else to compare."""
    if ailing := next((look for look in looks if _ails(look)), None):
        return next_after(ailing)
    ids = [look.run.run_id for look in looks]
    if all(look.state.terminal for look in looks):
        return worded("rl_compare_runs", ids) if len(ids) > 1 else next_after(looks[0])
    return worded("rl_check_status", run_ids=ids, wait_s=int(environ.longest_wait_s()), until="terminal")


def _ails(look: Look) -> bool:
    return look.state.status == "failed" or (look.pressing is not None and not look.state.terminal)


def _eval_failure(look: Look) -> dict[str, Any]:
    """The newest evaluation, where it failed: step, why."""
    failed = look.progress.unevaluated
    return {"step": failed.step, "why": clipped(failed.why, WHY_LENGTH)} if failed else {}


def _told(run: RunDirectory, woke: str | None) -> Looked:
    look = look_at(run)
    following = next_after(look)
    if too_early := limited(look):
        return Looked(**too_early, next=until_it_ends(run.run_id))
    answer: dict[str, Any] = {
        **seed_facts(look),
        "state": look.state_word,
        "step": look.step,
        "total_steps": look.state.total_steps,
        "alerts": told_briefly(look.alerts, look.state),
        "health": look.health,
        "suggested_wait_s": look.suggested_wait_s,
        **({} if look.state.terminal else {"eta_minutes": look.eta_minutes, "trend": look.trend}),
        **{name: value for name, value in _occasional(look, woke).items() if value},
        **failure_facts(look),
        "next": following,
    }
    if look.state.status == "failed":
        answer["log_tail"] = log_tail(look, answer)
    return Looked(**answer)


def _occasional(look: Look, woke: str | None) -> dict[str, Any]:
    """What is told only where there is something to tell."""
    state = look.state
    restarts = read_restarts(look.run.path / "events.jsonl")
    return {
        "name": state.own_name,
        "phase": state.phase,
        "code": state.code,
        "note": state.note,
        "eval_failed": _eval_failure(look),
        "no_evaluation": clipped(look.progress.no_evaluation, WHY_LENGTH),
        "no_batch": why_no_batch(look),
        "restarts": restarts,
        "failed_rollouts": dict(look.progress.failed_rollouts),
        "gain": _gain(look) if state.terminal else {},
        "weights": look.hardly_moved,
        "woke": woke,
    }


def _gain(look: Look) -> dict[str, Any]:
    """What every reader of an ended run asks next: has it learnt?"""
    outcome = outcome_of(look.run, look.state)
    gain = outcome.gains.get(CORRECT)
    if gain is None or outcome.baseline is None:
        return {}
    before, after = (rounded(one.figures[CORRECT]) for one in (outcome.baseline, outcome.evaluations[-1]))
    certain = {name: gain.facts[name] for name in ("ci95", "certain")}
    return {"of": CORRECT, "before": before, "after": after, **certain}
