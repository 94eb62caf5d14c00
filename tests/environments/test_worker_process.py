"""A child that is asked one thing at a time: what it leaves behind holds nobody up."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from deadlines import until

from halteres.environments import worker_process
from halteres.environments.worker_process import WorkerProcess, WorkerTimedOut

LEAVES_A_SESSION = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
open(sys.argv[1], "w").write(str(left.pid))
print("{}", flush=True)
sys.stdin.read()
"""


async def test_a_grandchild_that_holds_the_output_open_keeps_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, reading = worker_process._exchange, list[object]()

    def watched(*asked: object) -> bytes:
        reading.append(asked)
        try:
            return exchange(*asked)  # type: ignore[arg-type]
        finally:
            reading.remove(asked)

    monkeypatch.setattr(worker_process, "_exchange", watched)
    worker = WorkerProcess([sys.executable, "-c", LEAVES_A_SESSION, str(tmp_path / "left")], start_within_s=20)
    try:
        with pytest.raises(WorkerTimedOut):
            await worker.ask({}, within_s=0.5)
        await until(lambda: not reading, within_s=10)
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
