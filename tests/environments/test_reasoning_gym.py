"""The environment `reasoning_gym` with a stand-in for the package, whose scorer does as the answer
says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from halteres.environments import reasoning_gym_tasks
from halteres.environments.reasoning_gym_tasks import (
    NUM_TRAIN,
    ReasoningGymConfig,
    ReasoningGymEnv,
    TaskItem,
)
from halteres.environments.worker_process import (
    WorkerExited,
    WorkerProcess,
    WorkerRefused,
    WorkerTimedOut,
)
from halteres.errors import InvalidConfig
from halteres.rollouts.groups import GroupFailed

from .fakes import ENVIRONMENTS, Inference, run, server, write_config

PACKAGE = """
import os, time

class Data:
    def __init__(self, name, size, seed, step=1):
        if name != "counting":
            raise ValueError(f"Dataset '{name}' not registered")
        print("made", size)  # a library may print what it likes
        self.seed, self.step = seed, step

    def __getitem__(self, index):
        question = f"Item {index} of {self.seed}?"
        return {"question": question, "answer": str(index * self.step), "metadata": {1: object()}}

    def score_answer(self, answer, entry):
        if answer == "loop":
            10 ** 10 ** 10  # holds the interpreter's lock: no signal handler and no thread of the process can end it
        if answer == "raise":
            raise RuntimeError("bad text")
        if answer == "die":
            os._exit(3)
        if answer == "nan":
            return float("nan")
        if answer == "pid":
            return float(os.getpid())
        if answer == "secrets":
            return float(sum("API_KEY" in name for name in os.environ))
        return float(answer == entry["answer"])

def create_dataset(name, **settings):
    return Data(name, **settings)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both this process and its children find it."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "reasoning_gym.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("SOME_API_KEY", "x")
    return folder


@pytest.fixture
def reasoning(package: Path, inference: Inference) -> Callable[..., Any]:
    @asynccontextmanager
    async def ready(**changes: Any) -> AsyncIterator[ReasoningGymEnv]:
        settings = ReasoningGymConfig(**{"task": "counting", "group_size": 4, **changes})
        env = ReasoningGymEnv(settings, [server(inference)])
        try:
            async with asyncio.timeout(60):
                await env.setup()
                yield env
        finally:
            env.workers.close()
            await env.server.close()

    return ready


async def test_item_i_is_task_i_and_its_own_scorer_scores_the_tag_else_the_box(
    reasoning: Callable[..., Any],
) -> None:
    async with reasoning(task_seed=5, task_settings={"step": 2}) as env:
        item = await env.get_next_item()
        assert item == TaskItem(index=item.index, question=f"Item {item.index} of 5?")
        assert 0 <= item.index < NUM_TRAIN
        assert env.prompt(item).startswith(item.question)
        right = str(item.index * 2)
        answers = [
            f"\\boxed{{1}} <answer> {right} </answer>",
            f"\\boxed{{{right}}}",
            right,
            "<answer>1</answer>",
        ]
        assert [await env.score_answer(item, answer) for answer in answers] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "failure", "says"),
    [
        ("loop", WorkerTimedOut, "limit is 0.5 s"),
        ("raise", WorkerRefused, "RuntimeError: bad text"),
        ("die", WorkerExited, "exit code is 3"),
    ],
)
async def test_a_scorer_that_hangs_raises_or_dies_is_a_failed_rollout_and_the_next_answer_is_scored(
    reasoning: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    failure: type[Exception],
    says: str,
) -> None:
    monkeypatch.setattr(reasoning_gym_tasks, "SCORE_S", 0.5)
    async with reasoning() as env:
        item = await env.get_next_item()
        before = int(await env.score_answer(item, "<answer>pid</answer>"))
        with pytest.raises(failure, match=says):
            await env.score_answer(item, f"<answer>{answer}</answer>")
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        monkeypatch.setattr(reasoning_gym_tasks, "SCORE_S", 30.0)
        assert await env.score_answer(item, f"<answer>{item.index}</answer>") == 1.0


