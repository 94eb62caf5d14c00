"""A home for runs, and runs whose roles are stand-ins."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halteres.runs import identity
from halteres.runs.directory import RunDirectory, list_runs
from halteres.runs.starting.start import start_run

from .scenes import STANDIN_SUPERVISOR, StartRun, settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """HALTERES_HOME; whatever a failing test leaves running is ended."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    yield tmp_path
    for run in list_runs():
        ends = time.monotonic() + 10
        while not (state := run.state()).terminal and not state.supervisor and time.monotonic() < ends:
            time.sleep(0.02)  # it has just been started: nobody can be told to end yet
        for who in (state.supervisor, *state.processes.values()):
            if who and identity.alive(who):
                os.kill(who["pid"], signal.SIGKILL)


@pytest.fixture
def start(home: Path) -> StartRun:
    """Start a run of stand-ins."""

    def start(*edits: str, **options: Any) -> RunDirectory:
        return start_run(settings(*edits), supervisor=STANDIN_SUPERVISOR, **options)

    return start
