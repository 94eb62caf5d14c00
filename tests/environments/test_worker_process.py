"""A child that is asked one thing at a time: how it ends has a name, what it leaves behind holds
nobody up, and it is replaced in time; and pools of such children.

The children here are in no cage; what one may do in a cage is `test_cage`'s.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from deadlines import until

from halteres.environments import worker_process
from halteres.environments.cage import WorkerLimits, WorkerPool
from halteres.environments.worker_process import (
    NO_LIMITS,
    WorkerExited,
    WorkerLost,
    WorkerOutOfMemory,
    WorkerProcess,
    WorkerRefused,
    WorkerSaidTooMuch,
    WorkerTimedOut,
)
from halteres.errors import EnvironmentFailed

from . import question_worker

WITHIN_S = 20.0

PID = "import os\nvalue = os.getpid()"

LEAVES_A_SESSION = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
open(sys.argv[1], "w").write(str(left.pid))
print("{}", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "worker.py"
    file.write_text(question_worker.TEXT)
    return file


@pytest_asyncio.fixture
async def pools(script: Path) -> AsyncIterator[Any]:
    """Pools outside a cage, closed in the end."""
    made = list[WorkerPool]()

    def pool(size: int = 1, limits: WorkerLimits = NO_LIMITS, **more: Any) -> WorkerPool:
        command = (sys.executable, str(script))
        made.append(
            WorkerPool(
                command, size=size, limits=limits, caged=False, start_within_s=WITHIN_S, **more
            )
        )
        return made[-1]

    yield pool
    for workers in made:
        workers.close()


async def value_of(workers: WorkerPool, code: str, within_s: float = WITHIN_S) -> Any:
    return (await workers.ask({"code": code}, within_s))["value"]


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


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/no/such/python",), "No such file"),
        ((sys.executable, "-c", "raise RuntimeError('no data')"), "RuntimeError: no data"),
        ((sys.executable, "-c", "print('hello')"), "hello"),
        ((sys.executable, "-c", "import os; os._exit(3)"), "exit code is 3"),
    ],
)
async def test_a_worker_that_cannot_be_started_is_lost_and_says_why(
    command: tuple[str, ...], why: str
) -> None:
    """No code of a scorer has run yet."""
    with pytest.raises(WorkerLost, match=why):
        await WorkerProcess(command, start_within_s=WITHIN_S).ask({}, WITHIN_S)


async def test_a_machine_without_room_for_a_worker_has_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk of temporary files is full: no task is at fault."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(WorkerLost, match=r"could not be started.*No such file"):
        await WorkerProcess([sys.executable], start_within_s=WITHIN_S).ask({}, WITHIN_S)


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import os; os._exit(0)", WorkerExited),
        ("raise SystemExit", WorkerExited),
        (
            "import os; os.close(4); os.close(1); os.close(0); __import__('time').sleep(60)",
            WorkerTimedOut,
        ),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28,) * 2); bytes(1 << 29)",
            WorkerOutOfMemory,
        ),
        ("import os\nos.write(4, b'x' * 100)\nos._exit(0)", WorkerExited),
        ("import os\nos.write(4, b'[' * 100_000 + b'\\n')", WorkerSaidTooMuch),
        ("raise KeyboardInterrupt", WorkerRefused),
        (
            "class Wrong(Exception):\n    def __str__(self): return 1 / 0\nraise Wrong",
            WorkerRefused,
        ),
    ],
)
async def test_how_a_question_ended_has_a_name_and_the_next_one_a_new_worker(
    pools: Any, code: str, failure: type[EnvironmentFailed]
) -> None:
    workers = pools()
    before = await value_of(workers, PID)
    limit_s = 1.0 if failure is WorkerTimedOut else WITHIN_S
    with pytest.raises(failure):
        await value_of(workers, code, limit_s)
    assert await value_of(workers, PID) != before


async def test_a_worker_that_is_not_ready_in_time_is_lost() -> None:
    """The machine is slow: nothing has been asked yet that could be at fault."""
    waits = (sys.executable, "-c", "import sys; sys.stdin.read()")
    with pytest.raises(WorkerLost, match=r"not ready in time. The limit is 0.3 s"):
        await WorkerProcess(waits, start_within_s=0.3).ask({}, WITHIN_S)


async def test_a_worker_that_the_kernel_killed_for_memory_is_lost(
    pools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever used the machine's memory up: its limit is its own, the machine's is not."""
    counts = tmp_path / "vmstat"
    counts.write_text("oom_kill 1\n")
    monkeypatch.setattr(worker_process, "VMSTAT", counts)
    workers = pools()
    assert await value_of(workers, "value = 1") == 1
    killed = f"import os\nopen({str(counts)!r}, 'w').write('oom_kill 2')\nos.kill(os.getpid(), 9)"
    with pytest.raises(WorkerLost, match="no memory left"):
        await value_of(workers, killed)


