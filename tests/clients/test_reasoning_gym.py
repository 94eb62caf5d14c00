"""The package reasoning-gym itself, scored through our environment."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable

import pytest

from halteres.config import environ
from halteres.environments.cage import GYM_WORKER
from halteres.environments.reasoning_gym_tasks import EVALUATING

pytestmark = pytest.mark.clients

REQUIREMENT = "reasoning-gym>=0.1.23"

SCORED = """
import asyncio, json, sys
from halteres.environments.reasoning_gym_tasks import NUM_TRAIN, ReasoningGymConfig, ReasoningGymEnv
from halteres.environments.config import APIServerConfig
import reasoning_gym

async def main():
    scores, unreadable = {}, {}
    for task in sys.argv[1:]:
        env = ReasoningGymEnv(ReasoningGymConfig(task=task), [APIServerConfig()])
        await env.setup()
        item = await env.get_next_item()
        right = reasoning_gym.create_dataset(task, size=10_000, seed=0)[item.index]
        assert right["question"] == item.question
        answers = (f"<answer>{right['answer']}</answer>", "<answer>nothing of the kind</answer>", "none")
        scores[task] = [await env.score_answer(item, answer) for answer in answers]
        env.workers.close()
    # texts that the scorer raises at
    for task, text in {"boxnet": "[1]", "coin_flip": "1e999", "game_of_life": "{}", "prime_factorization": "x"}.items():
        env = ReasoningGymEnv(ReasoningGymConfig(task=task), [APIServerConfig()])
        await env.setup()
        unreadable[task] = await env.score_answer(await env.get_next_item(), f"<answer>{text}</answer>")
        env.workers.close()
    print(json.dumps([scores, unreadable]))

asyncio.run(main())
"""
TASKS = ("chain_sum", "leg_counting", "word_sorting", "mini_sudoku")


def test_right_answers_to_its_tasks_are_paid_in_full_and_the_evaluating_ones_are_still_there(
    client_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = subprocess.run(
        [
            client_python("reasoning-gym", REQUIREMENT),
            "-c",
            "import sysconfig; print(sysconfig.get_path('purelib'))",
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()
    variables = environ.for_child(PYTHONPATH=packages)
    scored = subprocess.run(
        [sys.executable, "-c", SCORED, *TASKS],
        env=variables,
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
    )
    scores, unreadable = json.loads(scored.stdout)
    # a worker's file imports the one next to it
    monkeypatch.syspath_prepend(GYM_WORKER.parent)
    assert unreadable.keys() == runpy.run_path(str(GYM_WORKER))["UNREADABLE"].keys()
    assert set(unreadable.values()) == {0.0}
    assert {task: (right, silent) for task, (right, _, silent) in scores.items()} == dict.fromkeys(
        TASKS, (1.0, 0.0)
    )
    assert all(wrong < 0.5 for _, wrong, _ in scores.values())
    known = subprocess.run(
        [sys.executable, "-c", "from reasoning_gym.factory import DATASETS; print(*DATASETS)"],
        env=variables,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()
    assert set(known) >= EVALUATING
