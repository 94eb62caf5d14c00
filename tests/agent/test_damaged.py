"""The tools on a run whose run.json was damaged: it is told as unreadable, and no other run is
offered for it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.dashboard.runs import list_of_runs
from halteres.runs.directory import RunDirectory, active_runs, known_runs

from .run_fixtures import RUN, make_run, replied, told

OTHER = "3fa0aaaa"


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    make_run(OTHER, created_at=1.0, ended_at=2.0)
    run = make_run(RUN, created_at=3.0, ended_at=4.0)
    (run.path / "run.json").write_text("{")
    return run


async def test_the_list_tells_it_as_unreadable(damaged: RunDirectory) -> None:
    answer = await told("rl_list_runs")
    assert {row["run_id"]: row["status"] for row in answer["runs"]} == {
        RUN: "unreadable",
        OTHER: "completed",
    }
    assert [row["run_id"] for row in (await told("rl_list_runs", status="unreadable"))["runs"]] == [
        RUN
    ]


@pytest.mark.parametrize(
    "tool", ["rl_check_status", "rl_get_results", "rl_stop_training", "rl_get_logs"]
)
async def test_a_tool_names_the_file_and_no_other_run(damaged: RunDirectory, tool: str) -> None:
    reply = await replied(tool, run_id=RUN)
    assert reply.failed
    assert reply.body["code"] == "run_unreadable"
    assert str(damaged.path / "run.json") in reply.body["error"]
    assert str(damaged.path / "run.json") in reply.body["next"]
    assert OTHER not in str(reply.body)


async def test_going_on_from_a_run_with_damaged_settings_names_the_file(
    damaged: RunDirectory,
) -> None:
    (damaged.path.parent / OTHER / "settings.json").write_text("{")
    body = (await replied("rl_start_training", resume_from=OTHER)).body
    assert body["code"] == "run_unreadable"
    assert "settings.json" in body["error"]


def test_a_run_that_seems_active_but_for_one_field_is_unreadable_too(damaged: RunDirectory) -> None:
    file = damaged.path.parent / OTHER / "run.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "status": "running", "processes": []})
    )
    assert {entry.run_id: entry.facts.status for entry in known_runs()}[OTHER] == "unreadable"
    assert active_runs() == []


def test_the_command_and_the_page_tell_it_too(damaged: RunDirectory) -> None:
    shown = CliRunner().invoke(app, ["runs", "list"])
    assert shown.exit_code == 0, shown.output
    assert f"{RUN}  unreadable" in shown.output
    rows = {row["run_id"]: row for row in list_of_runs()["runs"]}
    assert (rows[RUN]["status"], rows[OTHER]["status"]) == ("unreadable", "completed")
    assert rows[RUN].keys() == rows[OTHER].keys()
