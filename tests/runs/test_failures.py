"""What is told when a process of a run dies. With stand-ins; whoever dies, the state is true and
nothing is left.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deadlines import wait_until

from halteres.config.resolution import resolve_settings
from halteres.errors import HalteresError, InvalidConfig, NotFound
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.failures import NO_REASON, reason
from halteres.runs.supervision.supervisor import main as supervise

from .run_fixtures import StartRun, survivors, wait, wait_for_end

pytestmark = pytest.mark.runs


@pytest.fixture
def running(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that has done three of four steps and waits."""
    monkeypatch.setenv("STANDIN_STEPS", "3")
    run = start()
    wait(run, lambda state: state.status == "running" and state.step == 3)
    wait(run, lambda state: any(row.get("src") == "eval" for row in run.metrics()))
    return run


def test_a_killed_trainer_fails_the_run_with_its_name_its_log_and_the_way_on(
    running: RunDirectory,
) -> None:
    os.kill(running.state().processes["trainer"]["pid"], signal.SIGKILL)
    state = wait_for_end(running)
    assert (state.status, state.code, state.resumable) == ("failed", "process_exited", True)
    assert state.error is not None and state.error.startswith("Trainer was killed by SIGKILL at")
    assert str(running.log("trainer")) in state.error
    assert f"Go on from step 2: halteres train --resume {running.run_id}" in state.error
    assert state.processes["trainer"]["exit"] == -9
    assert not survivors(state)


def test_an_engine_that_does_not_come_back_is_named_when_the_trainer_ends_for_lack_of_it(
    running: RunDirectory,
) -> None:
    os.kill(running.state().processes["engine"]["pid"], signal.SIGKILL)
    wait(
        running,
        lambda _: any(
            event["type"] == "process_exit" and event["role"] == "engine"
            for event in running.events()
        ),
    )
    assert running.state().status == "running"
    os.kill(running.state().processes["trainer"]["pid"], signal.SIGKILL)
    state = wait_for_end(running)
    assert state.status == "failed"
    assert state.error is not None and state.error.startswith(
        "The engine ended unexpectedly at step 3."
    )
    assert not survivors(state)


@pytest.mark.parametrize("role", ["env", "api", "service"])
def test_a_role_that_loses_nothing_is_started_again(running: RunDirectory, role: str) -> None:
    first = running.state().processes[role]["pid"]
    os.kill(first, signal.SIGKILL)
    state = wait(running, lambda state: state.processes[role]["pid"] != first)
    assert state.status == "running"
    assert any(event["type"] == "restart" and event["role"] == role for event in running.events())


