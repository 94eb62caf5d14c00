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
from halteres.files import replace_file
from halteres.process import alive, identity
from halteres.runs import kept_service
from halteres.runs.directory import RunDirectory
from halteres.runs.servers import KEPT, Kept, Server, end_all_kept, kept_in


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


def test_a_run_that_begins_ends_every_kept_service(run: RunDirectory) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        threading.Thread(target=child.wait, daemon=True).start()
        keeper = identity(child.pid)
        replace_file(run.path / KEPT, msgspec.json.encode(Kept(process=keeper)))
        assert kept_in(run) is not None
        end_all_kept()
        assert not alive(keeper) and kept_in(run) is None
