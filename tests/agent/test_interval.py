"""The limit on looks, for callers at the same time. What one caller is told: test_status."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halteres.agent import status
from halteres.agent.run_snapshot import snapshot_of

from .run_scenes import make_run, short_home, supervised


def test_of_looks_at_the_same_time_one_is_told_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked before either look was remembered."""
    monkeypatch.setenv("HALTERES_HOME", str(home := short_home(tmp_path)))
    (home / "policy.yaml").write_text("hermes-compat\n")
    together, read = threading.Barrier(2), status.read_regular

    def read_together(file: Path) -> object:
        found = read(file)
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.5)  # both are inside only where nothing keeps them apart
        return found

    monkeypatch.setattr(status, "read_regular", read_together)
    with supervised(make_run()) as run, ThreadPoolExecutor(2) as threads:
        looks = [snapshot_of(run), snapshot_of(run)]
        answers = list(threads.map(status.rate_limited_answer, reversed(looks)))
    assert sorted(answer is None for answer in answers) == [False, True]
