"""The environment `reasoning_gym` with a stand-in for the package, whose scorer does as the answer
says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import venv
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
    WorkerLost,
    WorkerProcess,
    WorkerRefused,
    WorkerTimedOut,
)
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.rollouts.groups import GroupFailed

from .fakes import ENVIRONMENTS, Inference, run, server, write_config
from .hostile_answers import hostile_answers, listening, until_none_runs

ENDS = ("timeout", "memory", "exited", "output", "error")

PACKAGE = """
import os, time

class Data:
    def __init__(self, name, size, seed, step=1, datasets=()):
        if name not in ("counting", "countdown", "boxnet", "composite"):
            raise ValueError(f"Dataset '{name}' not registered")
        print("made", size)  # a library may print what it likes
        self.names = [one.name for one in datasets] or [name]
        self.seed, self.step = seed, step
        # six tasks of 0.1.25 draw from sets of texts
        self.words = " ".join(["", *{"some", "words", "in", "a", "set"}] if step == 7 else [])

    def __getitem__(self, index):
        task = self.names[index % len(self.names)]
        return {
            "question": f"Item {index} of {self.seed}?" + self.words,
            "answer": None if task == "boxnet" else str(index * self.step),
            "metadata": {1: object(), "source_dataset": task},
        }

    def score_answer(self, answer, entry):
        task = entry["metadata"]["source_dataset"]
        if answer is None:
            return 0.01
        if task == "countdown":
            return float(eval(answer))  # as the package does
        if task == "boxnet" and (answer != "[]" or "Item 13 " in entry["question"]):
            raise TypeError("'int' object is not iterable")
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

COMPOSITE = """
from dataclasses import dataclass

@dataclass
class DatasetSpec:
    name: str
    weight: float
    config: dict
"""


def write_package(folder: Path) -> None:
    (folder / "reasoning_gym").mkdir(parents=True)
    (folder / "reasoning_gym" / "__init__.py").write_text(PACKAGE)
    (folder / "reasoning_gym" / "composite.py").write_text(COMPOSITE)


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """A Python of its own that has the package, in a cage too."""
    folder = tmp_path / "other"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    write_package(packages)
    return str(folder / "bin" / "python")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both this process and its children find it."""
    folder = tmp_path / "site"
    write_package(folder)
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
        assert item == TaskItem(
            index=item.index, question=f"Item {item.index} of 5?", task="counting"
        )
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


@pytest.mark.parametrize("task", sorted(reasoning_gym_tasks.EVALUATING))
def test_tasks_whose_scorer_runs_a_models_answer_are_refused_without_cages(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine of them (0.1.25), and the one that may hold any."""
    monkeypatch.setattr(
        reasoning_gym_tasks, "cage_missing", lambda: "This kernel has no namespaces."
    )
    with pytest.raises(ValidationError, match=r"the model's answer as Python\. This kernel"):
        ReasoningGymConfig(task=task)


async def test_an_answer_that_is_evaluated_passes_a_filter_and_meets_a_cage(
    reasoning: Callable[..., Any],
    other_python: str,
    cages: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marker = tmp_path / "marker"
    async with reasoning(task="countdown", python=other_python) as env:
        item = await env.item(0)
        assert await env.score_answer(item, "<answer>(9 - 1)*3</answer>") == 24.0
        assert await env.score_answer(item, "<answer>8**2</answer>") == 0.01, "as no answer"
        monkeypatch.setattr(reasoning_gym_tasks, "FILTERS", {})
        assert await env.score_answer(item, "<answer>8**2</answer>") == 64.0
        touch = f"<answer>__import__('os').system('touch {marker}')</answer>"
        assert await env.score_answer(item, touch) > 0, "the shell's exit code"
        assert not marker.exists()


@pytest.mark.parametrize("is_filtered", [True, False], ids=["filtered", "cage alone"])
async def test_hostile_answers_are_scored_or_fail_by_name_and_leave_nothing(
    is_filtered: bool,
    reasoning: Callable[..., Any],
    other_python: str,
    cages: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reasoning_gym_tasks, "SCORE_S", 0.5)
    if not is_filtered:
        monkeypatch.setattr(reasoning_gym_tasks, "FILTERS", {})
    with listening(tmp_path) as (place, listener):
        seed = int(place.word)
        async with reasoning(task="countdown", python=other_python, task_seed=seed) as env:
            item, found = await env.item(0), list[float | str]()
            for answer in hostile_answers(place)[::12]:
                try:
                    found.append(await env.score_answer(item, f"<answer>{answer}</answer>"))
                except EnvironmentFailed as failure:
                    found.append(failure.code)
            assert not place.marker.exists()
            with pytest.raises(BlockingIOError):
                listener.accept()
            failures = {one for one in found if isinstance(one, str)}
            assert failures <= {f"scorer_{end}" for end in ENDS}
            assert ("scorer_timeout" in failures) is not is_filtered
            assert await env.score_answer(item, "<answer>5 + 5</answer>") == 10.0
        await until_none_runs(place.word)


async def test_items_of_a_composite_are_filtered_and_scored_as_their_own_tasks_are(
    reasoning: Callable[..., Any], other_python: str, cages: None
) -> None:
    tasks = {"datasets": [{"name": "counting"}, {"name": "countdown", "weight": 2}]}
    async with reasoning(task="composite", python=other_python, task_settings=tasks) as env:
        counting, countdown = await env.item(4), await env.item(5)
        assert (counting.task, countdown.task) == ("counting", "countdown")
        assert await env.score_answer(counting, "<answer>4</answer>") == 1.0
        assert await env.score_answer(counting, "<answer>2**2</answer>") == 0.0
        assert await env.score_answer(countdown, "<answer>2*2</answer>") == 4.0
        assert await env.score_answer(countdown, "<answer>2**2</answer>") == 0.01


@pytest.mark.parametrize("task", ["counting", "countdown"])
async def test_an_item_is_the_same_in_every_process_also_where_it_is_drawn_from_a_set(
    task: str, reasoning: Callable[..., Any], other_python: str, cages: None
) -> None:
    """Else a worker that was replaced, or another one, would score an answer to another question."""
    questions = set[str]()
    for _ in range(3):
        settings = {"step": 7}
        async with reasoning(task=task, python=other_python, task_settings=settings) as env:
            questions.add((await env.item(0)).question)
    assert len(questions) == 1


async def test_an_answer_that_its_scorer_cannot_read_is_paid_as_none_where_it_reads_another(
    reasoning: Callable[..., Any],
) -> None:
    async with reasoning(task="boxnet") as env:
        assert await env.score_answer(await env.item(3), "<answer>7</answer>") == 0.01
        with pytest.raises(WorkerRefused, match="TypeError"):
            await env.score_answer(await env.item(13), "<answer>7</answer>")


async def test_another_python_without_the_package_is_told_at_the_start(
    inference: Inference,
) -> None:
    config = ReasoningGymConfig(python="/nowhere/python")
    assert not ReasoningGymEnv.missing_packages(config)
    env = ReasoningGymEnv(config, [server(inference)])
    with pytest.raises(InvalidConfig, match=r"/nowhere/python.*env\.python"):
        await env.setup()
    await env.server.close()


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
    with pytest.raises(WorkerLost):
        await worker.ask({}, 5)
