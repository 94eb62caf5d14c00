"""The environments of recipes/smollm2 and recipes/rlhf, and the data that the second makes."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest

from halteres.environments.reasoning_gym_tasks import NUM_TRAIN, TaskItem

RECIPES = Path(__file__).parents[2] / "recipes"
NUM_DRAWS = 200


def recipe(monkeypatch: pytest.MonkeyPatch, folder: str, name: str) -> Any:
    """A module of a recipe, as its own folder's programs import it."""
    monkeypatch.syspath_prepend(RECIPES / folder)
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("folder", "name", "environment", "wrong", "right"),
    [
        ("smollm2", "sums", "Sums", "13 + 9 = 13", "It is 22."),
        ("smollm2", "middle", "Middle", "57, not 34", "Not 81 but 57"),
        ("rlhf", "largest", "Largest", "81 and not 57", "The largest is 81."),
    ],
)
def test_the_last_number_of_an_answer_counts_and_no_held_out_question_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    name: str,
    environment: str,
    wrong: str,
    right: str,
) -> None:
    module = recipe(monkeypatch, folder, name)
    kind = getattr(module, environment)
    env = kind(*kind.config_init())
    item = {"sums": (13, 9), "middle": (81, 34, 57), "largest": (34, 81, 12, 57)}[name]
    assert [env.score(item, text) for text in (wrong, right, "")] == [0.0, 1.0, 0.0]
    rng = random.Random(0)
    assert not any(module.is_held_out(module.draw(rng, held_out=False)) for _ in range(NUM_DRAWS))
    held_out = env.eval_items()
    assert len(held_out) == env.config.eval_tasks
    assert all(module.is_held_out(item) for item in held_out)


class Scorer:
    """A worker of reasoning-gym: pays in full for -12, in part for 12, and remembers what it was
    asked.
    """

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    async def ask(self, question: dict[str, Any], within_s: float) -> dict[str, float]:
        self.asked.append(question["answer"])
        return {"score": {"-12": 1.0, "12": 0.7}.get(question["answer"], 0.0)}


async def test_chain_sum_scores_the_last_number_and_draws_no_question_of_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain_sum = recipe(monkeypatch, "smollm2", "chain_sum")
    env = chain_sum.ChainSum(*chain_sum.ChainSum.config_init())
    env.workers = Scorer()

    async def item(index: int) -> TaskItem:
        return TaskItem(index=index, question=f"{index % 2}?", task="chain_sum")

    monkeypatch.setattr(env, "item", item)
    env.held_out_questions = frozenset({"1?"})
    draws = [await env.get_next_item() for _ in range(20)]
    assert {item.question for item in draws} == {"0?"}
    assert max(item.index for item in draws) < NUM_TRAIN
    answers = ("0 - 4 - 8 = -12", "12", "-12, or 7", "...")
    assert [await env.score_answer(draws[0], text) for text in answers] == [1.0, 0.0, 0.0, 0.0]
    assert env.workers.asked == ["-12", "12", "7"]
    chat = env.prompt(draws[0])
    assert [message["role"] for message in chat] == ["user", "assistant"] * 2 + ["user"]


def test_the_chats_writer_is_right_every_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    data = recipe(monkeypatch, "rlhf", "data")
    largest = recipe(monkeypatch, "rlhf", "largest")
    rows = list(data.chats(NUM_DRAWS, seed=0))
    right = 0
    for row in rows:
        asked, answer = (message["content"] for message in row["messages"])
        item = tuple(int(word.strip(",?")) for word in asked.split() if word.strip(",?").isdigit())
        assert not largest.is_held_out(item)
        right += largest.is_right(item, answer)
    assert NUM_DRAWS * 0.4 < right < NUM_DRAWS * 0.6
    assert rows == list(data.chats(NUM_DRAWS, seed=0))


def test_the_rater_errs_once_in_ten_and_no_prompt_is_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = recipe(monkeypatch, "rlhf", "data")
    answers = [("yes", 1.0), ("no", 0.0), ("no!", 0.0), ("never", 0.0)]
    groups = [
        {
            "scores": [score for _, score in answers],
            "messages": [
                [
                    {"role": "user", "content": f"question {number}"},
                    {"role": "assistant", "content": text},
                ]
                for text, _ in answers
            ],
        }
        for number in range(NUM_DRAWS)
    ]
    rows = data.pairs(groups, seed=0)
    assert len(rows) == 3 * NUM_DRAWS
    wrong = sum(row["rejected"][0]["content"] == "yes" for row in rows)
    assert all(
        "yes" in (row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows
    )
    assert 0.05 < wrong / len(rows) < 0.15
    training, held_out = data.split(rows)
    prompts = [{row["prompt"][0]["content"] for row in part} for part in (training, held_out)]
    assert (len(prompts[0]), len(prompts[1])) == (NUM_DRAWS * 4 // 5, NUM_DRAWS // 5)
    assert not prompts[0] & prompts[1]
