"""The tool that lists runs: rl_list_runs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, get_args

from pydantic import Field

from halteres.agent.caller import Caller
from halteres.agent.tool import READS, Result, tool
from halteres.agent.wording import significant, worded
from halteres.errors import UserError, unknown
from halteres.runs.directory import RunDirectory, known_runs
from halteres.runs.reading.progress import last_reward
from halteres.runs.reading.roster import Entry
from halteres.runs.state import Status

ACTIVE = "active"
STATUSES: tuple[str, ...] = (ACTIVE, *get_args(Status))

LENGTH = 2320
"""Characters of the list up to which runs are told in full; beyond it, older ones have the seeds' four keys alone."""


class Runs(Result):
    """Runs, newest first. One is {run_id, environment, status, wandb_run_name} (seed keys) and {name, step,
    total_steps, reward, started, minutes, resumed_from}: name and resumed_from where they say something new, the
    others as far as the answer stays short (active and newest runs first; a smaller `limit` tells all)."""

    runs: list[dict[str, Any]]
    count: int  # of all that fit, also where fewer are listed


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
    return Runs(runs=_rows(listed), count=len(fitting), next=_next(listed))


def _fits(run: Entry, status: str | None) -> bool:
    return status is None or run.facts.status == status or (status == ACTIVE and not run.ended)


def _rows(runs: Sequence[Entry]) -> list[dict[str, Any]]:
    """Active runs and then the newest are told in full while the answer stays short; the order is that of `runs`."""
    rows = {run.run_id: _seed_row(run) for run in runs}
    length = sum(map(_length, rows.values()))
    now = time.time()
    for run in sorted(runs, key=lambda run: run.ended):  # stable: within each kind, newest first
        row = {**rows[run.run_id], **_more(run, now)}
        length += _length(row) - _length(rows[run.run_id])
        if length > LENGTH:
            break
        rows[run.run_id] = row
    return list(rows.values())


def _seed_row(run: Entry) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "environment": run.facts.environment,
        "status": run.facts.status,
        "wandb_run_name": f"{run.facts.environment}-{run.run_id}",
    }


def _more(run: Entry, now: float) -> dict[str, Any]:
    facts, reward = run.facts, last_reward(RunDirectory(run.path))
    own_name = facts.name != f"{facts.environment}-{run.run_id}"
    return {
        **({"name": facts.name} if own_name else {}),
        "step": facts.step,
        "total_steps": facts.total_steps,
        "reward": None if reward is None else significant(reward),
        "started": datetime.fromtimestamp(facts.created_at, UTC).strftime("%Y-%m-%dT%H:%MZ"),
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
