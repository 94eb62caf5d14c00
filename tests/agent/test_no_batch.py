"""Why a run that stands still has no batch: one sentence of its trajectory server, and never more
trouble than that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halteres.agent.transports.command_line import for_person
from halteres.dashboard.runs import view_of
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.no_batch import ANSWER_WITHIN_S, LENGTH

from .fake_trajectory_server import WHY, TrajectoryServer, quiet_for, trajectory_server
from .run_fixtures import (
    RUN,
    add_alert,
    add_evaluation,
    change,
    make_run,
    short_home,
    supervised,
    tokens,
    told,
)

BUDGET = 350


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = short_home(tmp_path)
    monkeypatch.setenv("HALTERES_HOME", str(home))
    yield home
    home.unlink()


@pytest.fixture
def trajectories() -> Iterator[TrajectoryServer]:
    with trajectory_server() as server:
        yield server


@pytest.fixture
def waiting(trajectories: TrajectoryServer) -> Iterator[RunDirectory]:
    """A run whose last step of 15 s was a minute ago."""
    run = make_run(steps=12)
    add_evaluation(run, 0, 0.3)
    add_evaluation(run, 10, 0.39)
    quiet_for(run, 60)
    with supervised(run, urls={"api": trajectories.url}):
        yield run


async def test_a_run_that_stands_still_says_why_within_the_budget(waiting: RunDirectory) -> None:
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["no_batch"] == WHY
    assert tokens(answer) <= BUDGET
    assert view_of(waiting, for_person)["no_batch"] == WHY


async def test_a_run_whose_groups_all_fail_says_so_with_the_exception(
    waiting: RunDirectory, trajectories: TrajectoryServer
) -> None:
    evidence = "3 groups failed one after another. The last: TypeError: no str. (at sums.py:9)"
    add_alert(
        waiting, "groups_failed", 13, evidence=evidence, remedy=f'rl_get_logs("{RUN}", role="env")'
    )
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["no_batch"], answer["health"]) == (evidence, "alert")
    assert trajectories.asked == 0


async def test_the_servers_own_summary_goes_before_its_first_reason_and_is_clipped(
    waiting: RunDirectory, trajectories: TrajectoryServer
) -> None:
    trajectories.answer |= {"why": "Much is missing. " * 40}
    answer = await told("rl_check_status", run_id=RUN)
    assert (
        answer["no_batch"].startswith("Much is missing. Much") and len(answer["no_batch"]) <= LENGTH
    )
    assert tokens(answer) <= BUDGET


async def test_a_run_between_two_steps_is_not_asked_about(
    waiting: RunDirectory, trajectories: TrajectoryServer
) -> None:
    quiet_for(waiting, 25)
    assert "no_batch" not in await told("rl_check_status", run_id=RUN)
    assert view_of(waiting, for_person)["no_batch"] is None
    assert trajectories.asked == 0


async def test_a_starting_run_whose_environment_is_not_there_says_so(
    trajectories: TrajectoryServer,
) -> None:
    begun = time.time() - 30
    facts = {
        "status": "starting",
        "phase": "environment",
        "started_at": begun,
        "urls": {"api": trajectories.url},
    }
    with supervised(make_run(), **facts):
        assert (await told("rl_check_status", run_id=RUN))["no_batch"] == WHY
    with supervised(make_run("7b1e0c55"), **{**facts, "phase": "api"}):
        assert "no_batch" not in await told("rl_check_status", run_id="7b1e0c55")
    assert trajectories.asked == 1


async def test_a_batch_that_lies_ready_needs_no_sentence(
    waiting: RunDirectory, trajectories: TrajectoryServer
) -> None:
    trajectories.answer |= {"batch_ready": True}
    assert "no_batch" not in await told("rl_check_status", run_id=RUN)


@pytest.mark.parametrize(
    "answer", [[], {}, {"reasons": []}, {"reasons": [3]}, {"why": 3, "reasons": None}]
)
async def test_an_answer_without_a_sentence_leaves_it_out(
    waiting: RunDirectory, trajectories: TrajectoryServer, answer: Any
) -> None:
    trajectories.answer = answer
    assert "no_batch" not in await told("rl_check_status", run_id=RUN)


async def test_a_server_that_refuses_or_is_away_leaves_it_out(
    waiting: RunDirectory, trajectories: TrajectoryServer
) -> None:
    trajectories.status = 503
    assert "no_batch" not in await told("rl_check_status", run_id=RUN)
    change(waiting, urls={"api": "http://127.0.0.1:9"})
    assert "no_batch" not in await told("rl_check_status", run_id=RUN)


async def test_a_server_that_hangs_costs_half_a_second(
    waiting: RunDirectory, trajectories: TrajectoryServer
) -> None:
    trajectories.lets_go.clear()
    begun = time.monotonic()
    assert "no_batch" not in await told("rl_check_status", run_id=RUN)
    assert ANSWER_WITHIN_S <= time.monotonic() - begun < 10 * ANSWER_WITHIN_S


async def test_a_run_that_has_ended_is_not_asked_about(trajectories: TrajectoryServer) -> None:
    run = make_run(steps=3, urls={"api": trajectories.url})
    quiet_for(run, 3600)
    assert "no_batch" not in await told("rl_check_status", run_id=RUN)
    assert trajectories.asked == 0
