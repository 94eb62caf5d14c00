"""Checks of rubrics and verifiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from halteres.rewards.checking import check_answers, check_rubric, function_scores, odd_answers
from halteres.rewards.components import read_rubric
from halteres.rewards.functions import RewardFunction


@pytest.mark.parametrize(
    ("text", "compound"),
    [
        ("Is the result right?", False),
        ("Is the result right and politely said?", True),
        ("Is it short? Is it clear?", True),
        ("Names the city; gives its country.", True),
        ("Does the sand hold?", False),
    ],
)
def test_a_criterion_that_asks_for_two_things_is_found(text: str, compound: bool) -> None:
    found = check_rubric(read_rubric([{"name": "one", "text": text}]))
    assert [(finding.code, finding.subject) for finding in found] == [
        ("compound_criterion", "one")
    ] * compound


def test_choices_from_best_to_worst_and_a_criterion_that_decides_alone_are_found() -> None:
    rows = [
        {
            "name": "a",
            "text": "Right?",
            "choices": ["fully right", "nearly", "wrong"],
            "weight": 18,
        },
        {"name": "b", "text": "Short?", "choices": ["poor", "fair", "good"]},
        {"name": "c", "text": "Kind?"},
    ]
    found = check_rubric(read_rubric(rows))
    assert [(finding.code, finding.subject) for finding in found] == [
        ("reversed_choices", "a"),
        ("unequal_weights", "a"),
    ]


VERIFIERS = """
def exact(completions, answer, **_):
    return [float(c[-1]["content"].strip() == a) for c, a in zip(completions, answer)]

def generous(prompts, completions, completion_ids):
    return [float(p[-1]["content"] in c[-1]["content"] or not c[-1]["content"]) for p, c in zip(prompts, completions)]

def fragile(completions, **_):
    return [float(len(c[-1]["content"].split()[0]) > 99) for c in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "verifiers.py").write_text(VERIFIERS)
    return tmp_path / "verifiers.py"


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("exact", {}),
        ("generous", {"empty": "pays_for_nothing", "prompt": "pays_for_prompt"}),
        ("fragile", {"empty": "fails", "blank": "fails"}),
    ],
)
async def test_a_verifier_is_tried_on_odd_answers(
    file: Path, name: str, codes: dict[str, str]
) -> None:
    scores = await function_scores(
        RewardFunction(f"{file}:{name}"), "What is 3 + 4?", "7", {"answer": "7"}
    )
    assert set(scores) == set(odd_answers("?", "7"))
    found = check_answers(scores)
    assert {finding.subject: finding.code for finding in found} == codes
    if name == "fragile":
        assert found[0].why == "IndexError: list index out of range"