def test_each_end_has_a_code_of_its_own() -> None:
    kinds = (WorkerTimedOut, WorkerOutOfMemory, WorkerExited, WorkerSaidTooMuch, WorkerRefused)
    codes = [kind.code for kind in (*kinds, WorkerLost)]
    assert codes == [
        "scorer_timeout",
        "scorer_memory",
        "scorer_exited",
        "scorer_output",
        "scorer_error",
        "worker_lost",
    ]


async def test_a_worker_that_died_between_two_questions_costs_none(pools: Any) -> None:
    workers = pools()
    pid = await value_of(workers, PID)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: workers.num_running == 0)
    assert await value_of(workers, PID) != pid


async def test_a_worker_is_replaced_after_so_many_answers_and_started_ahead(pools: Any) -> None:
    workers = pools(limits=WorkerLimits(memory_bytes=None, calls=2))
    pids = [await value_of(workers, PID) for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    await until(lambda: workers.num_running == 1)


async def test_as_many_questions_as_workers_are_under_way_at_once_and_others_wait_in_order(
    pools: Any, tmp_path: Path
) -> None:
    meets = (
        "import os, time\n"
        "open({mine!r}, 'w').close()\n"
        "while not os.path.exists({other!r}): time.sleep(0.01)\n"
        "value = {mine!r}"
    )
    left, right = str(tmp_path / "left"), str(tmp_path / "right")
    workers = pools(size=2)
    answered = list[str]()

    async def ask(code: str) -> None:
        answered.append(await value_of(workers, code))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(meets.format(mine=left, other=right)))
        tasks.create_task(ask(meets.format(mine=right, other=left)))
    assert set(answered) == {left, right}
    alone = pools(size=1)
    answered.clear()
    workers = alone
    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            tasks.create_task(ask(f"value = {str(number)!r}"))
    assert answered == ["0", "1", "2", "3", "4"]


async def test_a_worker_without_a_cage_has_limits_a_folder_and_few_variables(
    pools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_TRAJECTORY_TOKEN", "secret")
    monkeypatch.setenv("SOMETHING", "of the user's")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    workers = pools(limits=WorkerLimits(memory_bytes=1 << 30, open_files=50))
    variables, folder = await value_of(
        workers, "import os\nopen('note', 'w').close()\nvalue = [sorted(os.environ), os.getcwd()]"
    )
    assert "SOMETHING" not in variables and "HALTERES_TRAJECTORY_TOKEN" not in variables
    assert Path(folder, "note").exists()
    fixed = "value = [os.environ[name] for name in ('PYTHONHASHSEED', 'OMP_NUM_THREADS')]"
    assert await value_of(workers, f"import os\n{fixed}") == ["0", "1"]
    with pytest.raises(WorkerOutOfMemory):
        await value_of(workers, "bytes(2 << 30)")
    with pytest.raises(WorkerRefused, match="Too many open files"):
        await value_of(workers, "files = [open('/dev/null') for _ in range(100)]")
    workers.close()
    await until(lambda: not Path(folder).exists())


async def test_what_a_worker_prints_is_seen_up_to_its_limit(
    pools: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    workers = pools(limits=WorkerLimits(memory_bytes=None, file_bytes=1 << 20))
    assert await value_of(workers, "print('a note')\nvalue = 1") == 1
    await until(lambda: "a note" in capfd.readouterr().err)
    for _ in range(3):
        await value_of(workers, "print('x' * (1 << 19))")
    with pytest.raises(WorkerSaidTooMuch, match="1048576 bytes"):
        await value_of(workers, "print('x' * (1 << 22))")


CLEARS = "\x1b[2J"


async def test_what_a_model_wrote_moves_no_cursor_and_fills_no_log(
    pools: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a scorer that prints it, or quotes it in its error, would have it."""
    workers = pools()
    assert await value_of(workers, f"print({CLEARS!r}, 'a note')\nvalue = 1") == 1
    seen = list[str]()
    await until(lambda: seen.append(capfd.readouterr().err) or "a note" in "".join(seen))
    with pytest.raises(WorkerRefused) as caught:
        await value_of(workers, f"raise RuntimeError({CLEARS!r} + 'quoted')")
    assert "quoted" in caught.value.sentence
    assert "\x1b" not in "".join(seen) + caught.value.sentence
    forges = "import worker_loop\nworker_loop.LONGEST_ERROR = 1 << 20\nraise OSError('x' * 500_000)"
    with pytest.raises(WorkerRefused) as caught:
        await value_of(workers, forges)
    assert len(caught.value.sentence) < 5_000


async def test_a_fork_that_goes_on_answers_no_question(pools: Any) -> None:
    """As where a model's program, run in the scorer's own process, forks."""
    workers = pools()
    for _ in range(3):
        assert await value_of(workers, "import os\nos.fork()\nvalue = 1") == 1


async def test_a_closed_pool_answers_nothing(pools: Any) -> None:
    workers = pools()
    asked = asyncio.create_task(value_of(workers, "import time; time.sleep(600)"))
    await until(lambda: workers.num_running == 1)
    workers.close()
    for question in (asked, value_of(workers, "value = 1")):
        with pytest.raises(WorkerLost):
            await question
