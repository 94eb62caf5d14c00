"""The service that a chat leaves running: it ends by itself, and gives way to a run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent import run_fixtures

from halteres import process
from halteres.config.settings import InferenceSettings
from halteres.errors import NotReady
from halteres.files import replace_file
from halteres.process import Memory, alive, identity
from halteres.runs import kept_service
from halteres.runs.directory import RunDirectory
from halteres.runs.kept_service import ServiceSearch
from halteres.runs.planning.resources import Machine
from halteres.runs.servers import (
    KEPT,
    KEPT_LOCK,
    Kept,
    Server,
    end_all_kept,
    kept_in,
    service_arguments,
)
from halteres.runs.state import take_lock


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return run_fixtures.make_run(steps=1)


def test_it_ends_after_the_last_question_and_is_known_until_it_is_gone(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it ends it still has the memory, but no address: the next question waits."""
    seen: list[Kept | None] = []

    @contextmanager
    def served(*_: Any, **__: Any) -> Iterator[Server]:
        yield Server(url="http://127.0.0.1:1")
        seen.append(kept_in(run))

    def wait(*_: Any) -> bool:
        seen.append(kept_in(run))
        asked = run.path / KEPT
        last = asked.stat().st_mtime - kept_service.IDLE_S - 1
        os.utime(asked, (last, last))
        return False

    monkeypatch.setattr(kept_service, "served", served)
    monkeypatch.setattr("threading.Event.wait", wait)
    monkeypatch.setattr(process, "begin", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    words = ["kept_service", run.run_id, "halteres/tiny", "--lock-fd", "0"]
    monkeypatch.setattr("sys.argv", words)
    assert kept_service.main() == 0
    me = identity(os.getpid())
    assert seen == [Kept(url="http://127.0.0.1:1", process=me), Kept(process=me)]
    assert not (run.path / KEPT).exists()


def test_it_computes_as_the_run_did_in_one_process() -> None:
    """The memory that is asked for before it starts is that of the run's type of numbers."""
    given = InferenceSettings(
        dtype="bfloat16", device="cpu", threads=2, samplers=["own", "vllm"], trainer_ranks=2
    )
    alone = service_arguments(kept_service.without_further_processes(given))
    options = dict(zip(alone[::2], alone[1::2], strict=True))
    assert (options["--dtype"], options["--device"], options["--threads"]) == (
        "bfloat16",
        "cpu",
        "2",
    )
    assert not {"--samplers", "--trainer-ranks", "--vllm"} & options.keys()


def test_a_run_that_begins_ends_every_kept_service(run: RunDirectory) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        threading.Thread(target=child.wait, daemon=True).start()
        keeper = identity(child.pid)
        replace_file(run.path / KEPT, msgspec.json.encode(Kept(process=keeper)))
        assert kept_in(run) is not None
        end_all_kept()
        assert not alive(keeper) and kept_in(run) is None


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The services that would be started, where there is room for them."""
    started: list[str] = []
    room = Machine(cores=2, memory=Memory(total=1 << 35, free=1 << 34), gpu=None)
    monkeypatch.setattr(kept_service, "this_machine", lambda: room)
    monkeypatch.setattr(process, "detach", lambda words, *_: started.append(words[4]))
    return started


def test_a_model_without_room_ends_what_other_chats_have_left_before_it_is_refused(
    run: RunDirectory, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 20, 1 << 20, 1 << 20, 1 << 34]
    ended: list[str] = []

    def this_machine() -> Machine:
        return Machine(cores=2, memory=Memory(total=1 << 35, free=free.pop(0)), gpu=None)

    monkeypatch.setattr(kept_service, "this_machine", this_machine)
    monkeypatch.setattr(kept_service, "end_all_kept", lambda: ended.append("all"))
    with pytest.raises(NotReady, match="does not fit into the memory that is free"):
        ServiceSearch(run, "halteres/tiny").look()
    assert (ended, starts) == (["all"], [])
    assert ServiceSearch(run, "halteres/tiny").look() is None
    assert (ended, starts) == (["all", "all"], ["halteres/tiny"])


def test_a_run_that_starts_its_own_service_just_now_is_not_given_a_second_one(
    run: RunDirectory, starts: list[str]
) -> None:
    with (
        run_fixtures.supervised(run, status="starting"),
        pytest.raises(NotReady, match="has no service yet"),
    ):
        ServiceSearch(run, "halteres/tiny").look()
    assert not starts


def test_a_service_that_did_not_start_is_said_to_every_question_that_waited(
    run: RunDirectory, starts: list[str]
) -> None:
    """The second question finds it starting, and starts none of its own after it."""
    first, second = (ServiceSearch(run, "halteres/tiny") for _ in range(2))
    held = take_lock(run.path / KEPT_LOCK)
    assert second.look() is None
    os.close(held)
    assert first.look() is None
    assert starts == ["halteres/tiny"]
    failure = Kept(process=identity(os.getpid()), failure=("It did not.", "No.", "Look."))
    replace_file(run.path / KEPT, msgspec.json.encode(failure))
    for search in (first, second):
        with pytest.raises(NotReady, match="It did not"):
            search.look()
    assert starts == ["halteres/tiny"]
