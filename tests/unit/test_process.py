"""Processes begin and end alike: no torch where none is needed, no orphan when the starter is
gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from halteres.process import CpuShare, peak_memory_bytes, usable_cores

DEADLINE_S = 30


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


ORPHANS = """
import pathlib, subprocess, sys, time
from halteres import process
process.adopt_orphans(reap_s=0.01)
leave = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
def left():
    return [pid for file in pathlib.Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
subprocess.run([sys.executable, "-c", leave, "pass"], check=True)
while left():
    time.sleep(0.01)
subprocess.run([sys.executable, "-c", leave, "import signal; signal.pause()"], check=True)
print(len(left()))
process.end_orphans()
print(len(left()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_what_descendants_leave_behind_is_reaped_and_ended_with_this_process() -> None:
    assert run(ORPHANS).stdout.split() == ["1", "0"]


ENDED_THREAD = """
import pathlib, subprocess, sys
from halteres import process
glob = pathlib.Path.glob
pathlib.Path.glob = lambda self, pattern: [self / "0" / "children", *glob(self, pattern)]
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
process.end_orphans()
print(pathlib.Path(f"/proc/{child.pid}").exists())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists children")
def test_children_are_ended_also_where_a_thread_ends_while_they_are_looked_for() -> None:
    assert run(ENDED_THREAD).stdout == "False\n"


UNENDING = """
import os, subprocess, sys
from halteres import process
with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE):
    asked = []
    os.kill = lambda *signal: asked.append(signal)
    process.end_orphans(within_s=0.2)
    print(len(asked) < 50)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists children")
def test_a_child_that_does_not_end_is_waited_for_no_longer_than_was_said() -> None:
    assert run(UNENDING).stdout == "True\n"


@contextmanager
def child(code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A child with a lifeline, once it has said a line; and the end of the lifeline that keeps it
    alive.
    """
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "HALTERES_LIFELINE_FD": str(reading)},
        pass_fds=(reading,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(reading)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process, writing
        finally:
            process.kill()


WAITS = """
import signal
from halteres.process import begin
begin("test")
print("up", flush=True)
while True:
    signal.pause()
"""


def test_a_process_ends_when_its_starter_is_gone() -> None:
    with child(WAITS) as (process, lifeline):
        os.close(lifeline)
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGTERM
    assert "is gone; ending" in said


def test_a_process_that_ignores_the_request_is_ended_after_the_grace() -> None:
    stubborn = WAITS.replace(
        "import signal", "import signal, halteres.process as p; p.GRACE_S = 0.2", 1
    ).replace("begin(", "signal.signal(signal.SIGTERM, signal.SIG_IGN); begin(")
    with child(stubborn) as (process, lifeline):
        os.close(lifeline)
        assert process.wait(timeout=DEADLINE_S) == 1


def test_a_process_may_end_its_own_way() -> None:
    own = """
import os, threading
from halteres.process import hold_lifeline
ended = threading.Event()
hold_lifeline(ended.set)
print("up", flush=True)
ended.wait()
print("in order", flush=True)
"""
    with child(own) as (process, lifeline):
        os.close(lifeline)
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert said == "in order\n"
    assert process.returncode == 0


def test_a_lifeline_is_not_handed_on_to_grandchildren() -> None:
    code = WAITS.replace(
        'print("up", flush=True)',
        "import os, subprocess, sys\n"
        "from halteres.config import environ\n"
        "fd = environ.lifeline_fd()\n"
        "assert not os.get_inheritable(fd)\n"
        "assert 'HALTERES_LIFELINE_FD' not in environ.for_child()\n"
        'print("up", flush=True)',
    )
    with child(code) as (process, lifeline):
        assert process.poll() is None
        os.close(lifeline)
        process.wait(timeout=DEADLINE_S)


def test_without_a_lifeline_nothing_is_watched() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "HALTERES_LIFELINE_FD"
    }
    code = (
        "import threading; from halteres.process import begin; begin('test'); assert "
        "threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=DEADLINE_S)


def test_torch_cannot_be_imported_where_it_is_not_needed() -> None:
    assert run("from halteres.process import begin; begin('test'); import torch").returncode == 1
    said = run("from halteres.process import begin; begin('test'); import torch").stderr
    assert "ModuleNotFoundError" in said


def test_the_sdk_works_with_torch_blocked() -> None:
    code = (
        "from halteres.process import block_torch; block_torch(); import tinker; "
        "tinker.AdamParams()"
    )
    assert run(code).returncode == 0, run(code).stderr


def test_blocking_torch_after_it_was_loaded_leaves_it_alone() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys; from halteres.process import block_torch; "
        "block_torch()\n"
    )
    assert run(code + "import torch; assert torch is sys").returncode == 0


def test_threads_are_set_before_torch_is_loaded() -> None:
    code = "import os; from halteres.process import begin; begin('engine', torch=True, threads=3)\n"
    assert run(code + "assert os.environ['OMP_NUM_THREADS'] == '3'").returncode == 0


@pytest.mark.parametrize(("level", "said"), [("INFO", True), ("ERROR", False)])
def test_the_log_goes_to_stderr_with_the_role(level: str, said: bool) -> None:
    code = (
        "import logging; from halteres.process import begin; begin('trainer'); "
        "logging.warning('hello')"
    )
    done = run(code, HALTERES_LOG=level)
    assert done.stdout == ""
    assert ("trainer WARNING root: hello" in done.stderr) is said


def test_an_error_that_quotes_what_a_model_wrote_gives_a_terminal_no_commands() -> None:
    code = (
        "import logging; from halteres.process import begin; begin('env')\n"
        "try: raise ValueError('\\x1b[2Jcleared')\n"
        "except ValueError: logging.exception('The first failure:')"
    )
    done = run(code)
    assert "ValueError: cleared" in done.stderr and "\x1b" not in done.stderr


def test_usable_cores_are_at_least_one() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux has it")
def test_the_share_of_the_wanted_time_with_a_core_is_known_from_the_second_look_on() -> None:
    share, pid = CpuShare(), os.getpid()
    assert share.since_last(pid) is None
    assert sum(range(2_000_000)) > 0
    found = share.since_last(pid)
    assert found is not None and 0 < found <= 1
    assert share.since_last(2**22 + 1) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_most_memory_that_a_process_has_held_is_known_while_it_runs() -> None:
    before = peak_memory_bytes(os.getpid())
    held = bytearray(64 << 20)
    after = peak_memory_bytes(os.getpid())
    assert before is not None and after is not None
    assert after >= len(held) and after >= before
    assert peak_memory_bytes(2**22 + 1) is None
