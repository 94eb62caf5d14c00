"""A service for the length of a block: nothing of it is left, however the block ends or fails to
begin.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from engine.test_vllm_server import executable
from msgspec import structs

from halteres.clients import json_client
from halteres.config.settings import InferenceSettings
from halteres.errors import NotReady
from halteres.models import TINY
from halteres.runs import servers as module
from halteres.runs.servers import served, service_arguments
from halteres.runs.state import write_state

from .test_damaged import run_of

DEADLINE_S = 20.0


class Loading:
    """A stand-in for Python that never becomes a service: it tells its pid and goes on loading."""

    def __init__(self, folder: Path) -> None:
        self.log, fifo, program = folder / "service.log", folder / "fifo", folder / "python"
        os.mkfifo(fifo)
        program.write_text(f"#!/bin/sh\ntrap '' TERM\necho $$ > {fifo}\nexec sleep 600\n")
        program.chmod(0o755)
        self.program = str(program)
        self._reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def pid(self) -> int:
        """Once it is up."""
        assert select.select([self._reading], [], [], DEADLINE_S)[0], "it was not started"
        return int(os.read(self._reading, 64))

    def close(self) -> None:
        os.close(self._reading)


@pytest.fixture
def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loading]:
    stand_in = Loading(tmp_path)
    monkeypatch.setattr(sys, "executable", stand_in.program)
    monkeypatch.setattr(module, "ENDS_WITHIN_S", 0.1)
    monkeypatch.setattr(module, "ANSWERS_WITHIN_S", 0.1)  # it listens, and answers never
    yield stand_in
    stand_in.close()


def enter(loading: Loading, given_up: threading.Event) -> None:
    with served("m", log=loading.log, given_up=given_up):
        raise AssertionError("it never becomes ready")


def test_the_wait_for_a_service_that_loads_can_be_given_up_and_leaves_no_process(
    loading: Loading,
) -> None:
    """It ignores SIGTERM, too: it is killed, and reaped."""
    given_up = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(enter, loading, given_up)
        pid = loading.pid()
        given_up.set()
        with pytest.raises(NotReady, match="not waited for"):
            entered.result(DEADLINE_S)
    assert not Path(f"/proc/{pid}").exists()


def test_whoever_comes_later_waits_until_the_weights_of_a_run_that_has_ended_are_free(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two services on one state would be refused by its lock."""

    class Begun:
        def __init__(self, *_: object, **__: object) -> None:
            began.append(1)

        def end(self, *_: object) -> None: ...

    def use() -> None:
        with served("m", run):
            pass

    run, began = run_of(home, "3fa9c1d2"), list[int]()
    monkeypatch.setattr(module, "Child", Begun)
    monkeypatch.setattr(module, "_wait_until_ready", lambda *_: None)
    with ThreadPoolExecutor(1) as pool:
        with served("m", run):
            with monkeypatch.context() as impatient:
                impatient.setattr(module, "FREE_WITHIN_S", 0.05)
                with pytest.raises(
                    NotReady, match=f"weights of run {run.run_id} are in use.*Process {os.getpid()}"
                ):
                    use()
            later = pool.submit(use)
            assert len(began) == 1 and not later.done()
        later.result(DEADLINE_S)
    assert len(began) == 2


def test_weights_on_somebody_elses_service_that_is_gone_are_told_at_once(
    home: Path,
) -> None:
    """Its clients would wait for it: an evaluation did, to the end of its hour."""
    run = run_of(home, "3fa9c1d2")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    state = structs.replace(run.state(), service_given=True, urls={"service": url})
    write_state(run.path / "run.json", state)
    with (
        pytest.raises(NotReady, match=r"does not answer\. The run trained on it.*Start it again"),
        served("m", run),
    ):
        raise AssertionError("it is gone")


def test_a_service_that_cannot_be_started_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    before = os.listdir("/proc/self/fd")
    for log in (tmp_path / "service.log", tmp_path / "no_folder" / "service.log"):
        with pytest.raises(OSError), served("m", log=log):
            pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(("samplers", "is_ready"), [("own", False), ("vllm", True)])
def test_a_service_with_a_vllm_has_the_time_that_a_vllm_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samplers: str, is_ready: bool
) -> None:
    """So an evaluation and an inference test have it: they start their services here."""
    monkeypatch.setattr(module, "READY_WITHIN_S", 0.0)
    monkeypatch.setattr(module, "VLLM_S", 3 * DEADLINE_S)
    inference = InferenceSettings.model_validate(
        {"samplers": samplers, "engine": "scripted", "vllm": str(executable(tmp_path))}
    )
    arguments, log = service_arguments(inference), tmp_path / "service.log"
    expected = nullcontext() if is_ready else pytest.raises(NotReady, match="not ready in time")
    with expected, served(TINY, arguments=arguments, log=log) as server:
        told = json_client.get_json(f"{server.url}/halteres/v1/info", DEADLINE_S)
        assert told["samplers"][0]["state"] == "ready"
