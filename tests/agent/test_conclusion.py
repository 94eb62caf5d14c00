"""What a run leaves at its end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halteres.observe import plots
from halteres.runs.directory import RunDirectory
from halteres.runs.supervision.supervisor import conclude

from .run_fixtures import add_alert, change
from .run_results import trained

Drawn = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))


@pytest.fixture
def run() -> RunDirectory:
    return trained()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """What was asked to be drawn; the picture itself is not made."""
    asked: Drawn = []

    def plot_run(rows: list[Any], file: Path, title: str, alerts: list[Any]) -> None:
        file.touch()
        asked.append({"title": title, "alerts": alerts})

    monkeypatch.setattr(plots, "plot_run", plot_run)
    return asked


def test_the_gain_is_told_with_its_interval(run: RunDirectory, drawn: Drawn) -> None:
    assert conclude(run, run.state()) == []
    results = run.results() or {}
    gain = results["improvement"]["eval/percent_correct"]
    assert gain["ci95"][0] < gain["delta"] < gain["ci95"][1]
    assert (gain["num_tasks"], gain["certain"], gain["method"]) == (64, True, "paired")
    difference = (
        results["final_metrics"]["eval/percent_correct"]
        - results["baseline"]["eval/percent_correct"]
    )
    assert gain["delta"] == pytest.approx(difference, abs=1e-4)
    assert results["weights"]["step"] == 50
    summary = (run.path / "STATUS.md").read_text()
    assert re.search(
        r"percent_correct \| 0\.\d+ \| 0\.\d+ \| \+0\.\d{3} \(\+0\.\d{3} to \+0\.\d{3}\) \|",
        summary,
    )
    assert "eval/num_tasks" not in summary


def test_a_run_that_never_trained_is_concluded_too(drawn: Drawn) -> None:
    run = trained(steps=20)
    for name in ("metrics.jsonl", "checkpoints.jsonl"):
        (run.path / name).unlink()
    assert conclude(run, run.state()) == []
    results = run.results() or {}
    assert (results["improvement"], results["baseline"], results["plot"]) == ({}, {}, None)
    assert results["weights"]["sampler"] is None
    assert drawn == []


def test_alerts_are_on_the_picture(run: RunDirectory, drawn: Drawn) -> None:
    add_alert(run, "truncation", 7)
    add_alert(run, "truncation", 9)
    conclude(run, run.state())
    assert drawn[0]["alerts"] == [("truncation", 7), ("truncation", 9)]


def test_a_secret_in_a_runs_name_is_not_on_the_picture(
    run: RunDirectory, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", "sk-planted-000")
    change(run, name="try sk-planted-000")
    conclude(run, run.state())
    assert drawn[0]["title"] == "try ***: completed at step 50 of 50"


def test_a_run_is_not_failed_by_its_picture(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., None]
) -> None:
    monkeypatch.setattr(plots, "plot_run", refuse)
    assert conclude(run, run.state()) == ["Plotting raised RuntimeError: no font."]
    assert run.results()


@pytest.fixture
def refuse() -> Callable[..., None]:
    def plot(*_: object) -> None:
        raise RuntimeError("no font")

    return plot
