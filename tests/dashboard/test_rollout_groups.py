"""The groups of a step as the page is told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent import run_fixtures, run_results

from halteres.dashboard.rollout_groups import group_of_step, groups_of_step, sampled_groups
from halteres.errors import NotFound
from halteres.groups.rollout_rows import in_utf16
from halteres.observe.metrics import append_row
from halteres.redaction import Redactor
from halteres.runs.directory import RunDirectory

ANSWERS = [run_results.completion(text, score) for text, score in (("four", 1.0), ("Five", 0.0))]


@pytest.fixture
def run(home: Path) -> RunDirectory:
    """A run that goes no further than what is on its disk."""
    return run_fixtures.make_run(steps=3, status="completed")


def add(run: RunDirectory, step: int, number: int, **line: Any) -> None:
    made = {"group": number, "id": f"{step}.{number}", **line}
    run_results.add_group(run, step, *made.pop("completions", ANSWERS), **made)


def train(run: RunDirectory, step: int, known: str, advantages: list[list[float]]) -> None:
    row = {"id": known, "advantages": advantages}
    append_row(run.path / "rollouts" / f"advantages_{step}.jsonl", row)


def told(value: Any) -> Any:
    """As it travels."""
    return msgspec.json.decode(msgspec.json.encode(value))


def states(run: RunDirectory, step: int) -> list[tuple[str, str]]:
    return [(row["state"], row["why"]) for row in groups_of_step(run, step, "")["groups"]]


def test_a_group_is_joined_with_the_trainer_s_advantages_in_whichever_step(
    run: RunDirectory,
) -> None:
    """As late as the largest `trainer.max_staleness` allows."""
    for number in range(3):
        add(run, 1, number)
    train(run, 1, "1.0", [[0.5], [-0.5]])
    train(run, 3, "1.1", [[1.0], [-1.0]])
    train(run, 65, "1.2", [[1.0], [-1.0]])
    first, second, _ = groups_of_step(run, 1, "")["groups"]
    assert [one["advantage"] for one in first["rollouts"]] == [0.5, -0.5]
    assert [one["advantage"] for one in second["rollouts"]] == [1.0, -1.0]
    assert states(run, 1) == [("trained", ""), ("trained", "in step 3"), ("trained", "in step 65")]


def test_what_became_of_a_group_is_told_with_its_reason(run: RunDirectory) -> None:
    failure = {"code": "env_error", "why": "score raised."}
    add(run, 1, 0, dropped={"code": "same_scores"})
    add(run, 1, 1)
    add(run, 1, 1, completions=[], dropped={"code": "set_aside", "why": "Too old."})
    add(run, 1, 2)
    refused = {"code": "refused", "why": "It is no group."}
    run_results.add_group(run, 1, group=2, prompt="", failures=[refused])
    run_results.add_group(run, 1, group=3, prompt="", failures=[failure])
    add(run, 1, 4)
    train(run, 1, "of another run", [[0.0]])
    found = states(run, 1)
    assert [state for state, _ in found] == ["dropped", "dropped", "dropped", "failed", "unused"]
    assert [why for _, why in found[1:4]] == [
        "Too old.",
        "It is no group.",
        "env_error: score raised.",
    ]
    figures = groups_of_step(run, 1, "")["figures"]
    assert figures["dropped"] == {"same_scores": 1, "set_aside": 1, "refused": 1}
    assert figures["failed"] == {"env_error": 1}
    assert (figures["groups"], figures["rollouts"]) == (5, 8)


def test_a_row_without_the_newer_fields_is_a_group_that_was_sent(run: RunDirectory) -> None:
    run_results.add_group(run, 1, *ANSWERS)
    assert states(run, 1) == [("sent", "")]
    whole = told(group_of_step(run, 1, 0))
    assert whole["rollouts"][0]["parts"] == [{"text": "four", "sampled": True}]


def test_texts_and_tokens_travel_with_an_opened_group_alone(run: RunDirectory) -> None:
    tokens = {"ids": [7, 2], "logprobs": [-0.5, 0.0], "lengths": [4, 0]}
    add(run, 1, 0, completions=[{**ANSWERS[0], **tokens}, ANSWERS[1]])
    brief = msgspec.json.encode(groups_of_step(run, 1, ""))
    assert b"parts" not in brief and b"four" not in brief and b"logprobs" not in brief
    first, second = told(group_of_step(run, 1, 0))["rollouts"]
    assert first["parts"] == [{"text": "four", "sampled": True, **tokens}]
    assert second["parts"] == [{"text": "Five", "sampled": True}]
    assert told(sampled_groups(run, 5, Redactor([])))[0]["rollouts"][0] == first


def test_turns_have_their_own_advantages_where_the_trainer_counts_them_alike(
    run: RunDirectory,
) -> None:
    turns = [{"text": "a", "observation": "b", "reward": 0.5}, {"text": "c"}]
    of_turns = {**run_results.completion("ac", 1.0), "turns": turns}
    add(run, 1, 0, completions=[of_turns])
    add(run, 1, 1, completions=[of_turns])
    train(run, 1, "1.0", [[0.25, -0.75]])
    train(run, 1, "1.1", [[0.5]])
    assert told(group_of_step(run, 1, 0))["rollouts"][0]["parts"] == [
        {"text": "a", "sampled": True, "reward": 0.5, "advantage": 0.25},
        {"text": "b", "sampled": False},
        {"text": "c", "sampled": True, "advantage": -0.75},
    ]
    parts = told(group_of_step(run, 1, 1))["rollouts"][0]["parts"]
    assert [part.get("advantage") for part in parts] == [0.5, None, 0.5]


@pytest.mark.parametrize(
    ("search", "found"), [("FOUR", [0]), ("five", [1]), ("6 * 7", [0, 1]), ("nine", [])]
)
def test_a_search_names_the_rollouts_that_have_the_text(
    search: str, found: list[int], run: RunDirectory
) -> None:
    add(run, 1, 0)
    (row,) = groups_of_step(run, 1, search)["groups"]
    assert row["found"] == found


def test_a_step_without_rollouts_is_answered_by_the_nearest(run: RunDirectory) -> None:
    with pytest.raises(NotFound):
        groups_of_step(run, None, "")
    add(run, 1, 0)
    add(run, 3, 0)
    asked = [groups_of_step(run, step, "")["step"] for step in (None, 0, 1, 7)]
    assert asked == [3, 1, 1, 3]
    assert groups_of_step(run, 1, "")["steps"] == [1, 3]
    with pytest.raises(NotFound):
        group_of_step(run, 3, 1)


def test_lengths_are_told_as_javascript_counts_characters() -> None:
    assert in_utf16("abc", [1, 2]) == [1, 2]
    assert in_utf16("a🎲é", [1, 1, 1]) == [1, 2, 1]
