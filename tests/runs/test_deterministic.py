"""Deterministic runs with their real processes, on the scripted engine: the same bits, however they
are interrupted.

The engine has no weights, but what it samples, and every log-probability, follows from prompt, seed
and policy version: a batch by other weights, in another order or of other tasks would show in the
metrics of its step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from deadlines import wait_until

from halteres.config.resolution import Resolved, resolve_settings
from halteres.observe.metrics import Row
from halteres.runs.directory import RunDirectory
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import start_run

from .run_fixtures import end, wait, wait_for_end

pytestmark = pytest.mark.runs

STEPS, CHECKPOINT_EVERY = 8, 2

# Its tasks take a moment: a run that is over before its last process is killed would prove nothing.
ENVIRONMENT = """
import asyncio

from halteres.environments.single_turn import SingleTurnEnv


class Lengths(SingleTurnEnv):
    name = "lengths"

    async def setup(self):
        self.drawn = 0

    async def get_next_item(self):
        await asyncio.sleep(0.03)
        self.drawn += 1
        return [self.drawn, self.rng.randint(0, 999)]

    def prompt(self, item):
        return f"Task {item}."

    def score(self, item, text):
        return float(len(text) % 2)

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {"drawn": self.drawn})


if __name__ == "__main__":
    Lengths.cli()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its tasks follow from its generator and from a count of its own, which it saves with each
    checkpoint.
    """
    folder = tmp_path_factory.mktemp("module")
    (folder / "lengths.py").write_text(ENVIRONMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALTERES_HOME", str(folder / "home"))
        yield str(folder / "lengths.py")


def settings(environment: str, staleness: int, steps: int = STEPS) -> Resolved:
    edits = {
        "inference.engine": "scripted",
        "trainer.deterministic": "true",
        "trainer.max_staleness": staleness,
        "trainer.total_steps": steps,
        "trainer.checkpoint_every": CHECKPOINT_EVERY,
        "trainer.eval_every": 0,
        "trainer.loss": "ppo",
        "env.group_size": 4,
        "env.batch_size": 16,
        "env.max_new_tokens": 16,
        "env.eval_tasks": 1,
        "env.eval_samples": 1,
    }
    return resolve_settings(environment, None, [f"{name}={value}" for name, value in edits.items()])


def metrics(run: RunDirectory) -> list[Row]:
    """The trainer's rows, without times."""
    rows = [row for row in run.metrics() if row["src"] == "trainer"]
    return [
        {name: value for name, value in row.items() if name != "t" and "time/" not in name}
        for row in rows
    ]


def adapter(run: RunDirectory) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run.path / "adapter").iterdir()}


@pytest.fixture(scope="module", params=[0, 1], ids=["synchronous", "asynchronous"])
def straight(request: pytest.FixtureRequest, environment: str) -> tuple[int, RunDirectory]:
    """The bound on staleness, and a run that nothing interrupted."""
    run = start_run(plan_run(settings(environment, request.param)))
    assert wait_for_end(run, within_s=90).status == "completed"
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    lags = [row["policy/staleness_max"] for row in rows]
    skipped = [row["train/skipped"] for row in rows]
    assert not any(skipped), "so that steps and versions are the same here"
    assert lags == [0.0, *[float(request.param)] * (STEPS - 1)]
    assert all(row["groups/stale"] == 0 for row in rows)
    return request.param, run


def has_another(run: RunDirectory, role: str, pid: int) -> bool:
    """The role was started again, or was needed no more."""
    state = run.state()
    return state.terminal or state.processes[role]["pid"] not in (pid, None)


def test_a_run_whose_processes_are_killed_has_the_bits_of_one_that_nothing_interrupted(
    straight: tuple[int, RunDirectory], environment: str
) -> None:
    """Environment, trajectory server, service and engine: nothing is lost, nothing is doubled,
    nothing differs.
    """
    staleness, expected = straight
    run = start_run(plan_run(settings(environment, staleness)))
    try:
        for number, role in enumerate(("env", "service", "engine", "api")):
            state = wait(run, lambda state, number=number: state.step > number, 60)
            pid = state.processes[role]["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda role=role, pid=pid: has_another(run, role, pid), 30)
        assert wait_for_end(run, within_s=90).status == "completed"
    finally:
        end(run)
    assert metrics(run) == metrics(expected)
    assert adapter(run) == adapter(expected)


def resumed(run: RunDirectory) -> RunDirectory:
    point = run.newest_checkpoint()
    assert point is not None and 0 < point["step"] < STEPS
    again = start_run(
        plan_run(
            resolve_settings(None, None, [f"trainer.total_steps={STEPS}"], base=run.settings()),
            resume=run,
        )
    )
    assert wait_for_end(again, within_s=90).status == "completed"
    return again


def check_continuation(
    run: RunDirectory, expected: RunDirectory, staleness: int, done: int
) -> None:
    """Each step once; the same bits, but for the first batches after the checkpoint in an
    asynchronous run: the weights that had sampled them are gone, and those of the checkpoint do.
    """
    rows, straight = metrics(run), metrics(expected)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[:done] == straight[:done]
    if staleness == 0:
        assert rows == straight
        assert adapter(run) == adapter(expected)
    else:
        lags = [row["policy/staleness_max"] for row in rows[done:]]
        assert lags == [0.0, *[float(staleness)] * (STEPS - done - 1)]


def test_a_run_in_two_parts_is_one_run(
    straight: tuple[int, RunDirectory], environment: str
) -> None:
    staleness, expected = straight
    first = start_run(plan_run(settings(environment, staleness, steps=4)))
    assert wait_for_end(first, within_s=90).status == "completed"
    again = resumed(first)
    check_continuation(again, expected, staleness, done=4)


@pytest.mark.parametrize("role", ["trainer", "supervisor"])
def test_a_run_that_a_kill_ended_goes_on_from_its_checkpoint_as_if_nothing_had_been(
    straight: tuple[int, RunDirectory], environment: str, role: str
) -> None:
    """Groups that the trainer had not trained on are drawn again, by the same weights."""
    staleness, expected = straight
    run = start_run(plan_run(settings(environment, staleness)))
    state = wait(run, lambda state: state.status == "running" and state.step > CHECKPOINT_EVERY, 60)
    facts: Any = state.supervisor if role == "supervisor" else state.processes[role]
    os.kill(facts["pid"], signal.SIGKILL)
    wait_until(lambda: run.state().terminal, within_s=30)
    point = run.newest_checkpoint()
    assert point is not None
    check_continuation(resumed(run), expected, staleness, done=point["step"])