async def test_a_cancelled_rollout_does_not_wait_for_its_scorer(
    reasoning: Callable[..., Any],
) -> None:
    async with reasoning() as env:
        item = await env.get_next_item()
        scoring = asyncio.create_task(env.score_answer(item, "<answer>loop</answer>"))
        await asyncio.wait([scoring], timeout=0.2)
        scoring.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(scoring, return_exceptions=True)
        assert scoring.cancelled()


async def test_the_scorer_gets_no_secrets_and_no_answer_that_is_too_long(
    reasoning: Callable[..., Any],
) -> None:
    async with reasoning() as env:
        item = await env.get_next_item()
        assert await env.score_answer(item, "<answer>secrets</answer>") == 0.0
        assert await env.score_answer(item, f"<answer>{'raise' * 10_000}</answer>") == 0.0


async def test_a_score_that_is_no_finite_number_fails_the_rollout(
    reasoning: Callable[..., Any], inference: Inference
) -> None:
    inference.answer = lambda prompt, digest: "<answer>nan</answer>"
    async with reasoning(rollout_retries=0) as env:
        with pytest.raises(GroupFailed, match="not JSON"):
            await env.collect_trajectories(await env.get_next_item())


@pytest.mark.parametrize("task", [*sorted(reasoning_gym_tasks.EVALUATING), "composite"])
def test_tasks_whose_scorer_runs_a_models_answer_are_refused(task: str) -> None:
    """Nine of them (0.1.25), and the one that may hold any."""
    with pytest.raises(ValidationError, match="runs the model's answer as Python"):
        ReasoningGymConfig(task=task)


async def test_a_task_that_is_none_is_told_at_the_start(reasoning: Callable[..., Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"'nothing' cannot be used.*not registered"):
        async with reasoning(task="nothing"):
            raise AssertionError


async def test_held_out_items_are_others_than_those_trained_on(
    package: Path, inference: Inference, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, inference, task="counting", eval_tasks=3, eval_samples=1, run_dir=str(tmp_path)
    )
    file = ENVIRONMENTS / "reasoning_gym_tasks.py"
    folder = tmp_path / "evals"
    ended = await run(
        file,
        "evaluate",
        "--config",
        str(config),
        f"--env.data_dir_to_save_evals={folder}",
        within_s=60,
    )
    assert ended.code == 0, ended.stderr
    asked = (folder / "samples.jsonl").read_text()
    assert all(f"Item {NUM_TRAIN + number} of 0?" in asked for number in range(3))


async def test_without_the_package_the_extra_is_named(
    inference: Inference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    env = ReasoningGymEnv(ReasoningGymConfig(), [server(inference)])
    with pytest.raises(InvalidConfig, match=r"pip install 'halteres\[reasoning-gym\]'"):
        await env.setup()
    await env.server.close()


async def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """However that process dies, and whatever the worker is doing."""
    child = (
        "import json, os, time\n"
        "print('{}', flush=True)\n"
        "print(json.dumps({**json.loads(input()), 'pid': os.getpid()}), flush=True)\n"
        "time.sleep(600)"
    )
    parent = (
        "import asyncio, sys\n"
        "from halteres.environments.worker_process import WorkerProcess\n"
        "async def main():\n"
        f"    worker = WorkerProcess((sys.executable, '-c', {child!r}), start_within_s=30)\n"
        "    answer = await worker.ask({}, 30)\n"
        "    print(answer['pid'], flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        worker = int(await process.stdout.readline())
        watched = os.pidfd_open(worker)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(watched, ended.set)
        await ended.wait()
    asyncio.get_running_loop().remove_reader(watched)
    os.close(watched)


async def test_a_worker_that_does_not_become_ready_is_killed() -> None:
    worker = WorkerProcess(
        (sys.executable, "-c", "import time; time.sleep(600)"), start_within_s=0.5
    )
    with pytest.raises(WorkerTimedOut):
        await worker.ask({}, 5)
