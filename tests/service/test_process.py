"""The service as a process: how it starts, ends, and dies."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tinker
from deadlines import until

from halteres.errors import Conflict
from halteres.models import TINY
from halteres.service.service import locked

from .live_service import DATA, KEY, STEP, closing, trainer

pytestmark = pytest.mark.runs

WAIT_S = 25
SERVICE = ("-m", "halteres.service")
NEVER_READY = """
import sys
from halteres.engine.process import EngineCommand
from halteres.service.server import main
EngineCommand.argv = lambda *_: [sys.executable, "-c", "import signal; signal.pause()"]
sys.exit(main())
"""
"""A service whose engine takes for ever to load."""
NO_PROCESSES = """
import sys
from halteres.engine.process import EngineCommand
from halteres.service.server import main
def spawn(*_):
    raise BlockingIOError(11, "Resource temporarily unavailable")
EngineCommand.spawn = spawn
sys.exit(main())
"""
"""A service that may start no process."""
COLLECTIONS = """
import gc
from halteres.service.server import collect_seldom
collect_seldom()
def collections(answers):
    before = sum(one["collections"] for one in gc.get_stats())
    kept = [[(token, -0.5) for token in range(500)] for _ in range(answers)]
    return sum(one["collections"] for one in gc.get_stats()) - before
