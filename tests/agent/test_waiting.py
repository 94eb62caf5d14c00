"""Waiting for a run: woken by each thing that can happen to it, by nothing else, and at once where
it has ended.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs.run_fixtures import settings, start_standins
from typer.testing import CliRunner

from halteres.agent import status, waiting
from halteres.agent.transports.command_line import tools_app
from halteres.agent.waiting import Until, Watch, wait_for
from halteres.errors import UserError
from halteres.next_step import Remedy
from halteres.runs.directory import RunDirectory, stop_run
from halteres.runs.state import take_lock

from .run_fixtures import (
    LIVE,
    RUN,
    STOP,
    add_alert,
    add_evaluation,
    add_step,
    change,
    make_run,
    replied,
    supervised,
    told,
)

LONG_S = 50.0
"""Longer than any test may take: who returns earlier was woken."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    monkeypatch.setattr(waiting, "POLL_S", 0.05)


@pytest.fixture
def running() -> Iterator[RunDirectory]:
    with supervised(make_run(steps=3)) as run:
        yield run


class Waiter:
    """A call that is known to wait before anything happens, and known to wait still when it is
    looked at.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self._looked = asyncio.Event()
        look = Watch.look

        def seen(watch: Watch) -> None:
            look(watch)
            self._loop.call_soon_threadsafe(self._looked.set)

        monkeypatch.setattr(Watch, "look", seen)

    async def begin(self, until: str | None, **arguments: Any) -> asyncio.Task[dict[str, Any]]:
        given = {"until": until} if until else {}
        task = asyncio.create_task(
            told("rl_check_status", run_id=RUN, wait_s=LONG_S, **given, **arguments)
        )
        await self.looks(2)
        assert not task.done()
        return task

    async def looks(self, times: int) -> None:
        """Return once it has looked again so often; the last look began after this call."""
        async with asyncio.timeout(5):
            for _ in range(times):
                self._looked.clear()
                await self._looked.wait()


@pytest.fixture
async def waiter(monkeypatch: pytest.MonkeyPatch) -> Waiter:
    return Waiter(monkeypatch)


async def test_several_runs_are_waited_for_in_one_call_until_all_have_ended(
    running: RunDirectory, waiter: Waiter
) -> None:
    other = "0000aaaa"
    with supervised(make_run(other, steps=3)) as second:
        call = told("rl_check_status", run_ids=[RUN, other, RUN[:4]], wait_s=LONG_S)
        task = asyncio.create_task(call)
        await waiter.looks(2)
        change(second, status="completed")
        await waiter.looks(3)
        assert not task.done(), "one of them goes on"
        change(running, status="stopped")
        answer = await task
    assert [(run["run_id"], run["status"]) for run in answer["runs"]] == [
        (RUN, "stopped"),
        (other, "completed"),
    ]
    assert answer["woke"] == "terminal"
    assert answer["next"] == f'rl_compare_runs(["{RUN}","{other}"])'
    assert "run_id" not in answer


async def test_a_run_that_has_ended_ends_no_wait_for_an_alert_of_another(
    running: RunDirectory, waiter: Waiter
) -> None:
    make_run("0000aaaa", steps=3, status="completed")
    task = asyncio.create_task(
        told("rl_check_status", run_ids=["0000aaaa", RUN], until="alert", wait_s=LONG_S)
    )
    await waiter.looks(2)
    assert not task.done()
    add_alert(running, "truncation", 3)
    assert (await task)["woke"] == "alert"
    assert (await told("rl_check_status", run_ids=["0000aaaa"], until="alert", wait_s=LONG_S))[
        "woke"
    ] == "terminal"


async def test_an_alert_of_any_of_several_runs_ends_the_wait_with_its_remedy(
    running: RunDirectory, waiter: Waiter
) -> None:
    with supervised(make_run("0000aaaa", steps=3)):
        task = asyncio.create_task(
            told("rl_check_status", run_ids=[RUN, "0000aaaa"], until="alert", wait_s=LONG_S)
        )
        await waiter.looks(2)
        add_alert(running, "truncation", 3, remedy=Remedy((STOP,)))
        answer = await task
    assert (answer["woke"], answer["runs"][0]["alerts"]) == ("alert", ["truncation"])
    assert answer["next"] == f'rl_stop_training("{RUN}")'


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of every wait, none of which takes any."""
    asked: list[float] = []

    async def seen(run: RunDirectory, until: Until, wait_s: float) -> str:
        asked.append(wait_s)
        return "wait_s"

    monkeypatch.setattr(status, "wait_for", seen)
    return asked


