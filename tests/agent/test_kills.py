"""Whoever is killed while a real run goes on: state, reason and remedy are told rightly within 15
s, nothing is left.

One host of the tools starts all runs and is then killed with its whole process group: the runs do
not notice.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs.run_fixtures import survivors

from halteres.process import alive
from halteres.runs.directory import HEARTBEAT_S, RunDirectory, find_run

from .real_runs import host_of, make_the_call, told, until, until_gone

pytestmark = pytest.mark.chaos

WITHIN_S = 15.0
FATAL = {
    ("trainer", signal.SIGKILL): ("Trainer was killed by SIGKILL", -9),
    ("trainer", signal.SIGTERM): ("Trainer exited with code 0", 0),
}
NUM_RUNS = len(FATAL) + 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALTERES_HOME", str(home))
        # so that what the roles print goes through their supervisor
        patch.setenv("MY_TOKEN", "tok-1234567890")
        yield home


@pytest.fixture(scope="module")
def started(home: Path) -> Iterator[list[RunDirectory]]:
    """Runs whose host is dead."""
    with host_of(NUM_RUNS) as host:
        try:
            assert host.stdout is not None
            answers = [json.loads(host.stdout.readline()) for _ in range(NUM_RUNS)]
        finally:
            os.killpg(host.pid, signal.SIGKILL)
    runs = [find_run(answer["run_id"]) for answer in answers]
    yield list(runs)
    for run in runs:
        end(run)


def end(run: RunDirectory) -> None:
    """Kill what is left of a run."""
    state = run.state()
    for who in (state.supervisor, *state.processes.values()):
        if who and alive(who):
            os.kill(who["pid"], signal.SIGKILL)


async def one_of(started: list[RunDirectory]) -> RunDirectory:
    """A run that is under way and has a checkpoint."""
    run = started.pop()
    await until(
        run.run_id, lambda answer: answer["status"] == "running" and answer["step"] >= 3, 60
    )
    return run


async def test_whichever_role_dies_is_named_with_its_signal_and_the_way_on(
    started: list[RunDirectory],
) -> None:
    runs = [await one_of(started) for _ in FATAL]
    await asyncio.gather(*(killed(run, *case) for run, case in zip(runs, FATAL, strict=True)))


async def killed(run: RunDirectory, role: str, number: signal.Signals) -> None:
    says, code = FATAL[role, number]
    before = run.state()
    os.kill(before.processes[role]["pid"], number)
    answer = await until(run.run_id, lambda answer: answer["status"] == "failed", WITHIN_S)
    await until_gone(before)
    assert answer["error"].startswith(says), answer["error"]
    assert answer["exit"] == {"process": role, "code": code}
    assert answer["code"] == "process_exited"
    assert answer["processes"][role] == ("ended by SIGKILL" if code else "exited (0)")
    assert answer["next"] == f'rl_start_training(resume_from="{run.run_id}")'
    assert answer["resumable"] and answer["last_checkpoint"]["step"] >= 2
    # it wrote its last checkpoint; still that is not what was asked of the run
    if number == signal.SIGTERM:
        assert "SIGTERM was received" in answer["error"]
        assert answer["last_checkpoint"]["step"] == answer["step"]


async def test_a_killed_supervisor_takes_everything_along_and_the_remedy_goes_on(
    started: list[RunDirectory],
) -> None:
    run = await one_of(started)
    before = run.state()
    assert before.supervisor is not None
    os.kill(before.supervisor["pid"], signal.SIGKILL)
    answer = await until(run.run_id, lambda answer: answer["status"] == "failed", WITHIN_S)
    assert (answer["code"], answer["exit"]) == (
        "supervisor_lost",
        {"process": "supervisor", "code": None},
    )
    await until_gone(before)

    resumed = await make_the_call(answer["next"])
    assert resumed["run_id"] != run.run_id, resumed
    try:
        step = answer["last_checkpoint"]["step"]
        going = await until(resumed["run_id"], lambda answer: answer["step"] > step, 60)
        assert going["status"] == "running"
        stopped = await told("rl_stop_training", run_id=resumed["run_id"])
        assert stopped["status"] == "stopped"
        assert not survivors(find_run(resumed["run_id"]).state())
    finally:
        end(find_run(resumed["run_id"]))


async def test_what_may_be_started_again_is_and_the_run_goes_on(
    started: list[RunDirectory],
) -> None:
    """Queue and journal are on disk: api, environment, service and engine come back with all that
    they held.
    """
    run = await one_of(started)
    listed = await told("rl_list_runs", status="active")
    assert run.run_id in [row["run_id"] for row in listed["runs"]], "its host is long dead"
    for number in (signal.SIGKILL, signal.SIGTERM):
        for role in ("api", "env", *(("engine", "service") if number == signal.SIGKILL else ())):
            first = run.state().processes[role]["pid"]
            os.kill(first, number)
            await until(
                run.run_id,
                lambda _, role=role, first=first: run.state().processes[role]["pid"] != first,
                WITHIN_S,
            )
        step = run.state().step
        answer = await until(run.run_id, lambda answer, step=step: answer["step"] >= step + 2, 30)
        assert answer["status"] == "running"
    before = run.state()
    assert before.supervisor is not None
    os.kill(before.supervisor["pid"], signal.SIGTERM)
    answer = await until(run.run_id, lambda answer: answer["status"] == "stopped", WITHIN_S)
    assert "error" not in answer
    await until_gone(before)


async def test_what_a_signal_has_stopped_is_told_as_stalled(started: list[RunDirectory]) -> None:
    """A trainer by its supervisor, a supervisor by whoever looks; neither can end by itself, and
    nothing is left.
    """
    trainers, supervisors = await one_of(started), await one_of(started)
    before = {run: run.state() for run in (trainers, supervisors)}
    pids = {
        trainers: before[trainers].processes["trainer"]["pid"],
        supervisors: (before[supervisors].supervisor or {})["pid"],
    }
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    answers = await asyncio.gather(*(until(run.run_id, is_stalled, WITHIN_S) for run in pids))
    assert time.monotonic() - began < WITHIN_S
    for answer, (run, pid) in zip(answers, pids.items(), strict=True):
        (alert,) = [alert for alert in answer["alerts"] if alert["rule"] == "stalled"]
        assert answer["status"] == "running" and answer["health"] != "healthy"
        assert "SIGSTOP" in alert["evidence"] and f"kill -CONT {pid}" in alert["remedy"]
        assert f'rl_start_training(resume_from="{run.run_id}")' in alert["remedy"]
    os.kill(pids[supervisors], signal.SIGKILL)  # as the alert says
    stopped = await told("rl_stop_training", run_id=trainers.run_id)
    assert stopped["status"] == "stopped"
    beaten = (trainers.path / "heartbeat").stat().st_mtime
    assert (trainers.state().ended_at or 0) - beaten <= HEARTBEAT_S + 1, (
        "also while it waits for what will not end"
    )
    assert (await told("rl_check_status", run_id=supervisors.run_id))["code"] == "supervisor_lost"
    for state in before.values():
        await until_gone(state)


def is_stalled(answer: dict[str, Any]) -> bool:
    return any(alert["rule"] == "stalled" for alert in answer["alerts"])
