"""rl_stop_training: a run ends with a checkpoint, whoever asks and however often."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs.run_fixtures import settings, start_standins, survivors, wait

from halteres.agent import stop_training
from halteres.process import alive
from halteres.runs.directory import RunDirectory, list_runs

from .run_fixtures import RUN, make_run, replied, supervised, tokens, told

pytestmark = pytest.mark.runs

BUDGET = 150


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    yield tmp_path
    for run in list_runs():
        supervisor = run.state().supervisor
        if supervisor and supervisor["pid"] != os.getpid() and alive(supervisor):
            os.kill(supervisor["pid"], signal.SIGKILL)


@pytest.fixture
def going_on(monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A real supervisor with stand-in roles, three steps of four done."""
    monkeypatch.setenv("STANDIN_STEPS", "3")
    run = start_standins(settings())
    wait(run, lambda state: state.status == "running" and state.step == 3)
    return run


async def test_a_run_is_stopped_with_a_checkpoint_and_can_be_resumed(
    going_on: RunDirectory,
) -> None:
    answer = await told("rl_stop_training", run_id=going_on.run_id)
    assert (answer["message"], answer["status"]) == (
        f"Stopped training run '{going_on.run_id}'",
        "stopped",
    )
    assert (answer["run_id"], answer["step"]) == (going_on.run_id, 3)
    assert answer["last_checkpoint"] == {
        "step": 3,
        "path": f"tinker://{going_on.run_id}:0/weights/final",
    }
    assert f'rl_start_training(resume_from="{going_on.run_id}")' in answer["next"]
    assert tokens(answer) <= BUDGET
    assert not survivors(going_on.state())
    again = await told("rl_stop_training", run_id=going_on.run_id)
    assert again["message"] == f"Run '{going_on.run_id}' is not running (status: stopped)"
    assert again["status"] == "stopped"


async def test_a_run_that_is_still_starting_ends_stopped() -> None:
    run = start_standins(settings())
    answer = await told("rl_stop_training")  # the only active one
    assert (answer["run_id"], answer["status"]) == (run.run_id, "stopped")
    assert not survivors(run.state())


async def test_after_step_asks_for_less_and_now_asks_for_more(
    going_on: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in trainer does not read the request: its step never ends by itself."""
    monkeypatch.setattr(stop_training, "WITHIN_S", 0.2)
    answer = await told("rl_stop_training", run_id=going_on.run_id, mode="after_step")
    assert (
        json.loads((going_on.path / "control" / "stop.json").read_bytes())["mode"] == "after_step"
    )
    assert answer["status"] == "stopping"
    wait(going_on, lambda state: state.status == "stopping")
    monkeypatch.setattr(stop_training, "WITHIN_S", 24)
    assert (await told("rl_stop_training", run_id=going_on.run_id))["status"] == "stopped"


@pytest.mark.parametrize("status", ["completed", "failed", "stopped"])
async def test_an_ended_run_answers_with_its_state_and_is_left_alone(status: str) -> None:
    run = make_run(steps=3, status=status)
    before = (run.path / "run.json").read_bytes()
    answer = await told("rl_stop_training", run_id=RUN)
    assert answer["message"] == f"Run '{RUN}' is not running (status: {status})"
    assert answer["status"] == status
    assert (run.path / "run.json").read_bytes() == before
    assert not (run.path / "control" / "stop.json").exists()


async def test_a_run_that_takes_its_time_answers_stopping_with_the_call_that_sees_it_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_training, "WITHIN_S", 0.2)
    with supervised(make_run(steps=3), supervisor=None) as run:
        answer = await told("rl_stop_training", run_id=RUN)
        assert json.loads((run.path / "control" / "stop.json").read_bytes())["mode"] == "now"
    assert answer["status"] == "stopping"
    assert answer["message"].startswith(f"Stopping training run '{RUN}'")
    assert answer["next"] == f'rl_check_status("{RUN}", wait_s=50, until="terminal")'
    assert tokens(answer) <= BUDGET


async def test_while_a_stop_is_waited_for_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with supervised(make_run(steps=3), supervisor=None):
        stops = asyncio.create_task(told("rl_stop_training", run_id=RUN))
        async with asyncio.timeout(5):
            assert (await told("rl_check_status", run_id=RUN))["status"] == "running"
        assert not stops.done()
        stops.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stops


async def test_an_unknown_run_is_an_error_with_the_active_ones() -> None:
    with supervised(make_run(steps=3)):
        reply = await replied("rl_stop_training", run_id="3fa8")
    assert reply.body["error"] == f"Run '3fa8' not found. Did you mean {RUN} (gsm8k, running)?"
    assert (reply.body["code"], reply.body["active_runs"]) == ("run_not_found", [RUN])
    assert reply.body["next"] == f'rl_stop_training(run_id="{RUN}")'


async def test_there_are_two_modes() -> None:
    reply = await replied("rl_stop_training", run_id=RUN, mode="later")
    assert reply.body["code"] == "invalid_arguments"
