"""Runs that are started with the tools, under real supervisors whose roles are stand-ins."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs.run_fixtures import ENVIRONMENT, STANDIN_SUPERVISOR, end

from halteres.agent import start_training as starting
from halteres.agent.call import call
from halteres.agent.tool import Caller
from halteres.runs.directory import list_runs
from halteres.runs.planning import resources
from halteres.runs.start import start_run

CHANGES = {"trainer.total_steps": 4, "trainer.checkpoint_every": 2}


def begun_by_standins(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """HALTERES_HOME in which rl_start_training starts stand-ins; whatever a failing test leaves
    running is ended.
    """
    monkeypatch.setenv("HALTERES_HOME", str(home))
    for name in (
        "TINKER_API_KEY",
        "TINKER_BASE_URL",
        "OPENROUTER_API_KEY",
        "HERMES_HOME",
        "WANDB_PROJECT",
    ):
        monkeypatch.delenv(name, raising=False)
    # what else this machine does is in no answer
    monkeypatch.setattr(resources, "load_average", lambda: 0.0)
    monkeypatch.setattr(
        starting, "start_run", functools.partial(start_run, supervisor=STANDIN_SUPERVISOR)
    )
    yield home
    for run in list_runs():
        end(run)


async def told(name: str, /, **arguments: Any) -> dict[str, Any]:
    """A tool's answer."""
    body = (await call(name, arguments, Caller())).body
    assert body["next"] and "\n" not in body["next"]
    return body


async def select(**changes: Any) -> None:
    """Select the stand-in environment."""
    answer = await told("rl_select_environment", name=ENVIRONMENT, changes={**CHANGES, **changes})
    assert "error" not in answer, answer


def runs() -> list[str]:
    """Ids of all runs."""
    return [run.run_id for run in list_runs()]


def tokens(answer: dict[str, Any]) -> float:
    """By the measure of the budgets."""
    return len(json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False)) / 4


def check_of(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """One of the checks of an answer."""
    return next(check for check in answer["checks"] if check["check"] == name)
