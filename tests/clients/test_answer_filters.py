"""The nine tasks of the package reasoning-gym that run a model's answer as Python: right answers
pass the filter, and two hundred hostile ones each do no harm.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from environments.hostile_answers import hostile_answers, listening, until_none_runs

from halteres.config import environ
from halteres.environments import reasoning_gym_tasks
from halteres.environments.answer_filters import FILTERS
from halteres.environments.cage import cage_missing
from halteres.environments.config import APIServerConfig
from halteres.environments.reasoning_gym_tasks import ReasoningGymConfig, ReasoningGymEnv, TaskItem
from halteres.errors import EnvironmentFailed

from .test_reasoning_gym import REQUIREMENT

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1800)]

HOSTILE = pytest.mark.hostile  # all two hundred take minutes for each task

STORED = """
import json, sys, reasoning_gym
found = {}
for task in sys.argv[1:]:
    data = reasoning_gym.create_dataset(task, size=10_000, seed=0)
    entries = [data[index] for index in range(200)]
    paid = [data.score_answer(entry["answer"], entry) == 1 for entry in entries]
    found[task] = {index: entry["answer"] for index, entry in enumerate(entries) if paid[index]}
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def package_python(client_python: Callable[..., str]) -> str:
    """A Python that has the package."""
    try:
        return client_python("reasoning-gym", REQUIREMENT)
    except subprocess.CalledProcessError:
        pytest.skip("reasoning-gym cannot be installed here")


@pytest.fixture(scope="session")
def stored(package_python: str) -> dict[str, dict[str, str]]:
    """Of 200 items of each task the stored answers that are paid in full, by the item's index."""
    made = subprocess.run(
        [package_python, "-c", STORED, *FILTERS],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env=environ.for_sandboxed(PYTHONHASHSEED="0"),
    )
    return json.loads(made.stdout)


@asynccontextmanager
async def scoring(python: str, task: str, seed: int) -> AsyncIterator[ReasoningGymEnv]:
    """The environment of a task; by the seed its processes are found."""
    missing = cage_missing()
    if missing is not None:
        pytest.skip(missing)
    config = ReasoningGymConfig(task=task, task_seed=seed, python=python)
    env = ReasoningGymEnv(config, [APIServerConfig()])
    try:
        await env.setup()
        yield env
    finally:
        env.workers.close()
        await env.server.close()


async def outcomes(env: ReasoningGymEnv, item: TaskItem, answers: list[str]) -> list[float | str]:
    """A score or the code of a failure for each."""

    async def outcome(answer: str) -> float | str:
        try:
            return await env.score_answer(item, f"<answer>{answer}</answer>")
        except EnvironmentFailed as failure:
            return failure.code

    return await asyncio.gather(*map(outcome, answers))


@pytest.mark.parametrize("task", FILTERS)
async def test_every_stored_answer_passes_and_is_paid_in_the_cage(
    task: str, package_python: str, stored: dict[str, dict[str, str]]
) -> None:
    answers = stored[task]
    assert len(answers) >= 190
    assert [one for one in answers.values() if not FILTERS[task].passes(one)] == []
    async with scoring(package_python, task, seed=0) as env:
        for index, answer in list(answers.items())[:40]:
            item = await env.item(int(index))
            assert await env.score_answer(item, f"<answer>{answer}</answer>") == 1.0


@pytest.mark.parametrize(
    "every", [pytest.param(9, id="every ninth"), pytest.param(1, id="all", marks=HOSTILE)]
)
@pytest.mark.parametrize("is_filtered", [True, False], ids=["filtered", "cage alone"])
@pytest.mark.parametrize("task", FILTERS)
async def test_hostile_answers_are_scored_or_fail_by_name_and_leave_nothing(
    task: str,
    is_filtered: bool,
    every: int,
    package_python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the filter the cage has to hold alone."""
    if not is_filtered:
        monkeypatch.setattr(reasoning_gym_tasks, "FILTERS", {})
    monkeypatch.setattr(reasoning_gym_tasks, "SCORE_S", 1.0)
    with listening(tmp_path) as (place, listener):
        async with scoring(package_python, task, seed=int(place.word)) as env:
            item = await env.item(0)
            answers = hostile_answers(place)[::every]
            found = await outcomes(env, item, answers)
            assert not place.marker.exists()
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert len(found) == len(answers) == -(-200 // every)
            print(task, is_filtered, Counter(map(str, found)))  # noqa: T201  for the record
            known = {
                "scorer_timeout",
                "scorer_memory",
                "scorer_exited",
                "scorer_output",
                "scorer_error",
            }
            assert {one for one in found if isinstance(one, str)} <= known
            assert await env.score_answer(await env.item(1), "<answer>1</answer>") < 0.5
        await until_none_runs(place.word)
