"""A home for runs, and runs whose roles are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halteres.runs.directory import RunDirectory, list_runs

from .run_fixtures import StartRun, end, settings, start_standins


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """HALTERES_HOME; whatever a failing test leaves running is ended."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    yield tmp_path
    for run in list_runs():
        end(run)


@pytest.fixture
def start(home: Path) -> StartRun:
    """Start a run of stand-ins."""

    def start(*edits: str, **options: Any) -> RunDirectory:
        return start_standins(settings(*edits), **options)

    return start
