"""rl_list_runs: every run of this home, newest first, in few words."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.dashboard import runs
from halteres.dashboard.runs import list_of_runs
from halteres.runs.directory import RunDirectory, runs_home

from .run_fixtures import RUN, add_alert, change, make_run, replied, supervised, tokens, told

BUDGET = 600
SEED_KEYS = {"run_id", "environment", "status", "wandb_run_name"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))


async def test_without_runs_the_list_is_empty() -> None:
    answer = await told("rl_list_runs")
    assert answer == {"runs": [], "count": 0, "next": "rl_list_environments()"}


async def test_runs_are_told_newest_first_with_what_they_have_come_to() -> None:
    make_run("00000001", steps=50, created_at=1_700_000_000.0, ended_at=1_700_000_720.0)
    make_run(
        "00000002", steps=4, created_at=1_700_000_100.0, ended_at=1_700_000_160.0, status="failed"
    )
    change(
        make_run("00000003", created_at=1_700_000_200.0), name="my sums", resumed_from="00000002"
    )
    answer = await told("rl_list_runs")
    assert [run["run_id"] for run in answer["runs"]] == ["00000003", "00000002", "00000001"]
    assert answer["count"] == 3
    assert answer["runs"][2] == {
        "run_id": "00000001",
        "environment": "gsm8k",
        "status": "completed",
        "wandb_run_name": "gsm8k-00000001",
        "step": 50,
        "total_steps": 50,
        "reward": 0.68,
        "started": "2023-11-14T22:13Z",
        "minutes": 12.0,
    }
    assert datetime.fromisoformat(answer["runs"][2]["started"]).timestamp() == pytest.approx(
        1_700_000_000, abs=60
    )
    assert (answer["runs"][0]["name"], answer["runs"][0]["resumed_from"]) == ("my sums", "00000002")
    assert answer["runs"][0]["reward"] is None
    assert answer["next"] == 'rl_get_results("00000003")'


async def test_page_terminal_comparison_and_status_say_the_same_of_a_run() -> None:
    """Also where the trainer is ahead of run.json, and a supervisor shows no sign of life."""
    for run_id, begun_s in (("00000001", 700), (RUN, 90)):
        make_run(run_id, steps=12, created_at=time.time() - begun_s, ended_at=time.time())
    with supervised(RunDirectory(runs_home() / RUN), ended_at=None) as run:
        change(run, step=10)
        os.utime(run.path / "heartbeat", (0, 0))
        status = await told("rl_check_status", run_id=RUN)
        page = {row["run_id"]: row for row in list_of_runs()["runs"]}
        compared = await told("rl_compare_runs", run_ids=["00000001", RUN], plot=False)
        terminal = CliRunner().invoke(app, ["runs", "list"]).output
        shown = CliRunner().invoke(app, ["runs", "status", RUN]).output
    assert (status["step"], status["health"]) == (12, "failing")
    assert [alert["rule"] for alert in status["alerts"]] == page[RUN]["alerts"] == ["stalled"]
    other = compared["runs"][1]
    assert (other["step"], page[RUN]["step"]) == (12, 12)
    assert other["minutes"] == status["running_time_minutes"] == 1.5
    assert other["status"] == page[RUN]["status"] == status["status"] == "running"
    assert page[RUN]["reward"] == pytest.approx(status["metrics"]["reward_mean"])
    assert f"{RUN}  running" in terminal and " 12/50" in terminal and "step 12 of 50" in shown


def test_the_list_of_an_ended_run_is_read_again_only_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(steps=3)
    assert list_of_runs()["runs"][0]["alerts"] == []
    add_alert(run)
    change(run, name="another")
    (row,) = list_of_runs()["runs"]
    assert (row["alerts"], row["name"]) == (["truncation"], "another")
    monkeypatch.setattr(runs, "report_of", None)
    assert list_of_runs()["runs"] == [row]


async def test_a_runs_own_name_is_shown_wherever_the_run_is() -> None:
    change(make_run(), name="my sums")
    assert (await told("rl_check_status", run_id=RUN))["name"] == "my sums"
    for words in (["list"], ["status", RUN]):
        assert "my sums" in CliRunner().invoke(app, ["runs", *words]).output
    change(make_run("00000002"), name="gsm8k-00000002")
    assert "name" not in await told("rl_check_status", run_id="00000002")


async def test_twenty_runs_stay_within_the_budget_the_active_and_the_newest_told_in_full() -> None:
    for number in range(19):
        make_run(
            f"{number:08x}", steps=2, created_at=1_700_000_000.0 + number, ended_at=1_700_001_000.0
        )
    with supervised(make_run(RUN, steps=2, created_at=1.0)):
        answer = await told("rl_list_runs")
    assert tokens(answer) <= BUDGET
    runs = answer["runs"]
    assert answer["count"] == 20
    assert all(run.keys() >= {*SEED_KEYS, "step", "started"} for run in runs)
    assert [run["run_id"] for run in runs if "minutes" in run][-1] == RUN
    assert runs[0]["run_id"] == "00000012"
    assert len(runs) + answer["left_out"]["runs"] == 20
    assert answer["left_out"]["more"] == "limit=8 tells each in full"
    assert answer["next"] == f'rl_check_status("{RUN}")'


async def test_however_many_are_asked_for_the_answer_stays_short() -> None:
    for number in range(80):
        make_run(
            f"{number:08x}", steps=2, created_at=1_700_000_000.0 + number, ended_at=1_700_001_000.0
        )
    answer = await told("rl_list_runs", limit=200)
    assert len(answer["runs"]) > 40 and tokens(answer) <= 2000 and "shortened" not in answer


async def test_a_short_list_tells_every_run_in_full() -> None:
    for number in range(20):
        make_run(
            f"{number:08x}", steps=2, created_at=1_700_000_000.0 + number, ended_at=1_700_001_000.0
        )
    answer = await told("rl_list_runs", limit=8)
    assert (len(answer["runs"]), answer["count"]) == (8, 20)
    assert all("reward" in run for run in answer["runs"])
    assert tokens(answer) <= BUDGET


async def test_runs_are_listed_by_their_state_and_a_lost_one_is_no_active_one() -> None:
    make_run("00000001", status="completed")
    make_run("00000002", status="failed")
    make_run("00000003", status="running")  # nobody supervises it
    with supervised(make_run(RUN)), supervised(make_run("00000004"), status="starting"):
        found = {
            status: {run["run_id"] for run in (await told("rl_list_runs", status=status))["runs"]}
            for status in ("active", "running", "starting", "completed", "failed", "stopped")
        }
    assert found == {
        "active": {RUN, "00000004"},
        "running": {RUN},
        "starting": {"00000004"},
        "completed": {"00000001"},
        "failed": {"00000002", "00000003"},
        "stopped": set(),
    }


async def test_a_state_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    reply = await replied("rl_list_runs", status="actve")
    assert (reply.body["code"], reply.body["did_you_mean"]) == ("invalid_arguments", "active")
    assert {"active", "running", "completed", "failed", "stopped"} <= set(reply.body["allowed"])


async def test_what_is_no_run_is_passed_over() -> None:
    make_run()
    (runs_home() / "stranger").mkdir()
    (runs_home() / "broken").mkdir()
    (runs_home() / "broken" / "run.json").write_text('{"name": ')
    (runs_home() / "other").mkdir()
    (runs_home() / "other" / "run.json").write_text("[1, 2]")
    (runs_home() / ".new-00000001").mkdir()
    (runs_home() / "a file").write_text("x")
    assert [run["run_id"] for run in (await told("rl_list_runs"))["runs"]] == [RUN]


async def test_a_torn_row_does_not_hide_the_reward_before_it() -> None:
    run = make_run(steps=3)
    with (run.path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 4, "reward/me\xff')
    assert (await told("rl_list_runs"))["runs"][0]["reward"] == 0.21
