"""Reward functions: found by name, called as TRL calls them, believed only where they answer as
they should.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from halteres.errors import InvalidConfig, ScorerFailed
from halteres.rewards.functions import RewardFunction, Sample

SAMPLES = [
    Sample(
        prompt=({"role": "user", "content": "2 + 2?"},),
        completion=({"role": "assistant", "content": said},),
        tokens=(1, 2, 3)[:length],
    )
    for said, length in (("four", 1), ("It is 4.", 3))
]


def function(folder: Path, text: str, name: str = "reward") -> RewardFunction:
    file = folder / "rewards.py"
    file.write_text(text)
    return RewardFunction(f"{file}:{name}")


async def test_a_function_is_given_what_trl_gives_it(tmp_path: Path) -> None:
    reward = function(
        tmp_path,
        "def reward(prompts, completions, completion_ids, answer, **columns):\n"
        "    assert prompts[0] == [{'role': 'user', 'content': '2 + 2?'}] and sorted(columns) == "
        "['level']\n"
        "    return [len(ids) + (a in c[0]['content']) for c, ids, a in zip(completions, "
        "completion_ids, answer)]\n",
    )
    assert await reward({"answer": "4", "level": 1}, SAMPLES) == [1.0, 4.0]


async def test_it_takes_as_many_of_the_columns_as_it_names(tmp_path: Path) -> None:
    @dataclass
    class Task:
        answer: int
        level: int = 1

    reward = function(
        tmp_path, "async def reward(completions, answer):\n    return [None, float(answer[1])]\n"
    )
    assert await reward(Task(answer=4), SAMPLES) == [None, 4.0]


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("[1.0]", "gave 1 values for 2"),
        ("None", "NoneType"),
        ("[1.0, float('nan')]", "completion 1 the value nan"),
        ("[1.0, '2']", "completion 1 the text '2'"),
        ("[1.0, 10**400]", "completion 1 the value 1000"),
    ],
)
async def test_an_answer_of_another_shape_is_no_score(
    tmp_path: Path, returned: str, sentence: str
) -> None:
    reward = function(tmp_path, f"def reward(completions):\n    return {returned}\n")
    with pytest.raises(ScorerFailed, match=sentence):
        await reward({}, SAMPLES)


@pytest.mark.parametrize("begins", ["def", "async def"])
async def test_a_function_that_would_end_the_process_gives_no_score(
    tmp_path: Path, begins: str
) -> None:
    text = f"{begins} reward(completions):\n    raise SystemExit(2)\n"
    async with asyncio.timeout(20):
        with pytest.raises(ScorerFailed, match="SystemExit: 2"):
            await function(tmp_path, text)({}, SAMPLES)


async def test_what_nobody_gives_it_is_named(tmp_path: Path) -> None:
    reward = function(tmp_path, "def reward(prompt, completion):\n    return 1.0\n")
    sentence = (
        "takes prompt, completion, which this task does not have. It is called with "
        "answer, prompts, completions"
    )
    with pytest.raises(ScorerFailed, match=sentence):
        await reward({"answer": "4"}, SAMPLES)
    with pytest.raises(ScorerFailed, match="takes answer, which this task does not have"):
        await function(tmp_path, "def reward(completions, answer, **columns):\n    return [1.0]\n")(
            {}, SAMPLES
        )


async def test_a_slow_function_holds_nobody_up(tmp_path: Path) -> None:
    """It computes in a thread of its own: the loop goes on, and so does a process that ends."""
    text = (
        "def reward(completions, begun, gate):\n    begun[0].set()\n    gate[0].wait(30)\n    "
        "return [0.0, 0.0]\n"
    )
    begun, gate = threading.Event(), threading.Event()
    task = asyncio.create_task(function(tmp_path, text)({"begun": begun, "gate": gate}, SAMPLES))
    await asyncio.to_thread(begun.wait, 5)
    assert any(
        thread.name == "reward function" and thread.daemon for thread in threading.enumerate()
    )
    gate.set()
    assert await task == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "names no function"),
        ("no.such.module:f", "ModuleNotFoundError"),
        ("/nowhere/f.py:f", "there is no file"),
        ("json:nothing", "no function 'nothing' in json"),
    ],
)
def test_a_function_that_is_not_there_is_said_so(name: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        RewardFunction(name)


def test_its_digest_follows_its_file(tmp_path: Path) -> None:
    digests: list[Any] = [
        function(tmp_path, text).digest for text in ("def reward(): ...", "def reward(x): ...")
    ]
    assert digests[0] != digests[1]
    assert function(tmp_path, "def reward(): ...").digest == digests[0]