async def test_a_wait_is_as_long_as_the_host_lets_a_call_be(
    running: RunDirectory, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    await told("rl_check_status", run_id=RUN, wait_s=600)
    monkeypatch.setenv("HALTERES_LONGEST_WAIT_S", "280")
    answer = await told("rl_check_status", run_id=RUN, wait_s=600)
    assert waits == [50, 280]
    assert 'wait_s=150, until="eval"' in answer["next"], "ten of its steps"
    monkeypatch.setenv("HALTERES_LONGEST_WAIT_S", "soon")
    assert (await told("rl_check_status", run_id=RUN, wait_s=1))["code"] == "invalid_config"


def test_on_the_command_line_a_wait_is_as_long_as_it_was_asked_for(
    running: RunDirectory, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["check-status", RUN, "--wait-s", "540"]
    waited = CliRunner().invoke(tools_app(), words)
    assert waits == [540], waited.output
    assert "your host" not in waited.output
    assert f"check-status {RUN} --wait-s 50" in waited.output, "a proposed call suits every shell"
    monkeypatch.setenv("HALTERES_LONGEST_WAIT_S", "280")
    assert "280 s at most" in CliRunner().invoke(tools_app(), words).output
    assert waits == [540, 280]


WAKING: dict[str, Callable[[RunDirectory], None]] = {
    "step>=5": lambda run: (add_step(run, 4), add_step(run, 5))[0],
    "eval": lambda run: add_evaluation(run, 3, 0.5),
    "alert": add_alert,
    "change": lambda run: add_step(run, 4),
}


@pytest.mark.parametrize("until", WAKING)
async def test_a_call_is_woken_by_what_it_asked_for(
    running: RunDirectory, waiter: Waiter, until: str
) -> None:
    waits = await waiter.begin(until)
    WAKING[until](running)
    answer = await asyncio.wait_for(waits, 5)
    assert answer["woke"] == until
    assert answer["status"] == "running"


async def test_what_woke_a_call_is_in_its_answer(running: RunDirectory, waiter: Waiter) -> None:
    waits = await waiter.begin("step>=5")
    add_step(running, 5)
    assert (await asyncio.wait_for(waits, 5))["step"] == 5
    waits = await waiter.begin("eval")
    add_evaluation(running, 5, 0.625)
    assert (await asyncio.wait_for(waits, 5))["metrics"]["eval_percent_correct"] == 0.625


async def test_other_things_do_not_wake_it(running: RunDirectory, waiter: Waiter) -> None:
    waits = await waiter.begin("step>=9")
    add_step(running, 8)
    add_evaluation(running, 8)
    add_alert(running)
    change(running, step=8, phase="evaluation")
    await waiter.looks(2)
    assert not waits.done()
    add_step(running, 9)
    assert (await asyncio.wait_for(waits, 5))["woke"] == "step>=9"


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "stopping"},
        {"phase": "evaluation"},
        {"step": 4},
        {"processes": {"env": {**LIVE, "exit": -9}}},
    ],
)
async def test_a_change_is_any_of_state_phase_step_and_processes(
    running: RunDirectory, waiter: Waiter, changes: dict[str, Any]
) -> None:
    waits = await waiter.begin(None)
    change(running, **changes)
    assert (await asyncio.wait_for(waits, 5))["woke"] == "change"


async def test_a_starting_run_is_waited_for_until_it_runs(waiter: Waiter) -> None:
    with supervised(make_run(), status="starting", phase="api") as run:
        waits = await waiter.begin("running")
        change(run, phase="trainer")
        await waiter.looks(2)
        assert not waits.done()
        change(run, status="running", phase=None)
        assert (await asyncio.wait_for(waits, 5))["woke"] == "running"


@pytest.mark.parametrize("until", ["terminal", "running", "eval", "alert", "change", "step>=40"])
async def test_the_end_wakes_whoever_waits_for_whatever(waiter: Waiter, until: str) -> None:
    with supervised(make_run(), status="starting") as run:
        waits = await waiter.begin(until)
        change(run, status="stopped")
        answer = await asyncio.wait_for(waits, 5)
    assert answer["status"] == "stopped"
    assert answer["woke"] == (until if until in ("change", "running") else "terminal")