def test_an_environment_that_dies_again_and_again_fails_the_run(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    monkeypatch.setenv("STANDIN_ENV", "dies")
    run = start()
    state = wait_for_end(run)
    assert state.status == "failed"
    assert state.error is not None and "Environment exited with code 3" in state.error
    assert "The environment gave up. It was told to." in state.error
    assert [event["attempt"] for event in run.events() if event["type"] == "restart"] == [1, 2]


def test_an_environment_that_gave_up_is_not_started_again_and_the_run_tells_its_exception(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    monkeypatch.setenv("STANDIN_ENV", "gives up")
    run = start()
    state = wait_for_end(run)
    assert (state.status, state.code) == ("failed", "env_gave_up")
    assert (
        state.error is not None and "8 groups failed. The last: TypeError: no str." in state.error
    )
    assert not [event for event in run.events() if event["type"] == "restart"]


def test_an_environment_that_hangs_again_and_again_is_killed_and_fails_the_run_with_the_frame(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with signals blocked; it is killed once its heartbeat has been silent for env.stuck_s."""
    monkeypatch.setenv("STANDIN_STEPS", "1")
    monkeypatch.setenv("STANDIN_ENV", "hangs")
    run = start("env.stuck_s=0.5")
    state = wait_for_end(run)
    assert (state.status, state.code) == ("failed", "env_stuck")
    assert state.error is not None
    assert state.error.startswith("Environment hung again: it gave no sign of life for ")
    assert "It hung in score (standin_env.py:7)." in state.error
    assert state.exit == {"process": "env", "code": -9}
    events = run.events()
    assert [
        (event["attempt"], event["reason"]) for event in events if event["type"] == "restart"
    ] == [(1, "env_stuck"), (2, "env_stuck")]
    stuck = [event for event in events if event["type"] == "stuck"]
    assert len(stuck) == 3
    assert (stuck[0]["role"], stuck[0]["draw_step"], stuck[0]["ordinal"]) == ("env", 2, 1)
    assert stuck[0]["silent_s"] >= 0.5
    alerts = [event for event in events if event.get("rule") == "env_stuck"]
    assert len(alerts) == 3 and "It hung in score (standin_env.py:7)." in alerts[0]["evidence"]
    assert not survivors(state)


@pytest.mark.parametrize(
    ("role", "title"), [("service", "Training service"), ("trainer", "Trainer")]
)
def test_a_role_that_dies_before_it_is_ready_is_told_with_its_own_words(
    start: StartRun, monkeypatch: pytest.MonkeyPatch, role: str, title: str
) -> None:
    monkeypatch.setenv("STANDIN_DIES", f"{role}@start")
    run = start()
    state = wait_for_end(run)
    assert state.status == "failed"
    assert state.error is not None
    assert state.error.startswith(
        f"{title} exited with code 7 before it was ready. The {role} has no legs."
    )
    assert not [event for event in run.events() if event["type"] == "restart"]
    assert not survivors(state)


def test_a_role_that_is_never_ready_fails_the_run(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_READY_WITHIN_S", "0.01")
    state = wait_for_end(start())
    assert state.status == "failed"
    assert state.error is not None and "was not ready within" in state.error


def test_a_trainer_that_ends_early_in_order_is_no_success(running: RunDirectory) -> None:
    os.kill(running.state().processes["trainer"]["pid"], signal.SIGTERM)
    state = wait_for_end(running)
    assert (state.status, state.resumable) == ("failed", True)
    assert state.error is not None and state.error.startswith(
        "Trainer exited with code 0 at step 3."
    )


def test_all_steps_without_final_weights_are_no_success(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_TRAINER", "forgetful")
    assert wait_for_end(start()).status == "failed"


def test_a_killed_supervisor_leaves_no_process_and_readers_see_it(running: RunDirectory) -> None:
    before = running.state()
    assert before.supervisor is not None
    os.kill(before.supervisor["pid"], signal.SIGKILL)
    wait_until(lambda: running.state().terminal)
    state = running.state()
    assert (state.status, state.code, state.resumable, state.step) == (
        "failed",
        "supervisor_lost",
        True,
        3,
    )
    assert all(facts["exit"] is not None for facts in state.processes.values())
    wait_until(lambda: not survivors(before), within_s=15)
    assert running.state() == state, "a terminal state never changes"


def test_a_run_is_supervised_once(
    running: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supervise([str(running.path)]) == 1
    assert "is held by a running supervisor" in capsys.readouterr().err


def test_a_broken_environment_file_is_a_sentence_and_no_directory(
    home: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def serve(:\n")
    with pytest.raises(InvalidConfig, match=r"broken\.py is broken") as refused:
        resolve_settings(str(broken), None, [])
    assert "line 1" in refused.value.sentence
    assert not (home / "runs").exists()


def test_a_missing_model_folder_is_a_sentence_and_no_directory(start: StartRun, home: Path) -> None:
    with pytest.raises(NotFound, match="There is no folder /nowhere"):
        start("inference.model=/nowhere")
    assert not (home / "runs").exists() or not list((home / "runs").iterdir())


def test_a_gpu_that_is_not_here_is_a_sentence_and_no_directory(
    start: StartRun, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.runs.planning.resources._usable_gpu", lambda: None)
    with pytest.raises(InvalidConfig, match="there is none that it can use"):
        start("inference.device=cuda")
    assert not (home / "runs").exists() or not list((home / "runs").iterdir())


def test_a_full_disk_is_a_sentence_and_no_directory(
    start: StartRun,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halteres.runs.planning.checks.FREE_BYTES", 10**18)
    with pytest.raises(Exception, match="Too little room"):
        start()
    assert not (home / "runs").exists()


def test_a_disk_that_fills_up_during_the_run_ends_it_with_a_sentence(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    monkeypatch.setenv("STANDIN_LEAST_FREE", str(10**18))
    state = wait_for_end(start())
    assert (state.status, state.code) == ("failed", "disk_full")
    assert state.error is not None and state.error.startswith("The disk is full.")
    assert not survivors(state)


def test_a_directory_that_cannot_be_made_leaves_nothing(start: StartRun, home: Path) -> None:
    (home / "runs").write_text("a file where the folder should be")
    with pytest.raises(Exception, match="cannot be made"):
        start()


def test_no_service_at_the_given_address_is_a_sentence(start: StartRun) -> None:
    with pytest.raises(Exception, match="No training service answers"):
        start(service_url="http://127.0.0.1:9")


@contextmanager
def answering(answer: Callable[[str, str | None], tuple[int, Any]]) -> Iterator[str]:
    """The URL of a service that answers a path and a key with a status and JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, told = answer(self.path, self.headers["X-API-Key"])
            body = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_service_with_keys_is_asked_with_the_users_own(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halteres(path: str, key: str | None) -> tuple[int, Any]:
        if key != "tml-alice":
            return 401, {"detail": "Send a key."}
        return 200, {"model": {"name": "another/model", "folder": "/nowhere"}}

    with answering(halteres) as url:
        with pytest.raises(
            HalteresError, match=r"refuses the key\. Send a key\. Set TINKER_API_KEY"
        ):
            start(service_url=url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-alice")
        with pytest.raises(InvalidConfig, match="serves 'another/model'"):
            start(service_url=url)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            [
                "2026-11-22 10:00:00,123 env INFO halteres.environments.serving: Registered as "
                "bad-1 at step 0"
            ],
            NO_REASON,
        ),
        (
            [
                "Unclosed connector",
                "connections: ['deque([])']",
                "connector: <aiohttp.TCPConnector>",
            ],
            NO_REASON,
        ),
        ([], NO_REASON),
        (["KeyError: 'gold'", "Unclosed client session"], "KeyError: 'gold'"),
    ],
)
def test_a_remark_is_no_reason_for_an_end(lines: list[str], why: str) -> None:
    assert reason(lines, 3) == why
