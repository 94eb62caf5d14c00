"""The figures of a status: one table, which tools, page and terminal show."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from agent.run_fixtures import RUN, make_run, told
from typer.testing import CliRunner

from halteres.agent.transports.command_line import for_person
from halteres.cli import runs
from halteres.dashboard.runs import view_of
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.report import report_of
from halteres.runs.reading.status_figures import (
    FIGURES,
    FigureKind,
    own_measures,
    time_shares,
    went,
)
from halteres.runs.state import write_state


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return make_run()


@pytest.mark.parametrize("kind", FIGURES, ids=lambda kind: kind.name)
async def test_a_figure_is_seen_by_tools_page_and_terminal(
    run: RunDirectory, kind: FigureKind
) -> None:
    """Of a run of a kind that has it."""
    if kind.only:
        state = msgspec.structs.replace(run.state(), kind=kind.only[0])
        write_state(run.path / "run.json", state)
    append_row(run.path / "metrics.jsonl", {"step": 3, "src": "trainer", kind.metric: 0.5})
    assert (await told("rl_check_status", run_id=RUN))["metrics"][kind.name] == 0.5
    shown = {one["name"]: one for one in view_of(run, for_person)["figures"]}
    assert (shown[kind.name]["label"], shown[kind.name]["value"]) == (kind.label, 0.5)
    (text,) = [one.text for one in report_of(run).figures if one.kind == kind]
    printed = CliRunner().invoke(runs.app, ["status", RUN]).output
    assert f"  {kind.label}: {text} (step 3)" in printed.splitlines()


async def test_a_divergence_of_an_earlier_step_is_not_that_of_now(run: RunDirectory) -> None:
    """At another temperature nothing is compared, and the column is null."""
    for step, kl in ((1, 0.0), (2, None)):
        row = {"step": step, "src": "trainer", "reward/mean": 0.5, "kl_sample_train_v2": kl}
        append_row(run.path / "metrics.jsonl", row)
    assert "kl" not in (await told("rl_check_status", run_id=RUN))["metrics"]
    (text,) = [one.text for one in report_of(run).figures if one.kind.name == "kl"]
    assert text == "–"


def test_the_share_of_success_is_of_all_rollouts_and_only_without_it_of_the_batch(
    run: RunDirectory,
) -> None:
    append_row(run.path / "metrics.jsonl", {"step": 1, "src": "trainer", "reward/success": 0.4766})

    def success() -> float:
        shown = {one["name"]: one["value"] for one in view_of(run, for_person)["figures"]}
        return shown["percent_correct"]

    assert success() == 0.477
    append_row(run.path / "metrics.jsonl", {"step": 1, "src": "env", "train/percent_correct": 0.24})
    assert success() == 0.24


def test_measures_of_the_environments_own_show_how_they_went() -> None:
    first = {"step": 1, "src": "env", "train/outcome/win": 0.1, "groups/sent": 8, "mine": 2}
    last = {"step": 9, "src": "env", "train/outcome/win": 0.7, "groups/sent": 8, "mine": 5}
    assert own_measures([first], [last]) == {"train/outcome/win": "0.1->0.7", "mine": "2->5"}
    assert own_measures([{**first, "src": "trainer"}], [last]) == {}
    counted = [{"step": 1, "src": "env", "tasks/quarantined": 2, "tasks/skipped": 3}]
    assert own_measures(counted, counted) == {}


def test_where_a_steps_time_goes_is_told_in_shares() -> None:
    series = {"time/batch": ((1, 3.0), (2, 3.0)), "time/train": ((1, 1.0),), "time/publish": ()}
    assert time_shares(series) == {"batch": 0.75, "train": 0.25}
    assert time_shares({}) == {}
    assert went([0.5, 0.1]) == "0.5->0.1"