async def test_a_supervisor_that_dies_wakes_everybody(waiter: Waiter) -> None:
    run = make_run(steps=3, status="running")
    held = take_lock(run.path / "lock")
    waits = await waiter.begin("eval")
    os.close(held)
    answer = await asyncio.wait_for(waits, 5)
    assert (answer["woke"], answer["code"]) == ("terminal", "supervisor_lost")


async def test_nothing_wakes_it_and_the_time_is_over(running: RunDirectory) -> None:
    began = time.monotonic()
    answer = await told("rl_check_status", run_id=RUN, wait_s=0.15, until="eval")
    assert answer["woke"] == "wait_s"
    assert time.monotonic() - began >= 0.15


@pytest.mark.parametrize("until", [None, "terminal", "eval", "step>=99"])
async def test_a_run_that_has_ended_answers_at_once(until: str | None) -> None:
    make_run(steps=3)
    given = {"until": until} if until else {}
    answer = await asyncio.wait_for(told("rl_check_status", run_id=RUN, wait_s=LONG_S, **given), 5)
    assert answer["woke"] == "terminal"


@pytest.mark.parametrize("until", ["running", "step>=3", "step>=0"])
async def test_what_is_so_already_is_not_waited_for(running: RunDirectory, until: str) -> None:
    answer = await asyncio.wait_for(
        told("rl_check_status", run_id=RUN, wait_s=LONG_S, until=until), 5
    )
    assert answer["woke"] == until


async def test_what_happened_before_the_call_does_not_wake_it(running: RunDirectory) -> None:
    add_evaluation(running, 3)
    add_alert(running)
    for until in ("eval", "alert", "change"):
        assert await wait_for(running, Until.parse(until), 0.01) == "wait_s"


async def test_a_row_that_is_still_being_written_is_waited_for(running: RunDirectory) -> None:
    watch = Watch(running)
    with (running.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "src": "tra')
        stream.flush()
        watch.look()
        assert not watch.saw(Until("change"))
        stream.write('iner"}\n')
    watch.look()
    assert watch.saw(Until("step", 4))


async def test_a_real_run_wakes_its_watcher_at_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "3")
    run = start_standins(settings())

    async def woken(until: str) -> dict[str, Any]:
        answer = await asyncio.wait_for(
            told("rl_check_status", run_id=run.run_id, wait_s=LONG_S, until=until), 20
        )
        assert answer["woke"] == until
        return answer

    try:
        assert (await woken("running"))["processes"]["env"] == "running"
        assert (await woken("step>=3"))["metrics"]["reward_mean"] == 0.75
        stop_run(run, deadline_s=0)
        assert (await woken("terminal"))["status"] == "stopped"
    finally:
        stop_run(run)


async def test_a_call_that_is_cancelled_waits_no_longer(
    running: RunDirectory, waiter: Waiter
) -> None:
    waits = await waiter.begin("terminal")
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waits, 5)


async def test_many_calls_wait_at_once_and_the_loop_goes_on(
    running: RunDirectory, waiter: Waiter
) -> None:
    waits = [await waiter.begin("step>=4") for _ in range(4)]
    add_step(running, 4)
    answers = await asyncio.wait_for(asyncio.gather(*waits), 20)
    assert [answer["woke"] for answer in answers] == ["step>=4"] * 4


async def test_a_run_that_is_removed_while_one_waits_is_an_error(
    running: RunDirectory, waiter: Waiter
) -> None:
    waits = await waiter.begin("terminal")
    (running.path / "run.json").unlink()
    answer = await asyncio.wait_for(waits, 5)
    assert answer["code"] == "not_found"


@pytest.mark.parametrize(
    "until", ["step>9", "step>=", "step>=-1", "Terminal", "evaluation", "step>=1e3", "x" * 400]
)
async def test_what_cannot_be_waited_for_is_refused_with_what_can(
    running: RunDirectory, until: str
) -> None:
    with pytest.raises(UserError):
        Until.parse(until)
    reply = await replied("rl_check_status", run_id=RUN, until=until)
    assert (reply.body["code"], reply.body["field"]) == ("invalid_arguments", "until")
    assert reply.body["allowed"] == ["terminal", "running", "eval", "alert", "change", "step>=N"]
    assert len(reply.body["error"]) < 200


async def test_without_a_wait_nothing_is_said_to_have_woken_it(running: RunDirectory) -> None:
    assert "woke" not in await told("rl_check_status", run_id=RUN, until="terminal")
