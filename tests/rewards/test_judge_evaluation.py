"""A judge measured on held-out preferences: its table, its cost, and whether the order of answers
sways it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.errors import InvalidConfig, InvalidData, NotReady
from halteres.rewards.components import RewardSpec
from halteres.rewards.evaluation import evaluate_judge, read_judge
from halteres.rewards.evaluation_report import as_json, facts
from halteres.rewards.preferences import read_preferences
from rewards.test_judges import Said, endpoint

ROWS = [
    {
        "prompt": f"What is {n} + 1?",
        "chosen": f"It is right: {n + 1}",
        "rejected": f"It is wrong: {n}",
        "kind": kind,
    }
    for n, kind in enumerate(["easy", "easy", "hard", "hard"])
]


def component(url: str, **more: Any) -> RewardSpec:
    return RewardSpec.model_validate(
        {"name": "judge", "judge": {"base_url": url, "method": "pairwise"}, **more}
    )


def honest(prompt: str) -> Said:
    first_is_right = prompt.index("right:") < prompt.index("wrong:")
    return {"A": 0.9, "B": 0.1} if first_is_right else {"A": 0.1, "B": 0.9}


async def test_a_pairwise_judge_has_the_same_table_and_tells_its_cost() -> None:
    async with endpoint(honest) as one:
        found = await evaluate_judge(component(one.url), read_preferences(ROWS))
    assert found.overall.accuracy.value == 1.0 and set(found.by_kind) == {"easy", "hard"}
    assert found.judge is not None and found.judge.position_consistency is not None
    assert (
        found.judge.position_consistency.value == 1.0
        and found.judge.position_consistency.count == len(ROWS)
    )
    assert (found.judge.calls, found.judge.tokens) == (8, 80), (
        "both orders of four pairs, ten tokens each"
    )
    assert dict(facts(found))["judge"] == "8 calls, 80 tokens, 0 from the cache"


async def test_a_judge_that_always_prefers_the_first_answer_is_found_out() -> None:
    """Each pair is a tie to it: no accuracy, half the credit, and no verdict that is the same in
    both orders.
    """
    async with endpoint(lambda _: {"A": 1.0}) as one:
        found = await evaluate_judge(component(one.url), read_preferences(ROWS))
    assert (found.overall.accuracy.value, found.overall.half_credit, found.overall.tie_rate) == (
        0.0,
        0.5,
        1.0,
    )
    assert found.judge is not None and found.judge.position_consistency is not None
    assert found.judge.position_consistency.value == 0.0


async def test_a_pair_without_a_verdict_is_counted_and_is_in_no_figure() -> None:
    async with endpoint(
        lambda prompt: "I would rather not say." if "What is 3" in prompt else honest(prompt)
    ) as one:
        found = await evaluate_judge(component(one.url), read_preferences(ROWS))
    assert (found.num_comparisons, found.num_unscored, found.overall.accuracy.count) == (4, 1, 3)
    assert found.overall.accuracy.value == 1.0
    assert found.judge is not None and found.judge.unreadable == 1, (
        "the other order is not asked for"
    )


async def test_a_judge_with_a_rubric_grades_each_answer_by_itself() -> None:
    rubric = {"criteria": [{"name": "right", "text": "Is it?", "choices": ["no", "yes"]}]}
    async with endpoint(
        lambda prompt: {"B": 0.8, "A": 0.2} if "right:" in prompt else {"A": 1.0}
    ) as one:
        found = await evaluate_judge(component(one.url, rubric=rubric), read_preferences(ROWS))
    assert found.leads == pytest.approx([0.8] * 4)
    assert found.judge is not None and found.judge.position_consistency is None
    assert json.loads(json.dumps(as_json(found)))["judge"]["calls"] == 8


async def test_a_judge_is_not_evaluated_on_steps() -> None:
    steps = {"prompt": "?", "completions": ["a", "b"], "labels": [True, False]}
    with pytest.raises(InvalidData, match="cannot be evaluated on steps"):
        await evaluate_judge(component("http://127.0.0.1:1/v1"), read_preferences([steps]))


async def test_a_judge_that_answers_nothing_is_an_error_that_says_so() -> None:
    async with endpoint(lambda _: "no idea") as one:
        with pytest.raises(NotReady, match="none of 4 comparisons") as failed:
            await evaluate_judge(component(one.url), read_preferences(ROWS))
    assert (
        "4 answers could not be read" in failed.value.sentence
        and "'no idea'" in failed.value.sentence
    )
    assert "max_new_tokens" in failed.value.next


async def test_a_judge_that_is_not_there_is_told_at_once_with_its_reason() -> None:
    spec = component("http://127.0.0.1:1/v1")
    async with asyncio.timeout(10):
        with pytest.raises(
            NotReady, match=r"4 questions failed.*No server answers at http://127.0.0.1:1\."
        ):
            await evaluate_judge(spec, read_preferences(ROWS))


def test_criteria_may_stand_in_the_judges_file_as_a_list(tmp_path: Path) -> None:
    (tmp_path / "grader.yaml").write_text(
        "rubric: [{name: a, text: '?'}]\njudge: {base_url: 'http://x/v1'}\n"
    )
    assert read_judge(tmp_path / "grader.yaml").rubric == [{"name": "a", "text": "?"}]


def test_a_judges_file_is_one_component_of_a_rewards_list(tmp_path: Path) -> None:
    file = tmp_path / "1 careful.toml"  # no name of a component; of a file it is one
    file.write_text('[judge]\nbase_url = "http://127.0.0.1:1/v1"\nmethod = "pairwise"\n')
    spec = read_judge(file)
    assert spec.name == "1 careful" and spec.judge is not None and spec.judge.method == "pairwise"
    file.write_text('[judge]\nbase = "http://127.0.0.1:1/v1"\n')
    with pytest.raises(InvalidConfig, match=r"judge\.base_url: Field required"):
        read_judge(file)


async def test_the_command_takes_a_judges_file_in_place_of_a_model(tmp_path: Path) -> None:
    """With the same gate on the accuracy."""
    rows, file = tmp_path / "rows.jsonl", tmp_path / "careful.toml"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    async with endpoint(honest) as one:
        file.write_text(f'[judge]\nbase_url = "{one.url}"\nmethod = "pairwise"\n')
        arguments = ["reward", "eval", str(file), str(rows), "--min-accuracy", "0.9"]
        found = await asyncio.to_thread(
            lambda: CliRunner().invoke(app, arguments, catch_exceptions=False)
        )
    assert found.exit_code == 0, found.output
    assert (
        "100.0%" in found.output
        and "8 calls, 80 tokens" in found.output
        and "same in both orders" in found.output
    )
