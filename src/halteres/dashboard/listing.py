"""The list of runs as the page shows it.

Owns: what is told of each run.
Never: judges a run (`runs.directory`).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from halteres.dashboard.sparks import spark_of
from halteres.errors import NotFound, boundary
from halteres.runs.directory import known_runs
from halteres.runs.reading.alerts import read_alerts
from halteres.runs.roster import UNREADABLE, Entry
from halteres.runs.state import RunState, RunUnreadable, read_state

ERROR_LENGTH = 200
"""Characters; the run's own page has the whole sentence."""


def listed(only: Collection[str] | None = None) -> dict[str, Any]:
    """Every run, newest first, or those among these ids that there are; `now` is the clock that their times are of."""
    return {
        "runs": [row for run in known_runs() if only is None or run.run_id in only if (row := _row(run)) is not None],
        "now": time.time(),
    }


def _row(run: Entry) -> dict[str, Any] | None:
    """One row, also of a run that cannot be read; None of one that was removed while we looked."""
    if run.unreadable:
        return _damaged(run, run.error)
    try:
        with boundary(RunUnreadable, f"Reading run {run.run_id}"):  # whatever is wrong with one run, the others stay
            return _read(run)
    except RunUnreadable as error:
        return _damaged(run, error.what)
    except NotFound:
        return None


def _read(run: Entry) -> dict[str, Any]:
    state = read_state(run.path / "run.json")
    spark = spark_of(run.path / "metrics.jsonl", state.kind)
    return {
        "run_id": run.run_id,
        "name": state.name,
        "environment": state.environment,
        "kind": state.kind,
        "model": state.base_model,
        "status": run.facts.status,
        "phase": state.phase,
        "step": state.step,
        "total_steps": state.total_steps,
        "created_at": state.created_at,
        "ended_at": run.facts.ended_at,
        "reward": spark.reward,
        "evaluation": spark.evaluation,
        "curve": [float(f"{value:.4g}") for value in spark.rewards],
        "alerts": [alert.rule for alert in read_alerts(run.path / "events.jsonl")],
        "error": _error(state),
    }


def _damaged(run: Entry, error: str) -> dict[str, Any]:
    """The row of a run that cannot be read."""
    return {
        "run_id": run.run_id,
        "name": run.facts.name,
        "environment": run.facts.environment,
        "kind": "rl",
        "model": "",
        "status": UNREADABLE,
        "phase": None,
        "step": 0,
        "total_steps": 0,
        "created_at": run.facts.created_at,
        "ended_at": run.facts.created_at,
        "reward": None,
        "evaluation": None,
        "curve": [],
        "alerts": [],
        "error": error,
    }


def _error(state: RunState) -> str | None:
    error = state.error
    return error if error is None or len(error) <= ERROR_LENGTH else f"{error[: ERROR_LENGTH - 3]}..."
