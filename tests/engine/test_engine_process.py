"""The engine's process: ready or told why not, restarted when it dies, never an orphan."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from halteres.engine.process import EngineCommand, EngineProcess, RestartPolicy
from halteres.engine.protocol import EngineGone, LoraConfig, SamplingParams
from halteres.errors import HalteresError, NotFound, NotReady, ProcessFailed
from halteres.models import TINY
from halteres.process import Child

from .requests import PROMPT, packed

pytestmark = pytest.mark.runs


@pytest.fixture
def command(model_folder: Path) -> EngineCommand:
    return EngineCommand(backend="scripted", folder=model_folder, name=TINY, threads=1)


@pytest.fixture
async def running(command: EngineCommand, tmp_path: Path) -> AsyncIterator[EngineProcess]:
    process = EngineProcess(
        command, tmp_path / "logs" / "engine.log", policy=RestartPolicy(ready_s=30, backoff_s=0.01)
    )
    await process.start()
    yield process
    await process.stop()


def alive(pid: int) -> bool:
    """Running, and not merely waiting for its parent to notice the end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until_gone(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    descriptor = os.pidfd_open(pid)
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, gone.set)
    try:
        async with asyncio.timeout(15):
            await gone.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


async def test_a_started_engine_answers_and_leaves_no_socket_behind(running: EngineProcess) -> None:
    info = await running.engine.info()
    assert (info.name, info.architecture, info.threads) == (TINY, "scripted", 1)
    sampled = await running.engine.sample(None, packed(PROMPT), 2, SamplingParams(max_tokens=3))
    assert len(sampled.sequences) == 2
    assert running.state == "ready"
    assert running.pid is not None
    assert os.getpgid(running.pid) == running.pid
    argv = Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")
    assert not Path(argv[argv.index(b"--socket") + 1].decode()).parent.exists()


async def test_a_killed_engine_fails_its_calls_typed_and_is_restarted(
    command: EngineCommand, tmp_path: Path
) -> None:
    deaths: list[HalteresError] = []
    restarted = asyncio.Event()
    process = EngineProcess(
        command,
        tmp_path / "engine.log",
        on_death=deaths.append,
        on_restart=restarted.set,
        policy=RestartPolicy(backoff_s=0),
    )
    await process.start()
    first = process.pid
    assert first is not None
    await process.engine.create_adapter("a", LoraConfig(rank=2))
    async with asyncio.timeout(30):
        os.kill(first, signal.SIGSTOP)  # so that the call is surely waiting when the kill comes
        waiting = asyncio.create_task(process.engine.info())
        os.kill(first, signal.SIGKILL)
        with pytest.raises(NotReady, match="gone"):
            await waiting
        await restarted.wait()
    assert process.restarts == 1
    assert process.pid != first
    assert [type(death) for death in deaths] == [ProcessFailed]
    with pytest.raises(NotFound):  # a new engine knows nothing of the old one's adapters
        await process.engine.snapshot("a", "s")
    await process.stop()


async def test_the_bound_on_restarts_is_kept(command: EngineCommand, tmp_path: Path) -> None:
    policy = RestartPolicy(max_restarts=1, backoff_s=0)
    process = EngineProcess(command, tmp_path / "engine.log", policy=policy)
    await process.start()
    async with asyncio.timeout(30):
        for restarts in (0, 1):
            await process.settled(restarts)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        await process.settled(restarts=2)
    assert process.state == "failed"
    with pytest.raises(ProcessFailed, match="keeps dying"):
        await process.engine.info()
    await process.stop()


async def test_an_engine_that_dies_six_times_within_five_minutes_is_given_up(
    command: EngineCommand, tmp_path: Path
) -> None:
    deaths: list[HalteresError] = []
    process = EngineProcess(
        command, tmp_path / "engine.log", on_death=deaths.append, policy=RestartPolicy(backoff_s=0)
    )
    await process.start()
    async with asyncio.timeout(60):
        for restarts in range(6):
            await process.settled(restarts)
            assert process.state == "ready"
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        await process.settled(restarts=6)
    assert process.state == "failed"
    assert [type(death) for death in deaths] == [ProcessFailed] * 6
    with pytest.raises(ProcessFailed, match="6 deaths within 300 s") as raised:
        await process.engine.info()
    assert "restart the service" in raised.value.next
    await process.stop()