print(collections(20), collections(200) > 0, gc.get_freeze_count() > 10_000)
"""
"""Answers of 500 tokens: how often Python looks for garbage while they are made."""


@dataclass(frozen=True, slots=True)
class Process:
    """A service's process and its address."""

    popen: subprocess.Popen[str]
    url: str

    async def info(self) -> dict[str, Any]:
        """Its card; answered once the engine is ready."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.url}/halteres/v1/info") as response,
        ):
            assert response.status == 200, await response.text()
            return await response.json()

    def ended(self) -> int:
        return self.popen.wait(WAIT_S)


@contextmanager
def running(
    state: Path, *arguments: str, program: tuple[str, ...] = SERVICE, **environment: str
) -> Iterator[Process]:
    """A service on a socket that listens before it starts, so that nobody has to ask twice."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        argv = [
            "--state",
            str(state),
            "--engine",
            "scripted",
            "--threads",
            "1",
            "--listen-fd",
            str(bound.fileno()),
        ]
        popen = subprocess.Popen(
            [sys.executable, *program, *argv, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(bound.fileno(), *(int(value) for value in environment.values())),
            env={**os.environ, **environment},
        )
        try:
            yield Process(popen, f"http://127.0.0.1:{bound.getsockname()[1]}")
        finally:
            popen.kill()
            popen.communicate()


def gone(pid: int) -> bool:
    """Wait until a process that is not our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], WAIT_S)[0])
    finally:
        os.close(descriptor)


async def test_a_service_trains_through_its_engine_process_and_ends_in_order(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as process:
        async with asyncio.timeout(WAIT_S):
            info = await process.info()
            client = await asyncio.to_thread(
                tinker.ServiceClient, base_url=process.url, api_key=KEY
            )
            await asyncio.to_thread(lambda: client.holder)
            async with closing(client):
                training = await trainer(client)
                passed, stepped = (
                    training.forward_backward(DATA, "cross_entropy"),
                    training.optim_step(STEP),
                )
                assert len((await passed).loss_fn_outputs) == 2
                await stepped
        card = json.loads((tmp_path / "service.json").read_text())
        assert card["pid"] == process.popen.pid
        assert card["engine_pid"] == info["engine"]["pid"]
        assert card["url"] == process.url
        process.popen.send_signal(signal.SIGTERM)
        assert process.ended() in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        assert gone(card["engine_pid"])


async def test_what_a_service_and_its_engine_write_is_their_owners_alone(tmp_path: Path) -> None:
    """Also where the state directory was made by somebody else, and is open."""
    tmp_path.chmod(0o755)
    with running(tmp_path) as process:
        async with asyncio.timeout(WAIT_S):
            client = await asyncio.to_thread(
                tinker.ServiceClient, base_url=process.url, api_key=KEY
            )
            async with closing(client):
                training = await trainer(client)
                await training.save_state("first")
    written = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert "adapter_model.safetensors" in {path.name for path in written}
    assert [path for path in written if path.stat().st_mode & 0o077] == []


async def test_ctrl_c_ends_it_while_a_client_waits(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        engine = (await process.info())["engine"]["pid"]
        body = {"session_id": "x", "model_seq_id": 0}
        async with aiohttp.ClientSession(process.url) as http:
            made = await (await http.post("/api/v1/create_session", json={})).json()
            body = {"session_id": made["session_id"], "model_seq_id": 0, "base_model": TINY}
            model = (await (await http.post("/api/v1/create_model", json=body)).json())["model_id"]
            step = {"model_id": model, "seq_id": 2, "adam_params": {}}
            future = await (await http.post("/api/v1/optim_step", json=step)).json()
            poll = asyncio.create_task(
                http.post("/api/v1/retrieve_future", json={"request_id": future["request_id"]})
            )
            await http.get("/api/v1/healthz")
            process.popen.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.ended) in (
                0,
                -signal.SIGINT,
                128 + signal.SIGINT,
            )
            assert (await poll).status == 408
        assert gone(engine)


async def test_kill_9_of_the_service_leaves_no_engine(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        engine = (await process.info())["engine"]["pid"]
        process.popen.kill()
        assert gone(engine)
    with running(tmp_path) as process:  # the lock went with it
        assert (await process.info())["model"]["name"] == TINY


async def test_kill_9_of_the_engine_brings_another_and_training_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        async with asyncio.timeout(WAIT_S):
            engine = (await process.info())["engine"]["pid"]
            client = await asyncio.to_thread(
                tinker.ServiceClient, base_url=process.url, api_key=KEY
            )
            await asyncio.to_thread(lambda: client.holder)
            async with closing(client):
                training = await trainer(client)
                await training.forward_backward(DATA, "cross_entropy")
                os.kill(engine, signal.SIGKILL)
                assert gone(engine)
                metrics = (await training.optim_step(STEP)).metrics
                assert metrics is not None
                assert metrics["policy_version:max"] == 1
            info = await process.info()
            assert info["engine"]["restarts"] == 1
            assert (
                json.loads((tmp_path / "service.json").read_text())["engine_pid"]
                == info["engine"]["pid"]
                != engine
            )


async def test_the_end_of_its_lifeline_ends_the_service(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    with running(tmp_path, HALTERES_LIFELINE_FD=str(reading)) as process:
        os.close(reading)
        engine = (await process.info())["engine"]["pid"]
        os.close(writing)
        assert await asyncio.to_thread(process.ended) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        assert gone(engine)


async def test_a_second_service_on_one_state_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        await first.info()
        with running(tmp_path) as second:
            said = second.popen.stderr.read() if second.popen.stderr else ""
            assert second.ended() == 1
            assert f"error: Another service uses the state directory {tmp_path}." in said
            assert "name another directory: --state DIR." in said
        assert (await first.info())["engine"]["restarts"] == 0


def started(*arguments: str) -> tuple[int, str]:
    """Exit code and last line of a service that cannot start."""
    command = [sys.executable, "-m", "halteres.service", "--engine", "scripted", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_a_busy_port_a_missing_model_and_a_state_that_cannot_be_are_one_sentence_each(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        code, said = started("--state", str(tmp_path / "s"), "--port", str(bound.getsockname()[1]))
        assert (code, "cannot be used" in said, "--port" in said) == (1, True, True)
    code, said = started("--state", str(tmp_path / "s"), "--port", "0", "--model", str(tmp_path))
    assert (code, said.startswith("error: There is no model")) == (1, True)
    (tmp_path / "file").write_text("")
    code, said = started("--state", str(tmp_path / "file" / "s"), "--port", "0")
    assert (code, said.startswith("error: The state directory")) == (1, True)


async def test_sigterm_ends_it_while_a_request_waits_for_the_engine_to_start(
    tmp_path: Path,
) -> None:
    with running(tmp_path, program=("-c", NEVER_READY)) as process:
        async with asyncio.timeout(WAIT_S), aiohttp.ClientSession(process.url) as http:
            made = await (await http.post("/api/v1/create_session", json={})).json()
            body = {"session_id": made["session_id"], "model_seq_id": 0, "base_model": TINY}
            assert (await http.post("/api/v1/create_model", json=body)).status == 200
        process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.ended) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def last_words(process: Process) -> str:
    _, said = process.popen.communicate(timeout=WAIT_S)
    return said.strip().splitlines()[-1]


def test_a_service_that_may_start_no_engine_ends_with_a_sentence(tmp_path: Path) -> None:
    with running(tmp_path, program=("-c", NO_PROCESSES)) as process:
        assert process.ended() == 1
        assert last_words(process).startswith(
            "error: The engine could not be started. Resource temporarily unavail"
        )


def test_a_service_that_cannot_say_where_it_answers_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "service.json").mkdir()
    with running(tmp_path) as process:
        assert process.ended() == 1
        assert last_words(process).startswith(
            f"error: {tmp_path / 'service.json'} cannot be written."
        )


def heard(process: Process, words: str) -> bool:
    """Whether it says this before it ends."""
    return any(words in line for line in process.popen.stderr or ())


async def test_a_card_that_cannot_be_renewed_is_logged_and_the_next_engine_is_named_again(
    tmp_path: Path,
) -> None:
    card = tmp_path / "service.json"
    with running(tmp_path) as process:
        async with asyncio.timeout(WAIT_S):
            first = (await process.info())["engine"]["pid"]
            await until(card.is_file)
            card.unlink()
            card.mkdir()
            os.kill(first, signal.SIGKILL)
            assert await asyncio.to_thread(heard, process, f"{card} cannot be written.")
            card.rmdir()
            second = (await process.info())["engine"]["pid"]
            os.kill(second, signal.SIGKILL)
            await until(card.is_file)
            info = await process.info()
        assert info["engine"]["restarts"] == 2
        assert json.loads(card.read_text())["engine_pid"] == info["engine"]["pid"]


def test_what_blocks_inside_the_service_is_not_told_as_a_second_service(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), locked(tmp_path):
        raise BlockingIOError
    with locked(tmp_path), pytest.raises(Conflict, match="Another service"), locked(tmp_path):
        pass


def test_answers_of_many_tokens_do_not_begin_a_search_for_garbage_each() -> None:
    """That held up all requests; what is imported is never looked through again."""
    ended = subprocess.run(
        [sys.executable, "-c", COLLECTIONS], capture_output=True, text=True, timeout=WAIT_S
    )
    assert ended.stdout.split() == ["0", "True", "True"], ended.stderr
