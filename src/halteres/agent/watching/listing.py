"""The tool that lists runs: rl_list_runs."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Annotated, Any, get_args

from pydantic import Field

from halteres.agent.caller import Caller
from halteres.agent.fitting import clipped, significant
from halteres.agent.tool import READS, Result, tool
from halteres.errors import UserError, boundary, unknown
from halteres.next_step import worded
from halteres.runs.directory import UNREADABLE, Entry, RunDirectory, known_runs
from halteres.runs.reading.progress import last_reward
from halteres.runs.state import RunUnreadable, Status

ACTIVE = "active"
STATUSES: tuple[str, ...] = (ACTIVE, *get_args(Status), UNREADABLE)

LENGTH, LONGEST, USUAL = 2200, 7000, 20
"""Characters of the list: for the usual number of runs, and at most. Runs are told in full as long as there is room;
older ones in brief, and the oldest are left out."""


ERROR_LENGTH = 200


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
    fitting = [run for run in known_runs() if _fits(run, status)]
    listed = fitting[:limit]
    rows = _rows(listed, min(LONGEST, LENGTH * max(1, limit // USUAL)))
    told = Runs(runs=rows, count=len(fitting), next=_next(listed))
    brief = sum("step" in row and "minutes" not in row for row in rows)
    if brief or len(rows) < len(listed):
        told.left_out = {"runs": len(listed) - len(rows), "details_of": brief, "more": "limit=8 tells each in full"}
    return told


def _fits(run: Entry, status: str | None) -> bool:
    return status is None or run.facts.status == status or (status == ACTIVE and not run.ended)


def _rows(runs: Sequence[Entry], room: int) -> list[dict[str, Any]]:
    """While there is room, active runs and then the newest are told, and then told in full; in the order of `runs`."""
    first = sorted(runs, key=lambda run: run.ended)  # stable: within each kind, newest first
    rows = {run.run_id: _brief(run) for run in first}
    ends = list(accumulate(map(_length, rows.values())))
    kept = first[: max(1, bisect_right(ends, room))]
    length, now = ends[len(kept) - 1] if kept else 0, time.time()
    for run in (run for run in kept if not run.unreadable):
        row = _full(rows[run.run_id], run, now)
        length += _length(row) - _length(rows[run.run_id])
        if length > room:
            break
        rows[run.run_id] = row
    told = {run.run_id for run in kept}
    return [rows[run.run_id] for run in runs if run.run_id in told]


def _brief(run: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run_id": run.run_id,
        "environment": run.facts.environment,
        "status": run.facts.status,
        "wandb_run_name": run.default_name,
    }
    if run.unreadable:
        return {**row, "error": clipped(run.error, ERROR_LENGTH)}
    started = datetime.fromtimestamp(run.facts.created_at, UTC).strftime("%Y-%m-%dT%H:%MZ")
    return {**row, "step": run.facts.step, "started": started}


def _full(brief: dict[str, Any], run: Entry, now: float) -> dict[str, Any]:
    """Whatever is wrong with one run's files, it is told in its row, and the other runs are listed."""
    try:
        with boundary(RunUnreadable, f"Reading run {run.run_id}"):
            return {**brief, **_more(run, now)}
    except RunUnreadable as error:
        return {**brief, "error": clipped(error.what, ERROR_LENGTH)}


def _more(run: Entry, now: float) -> dict[str, Any]:
    facts, reward = run.facts, last_reward(RunDirectory(run.path))
    return {
        **({"name": run.own_name} if run.own_name else {}),
        "total_steps": facts.total_steps,
        "reward": None if reward is None else significant(reward),
        "minutes": round(max(0.0, (facts.ended_at or now) - facts.created_at) / 60, 1),
        **({"resumed_from": facts.resumed_from} if facts.resumed_from else {}),
    }


def _next(runs: Sequence[Entry]) -> str:
    active = [run for run in runs if not run.ended]
    if active:
        return worded("rl_check_status", active[0].run_id)
    if not runs:
        return "rl_list_environments()"
    looked_at = "rl_get_results" if runs[0].facts.status == "completed" else "rl_check_status"
    return worded(looked_at, runs[0].run_id)


def _length(row: dict[str, Any]) -> int:
    return len(json.dumps(row, ensure_ascii=False, separators=(",", ":"))) + 1
