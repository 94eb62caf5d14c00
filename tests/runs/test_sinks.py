"""Metrics forwarded elsewhere never decide how a run goes: it takes its steps, and ends as it would
without them.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from halteres.observe.metrics import merge_by_step
from halteres.observe.sinks import SinkReport, read_reports
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState

from .run_fixtures import StartRun, wait_for_end

pytestmark = pytest.mark.runs

WANDB = "run.sinks=[wandb]"
KEY = "a1b2c3d4" * 5


def assert_unharmed(run: RunDirectory, state: RunState) -> SinkReport:
    """It is complete, and so are its metrics; how its W&B sink is."""
    assert (state.status, state.step, state.error, state.note) == ("completed", 4, None, None)
    assert [row["step"] for row in merge_by_step(run.metrics()) if "reward/mean" in row] == [
        1,
        2,
        3,
        4,
    ]
    return read_reports(run.path)["wandb"]


@contextmanager
def dead_server(how: str) -> Iterator[str]:
    """The address of a server that refuses, or takes connections and never answers."""
    if how == "refuses":
        yield "http://127.0.0.1:9"
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("dead", ["refuses", "never answers"])
def test_a_dead_wandb_server_costs_a_run_nothing(
    start: StartRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dead: str
) -> None:
    with dead_server(dead) as url:
        for name, value in {
            "WANDB_API_KEY": KEY,
            "WANDB_BASE_URL": url,
            "HOME": str(tmp_path),
        }.items():
            monkeypatch.setenv(name, value)
        run = start(WANDB)
        report = assert_unharmed(run, wait_for_end(run, within_s=90))
    assert report.state == "offline" and report.url is None, report
    assert report.note is not None and "wandb sync" in report.note
    assert (
        json.loads((run.path / "results.json").read_text())["sinks"]["wandb"]["state"] == "offline"
    )
    assert [event["state"] for event in run.events() if event["type"] == "sink"] == ["offline"]


def test_a_forwarding_process_that_dies_is_told_with_its_log(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_SINKS", "dies")
    run = start(WANDB)
    report = assert_unharmed(run, wait_for_end(run))
    log = run.log("sinks")
    assert report.state == "failed"
    assert report.note == f"The process that forwards metrics exited with code 7. Its log is {log}."
    assert ("wandb", report.note) in {
        (it.get("sink"), it.get("note")) for it in run.events() if it["type"] == "sink"
    }


def test_a_forwarding_process_that_does_not_end_is_killed(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_SINKS", "hangs")
    run = start(WANDB)
    report = assert_unharmed(run, wait_for_end(run))
    assert (report.state, report.note) == (
        "failed",
        f"The process that forwards metrics was ended by signal 9. Its log is {run.log('sinks')}.",
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int((run.path / "sinks.pid").read_text()), 0)


def test_wandbs_key_reaches_the_forwarding_process_and_no_other_secret_does(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_SINKS", "variables")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-not-for-it")
    run = start(WANDB)
    assert_unharmed(run, wait_for_end(run))
    variables = json.loads((run.path / "variables.json").read_text())
    assert (variables["WANDB_API_KEY"], "OPENROUTER_API_KEY" in variables) == (KEY, False)
    assert variables["WANDB_ERROR_REPORTING"] == "false"


def test_a_run_without_sinks_starts_no_such_process(start: StartRun) -> None:
    run = start()
    assert wait_for_end(run).status == "completed"
    assert not run.log("sinks").exists() and read_reports(run.path) == {}