async def test_deaths_that_are_further_apart_than_the_window_are_forgotten(
    command: EngineCommand, tmp_path: Path
) -> None:
    process = EngineProcess(
        command,
        tmp_path / "engine.log",
        policy=RestartPolicy(max_restarts=0, window_s=0, backoff_s=0),
    )
    await process.start()
    async with asyncio.timeout(30):
        for restarts in (1, 2):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            await process.settled(restarts)
            assert process.state == "ready"
    await process.stop()


def _no_fork(*_: Any, **__: Any) -> Child:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _no_belt(*_: Any, **__: Any) -> Child:
    raise subprocess.SubprocessError("Exception occurred in preexec_fn.")


def _no_room(**_: Any) -> str:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


REFUSALS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "no process": (
        "halteres.engine.process.Child",
        _no_fork,
        "Resource temporarily unavailable",
    ),
    "no belt": ("halteres.engine.process.Child", _no_belt, "preexec_fn"),
    "no room": ("halteres.engine.process.tempfile.mkdtemp", _no_room, "No space left on device"),
}
"""What the machine refuses: the name that refuses, how, and what is said of it."""


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_restart_that_the_machine_refuses_is_a_death_and_tried_again(
    command: EngineCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    name, refuse, says = REFUSALS[refusal]
    deaths: list[HalteresError] = []

    def died(why: HalteresError) -> None:
        deaths.append(why)
        monkeypatch.undo() if len(deaths) == 3 else monkeypatch.setattr(name, refuse)

    process = EngineProcess(
        command, tmp_path / "engine.log", on_death=died, policy=RestartPolicy(backoff_s=0)
    )
    await process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await process.settled(restarts=1)
    assert (await process.engine.info()).name == TINY
    assert [type(death) for death in deaths] == [ProcessFailed] * 3
    assert "could not be started" in deaths[1].what
    assert says in deaths[1].why
    assert deaths[1].next
    await process.stop()


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_machine_that_refuses_for_good_is_given_up(
    command: EngineCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    name, refuse, says = REFUSALS[refusal]
    process = EngineProcess(command, tmp_path / "engine.log", policy=RestartPolicy(backoff_s=0))
    await process.start()
    assert process.pid is not None
    monkeypatch.setattr(name, refuse)
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await process.settled(restarts=1)
    assert process.state == "failed"
    with pytest.raises(ProcessFailed, match=says):
        await process.engine.info()
    await process.stop()


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_first_start_that_the_machine_refuses_is_told(
    command: EngineCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    name, refuse, says = REFUSALS[refusal]
    process = EngineProcess(command, tmp_path / "engine.log")
    monkeypatch.setattr(name, refuse)
    with pytest.raises(ProcessFailed, match="could not be started") as raised:
        await process.start()
    assert says in raised.value.why
    assert raised.value.next
    assert process.state == "failed"
    await process.stop()


async def test_stopping_ends_it_in_order(command: EngineCommand, tmp_path: Path) -> None:
    process = EngineProcess(command, tmp_path / "engine.log")
    await process.start()
    engine, pid = process.engine, process.pid
    assert pid is not None
    await process.stop()
    await process.stop()
    assert not alive(pid)
    assert process.restarts == 0
    assert process.pid is None
    with pytest.raises(NotReady):
        await engine.info()


async def test_an_engine_that_ends_early_is_told_with_its_last_words(
    command: EngineCommand, tmp_path: Path
) -> None:
    broken = EngineCommand(
        backend="scripted", folder=tmp_path / "nowhere", name="nobody", threads=1
    )
    process = EngineProcess(broken, tmp_path / "engine.log")
    with pytest.raises(ProcessFailed, match="before it was ready") as raised:
        await process.start()
    assert "holds no model" in raised.value.why
    assert raised.value.details["exit_code"] == 1
    assert "error: " in raised.value.details["tail"]
    with pytest.raises(ProcessFailed):
        _ = process.engine


async def test_an_engine_that_is_killed_while_it_starts_is_started_again_and_others_words_are_not_told_as_its_own(
    command: EngineCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("the last words of another engine\n")
    argv, killed = EngineCommand.argv, iter([True])

    def first_is_killed(self: EngineCommand, socket_path: Path) -> list[str]:
        if next(killed, False):
            return [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
        return argv(self, socket_path)

    monkeypatch.setattr(EngineCommand, "argv", first_is_killed)
    deaths: list[HalteresError] = []
    process = EngineProcess(command, tmp_path / "log", on_death=deaths.append)
    async with asyncio.timeout(30):
        await process.start()
        assert (await process.engine.info()).architecture == "scripted"
        await process.stop()
    (death,) = deaths
    assert "SIGKILL" in death.sentence
    assert "another engine" not in death.sentence


async def test_an_engine_that_is_never_ready_is_told_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        EngineCommand, "argv", lambda *_: [sys.executable, "-c", "import signal; signal.pause()"]
    )
    slow = EngineCommand(backend="scripted", folder=tmp_path, name="slow")
    process = EngineProcess(slow, tmp_path / "engine.log", policy=RestartPolicy(ready_s=0.3))
    with pytest.raises(ProcessFailed, match=r"not ready within 0\.3 s"):
        await process.start()
    assert process.pid is None


PARENT = """
import asyncio, json, sys
from pathlib import Path
import halteres.process
from halteres.engine import process as module
if sys.argv[3] == "lifeline":
    halteres.process.die_with_parent = None

async def main():
    command = module.EngineCommand(backend="scripted", folder=Path(sys.argv[1]), name="tiny", threads=1)
    process = module.EngineProcess(command, Path(sys.argv[2]))
    await process.start()
    print(json.dumps({"engine": process.pid}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("belt", ["lifeline", "both"])
async def test_the_engine_ends_when_its_parent_is_killed(
    model_folder: Path, tmp_path: Path, belt: str
) -> None:
    """`lifeline` alone must do, without Linux's parent-death signal."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        model_folder,
        tmp_path / "engine.log",
        belt,
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    async with asyncio.timeout(30):
        engine = json.loads(await parent.stdout.readline())["engine"]
    assert alive(engine)
    parent.kill()
    await until_gone(engine)
    await parent.wait()
    if belt == "lifeline":
        assert "is gone; ending" in (tmp_path / "engine.log").read_text()


async def test_a_usage_error_exits_2(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "halteres.engine",
        "--backend",
        "magic",
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"--backend" in said


async def test_an_engine_that_hangs_is_killed_and_another_started(
    command: EngineCommand, tmp_path: Path
) -> None:
    deaths: list[HalteresError] = []
    policy = RestartPolicy(backoff_s=0, ping_s=0.2, silent_s=0.6)
    process = EngineProcess(command, tmp_path / "engine.log", on_death=deaths.append, policy=policy)
    await process.start()
    first = process.pid
    assert first is not None
    async with asyncio.timeout(30):
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(NotReady):
            await process.engine.info()
        await process.settled(restarts=1)
    assert not alive(first)
    assert [death.what for death in deaths] == [
        f"The engine (process {first}) hung: it answered nothing for 0.6 s, and was killed."
    ]
    await process.stop()


async def test_an_engine_whose_connection_breaks_while_it_lives_is_killed_and_another_started(
    command: EngineCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.engine.process.ENDS_WITHIN_S", 0.1)
    deaths: list[HalteresError] = []
    policy = RestartPolicy(backoff_s=0)
    process = EngineProcess(command, tmp_path / "engine.log", on_death=deaths.append, policy=policy)
    await process.start()
    first = process.pid
    assert first is not None
    async with asyncio.timeout(30):
        process.engine.fail(EngineGone("Its connection broke."))
        await process.settled(restarts=1)
        assert (await process.engine.info()).name == TINY
    assert not alive(first)
    assert [death.what for death in deaths] == [
        f"The engine (process {first}) could not be reached any more, and was killed."
    ]
    await process.stop()
