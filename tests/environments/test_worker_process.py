"""A child that is asked one thing at a time: what it leaves behind holds nobody up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from deadlines import until

from halteres.environments.worker_process import WorkerProcess, WorkerTimedOut

LEAVES_A_SESSION = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
open(sys.argv[1], "w").write(str(left.pid))
print("{}", flush=True)
sys.stdin.read()
"""


async def test_a_grandchild_that_holds_the_output_open_keeps_nobody_waiting(tmp_path: Path) -> None:
    threads = threading.active_count()
    worker = WorkerProcess(
        [sys.executable, "-c", LEAVES_A_SESSION, str(tmp_path / "left")], start_within_s=20
    )
    try:
        with pytest.raises(WorkerTimedOut):
            await worker.ask({}, within_s=0.5)
        await until(lambda: threading.active_count() <= threads, within_s=10)
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
