"""Ending early: who may ask, what is understood, which mode wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from halteres.training.stopping import Stopping, StopRequest


def written(folder: Path, text: str) -> Path:
    (folder / "stop.json").write_text(text)
    return folder / "stop.json"


def test_without_a_request_training_goes_on(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path / "stop.json")
    assert stopping.request() is None
    assert not stopping.at_once


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ('{"mode": "after_step", "t": 1.0}', "after_step"),
        ('{"mode": "now", "t": 1.0}', "now"),
        ("{}", "now"),
        ("", "now"),
        ('{"mode": "aft', "now"),
        ("[]", "now"),
    ],
)
def test_the_stop_file_is_understood_and_half_a_request_is_still_one(
    tmp_path: Path, text: str, mode: str
) -> None:
    request = Stopping(written(tmp_path, text)).request()
    assert request == StopRequest(mode, "a stop was requested")  # type: ignore[arg-type]


def test_now_overrules_after_step_and_is_never_softened(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path / "stop.json")
    stopping.ask(StopRequest("after_step", "first"))
    assert not stopping.at_once
    stopping.ask(StopRequest("now", "second"))
    stopping.ask(StopRequest("after_step", "third"))
    assert stopping.request() == StopRequest("now", "second")


def test_a_stop_file_that_changes_to_now_is_seen(tmp_path: Path) -> None:
    stopping = Stopping(written(tmp_path, '{"mode": "after_step"}'))
    assert not stopping.at_once
    written(tmp_path, '{"mode": "now"}')
    assert stopping.at_once


def test_the_time_limit_counts_from_the_start_of_training(tmp_path: Path) -> None:
    now = 100.0
    stopping = Stopping(tmp_path / "stop.json", max_minutes=1.0, clock=lambda: now)
    now = 1000.0
    assert stopping.request() is None
    stopping.start_clock()
    now = 1059.9
    assert stopping.request() is None
    now = 1060.0
    assert stopping.request() == StopRequest(
        "now", "the limit of 1 minutes is reached", "time_limit"
    )
