"""The environments `gsm8k` and `word_problems`, and the rows that come with the second."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from halteres.environments.gsm8k_tinker import GSM8KConfig, GSM8KEnv
from halteres.environments.problems import split_of
from halteres.environments.rows import Row
from halteres.environments.word_problems import ROWS, WordProblemsEnv

from .fakes import ENVIRONMENTS, Inference, run, write_config

RECIPE = Path(__file__).parents[2] / "recipes" / "word_problems.py"


def equations(row: dict[str, str]) -> str:
    """The sum behind a row as a problem's key, e.g. "3+4*2"."""
    first, *later = row["answer"].partition(" ####")[0].split(". ")
    return "".join(
        [first.partition(" =")[0], *(step.partition(" ")[2].partition(" =")[0] for step in later)]
    ).replace(" ", "")


def rows(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ROWS / file).read_text().splitlines()]


def test_the_rows_are_those_that_the_recipe_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("word_problems_recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, recipe)
    spec.loader.exec_module(recipe)
    monkeypatch.setattr(recipe, "ROWS", tmp_path)
    recipe.main()
    for file in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / file).read_bytes() == (ROWS / file).read_bytes()


def test_no_sum_is_told_twice_and_none_of_the_test_rows_was_shown_to_the_built_in_model() -> None:
    train, test = rows("train.jsonl"), rows("test.jsonl")
    assert (len(train), len(test)) == (800, 128)
    keys = [equations(row) for row in (*train, *test)]
    assert len(set(keys)) == len(keys)
    assert {split_of(equations(row)) for row in train} == {"train"}
    assert {split_of(equations(row)) for row in test} == {"eval"}


async def test_word_problems_trains_on_one_file_and_is_judged_on_the_other() -> None:
    config, servers = WordProblemsEnv.config_init()
    env = WordProblemsEnv(config, servers)
    await env.setup()
    assert {row["question"] for row in rows("test.jsonl")} == {
        row.question for row in env.eval_items()
    }
    train = {row["question"] for row in rows("train.jsonl")}
    assert {(await env.get_next_item()).question for _ in range(50)} <= train
    env.rng = random.Random(1)
    item = await env.get_next_item()
    assert env.messages(item) == [
        {"role": "user", "content": config.prompt_template.replace("{question}", item.question)}
    ]


def test_the_exact_number_in_the_last_box_pays_one_and_anything_else_nothing() -> None:
    env = GSM8KEnv(GSM8KConfig(), GSM8KEnv.config_init()[1])
    item = Row(question="How much?", answer="1,000")
    paid = ["First \\boxed{5}, then \\boxed{\\$1000.00}.", "\\boxed{1{,}000 \\text{ dollars}}"]
    unpaid = [
        "1000",
        "\\boxed{1000 or 5}",
        "\\boxed{10**3}",
        "\\boxed{1000} no \\boxed{999}",
        "\\boxed{1000",
        "",
    ]
    assert [env.score(item, text) for text in (*paid, *unpaid)] == [1.0] * len(paid) + [0.0] * len(
        unpaid
    )


async def test_gsm8k_runs_from_a_local_file(inference: Inference, tmp_path: Path) -> None:
    """The stand-in answers with one digit in a box, so that some of ten answers are right."""
    data = tmp_path / "local.jsonl"
    data.write_text(
        "".join(
            json.dumps({"question": f"What is {n}?", "answer": str(n % 10)}) + "\n"
            for n in range(200)
        )
    )
    config = write_config(
        tmp_path, inference, dataset=str(data), eval_tasks=8, total_steps=2, group_size=4
    )
    ended = await run(ENVIRONMENTS / "gsm8k_tinker.py", "evaluate", "--config", str(config))
    assert ended.code == 0, ended.stderr
    assert json.loads(ended.stdout)["eval/num_tasks"] == 8


async def test_without_its_data_gsm8k_ends_with_a_sentence(
    inference: Inference, tmp_path: Path
) -> None:
    config = write_config(tmp_path, inference, dataset="none.jsonl")
    ended = await run(ENVIRONMENTS / "gsm8k_tinker.py", "evaluate", "--config", str(config))
    assert ended.code == 1
    assert "cannot be read" in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr
