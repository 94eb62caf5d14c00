"""Which folders of workers are removed: those whose process is gone, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from halteres.environments import scratch_folders
from halteres.environments.cage import WorkerLimits, WorkerPool

HOLDS_WORKER = """
import asyncio, sys
from halteres.environments.worker_process import WorkerProcess
async def main():
    worker = WorkerProcess([sys.executable, "-c", "print('{}', flush=True); input()"], start_within_s=60)
    await worker.start()
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_what_a_killed_process_left_is_removed_by_the_next_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    ours, foreign = Path(scratch_folders.make_folder()), tmp_path / "halteres-worker-other-1-2-x"
    foreign.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDS_WORKER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"started\n"
        (left,) = set(tmp_path.glob("halteres-worker-*")) - {ours, foreign}
        (left / "answer").write_text("of a model")
        make_pool()
        assert left.exists(), "its process runs"
        owner.send_signal(signal.SIGKILL)
        owner.wait(60)
    assert left.exists()
    make_pool()
    assert set(tmp_path.iterdir()) == {ours, foreign}


def test_folders_that_lie_deep_in_each_other_hold_up_no_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a model's program left without a cage, and this Python cannot remove."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    own = Path(scratch_folders.make_folder())
    left = own.with_name(own.name.replace(f"-{os.getpid()}-", "-999999999-"))
    inner = str(left)
    for _ in range(1200):
        inner = f"{inner}/d"
    subprocess.run(["mkdir", "-p", inner], check=True)
    try:
        make_pool()
    finally:
        subprocess.run(["rm", "-rf", left], check=True)


def make_pool() -> None:
    WorkerPool(
        (sys.executable,), size=1, limits=WorkerLimits(), caged=False, start_within_s=1
    ).close()
