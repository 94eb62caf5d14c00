"""Figures of a step's rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from halteres.environments.records import Records
from halteres.environments.scored import ScoredDataGroup
from halteres.errors import EnvironmentFailed
from halteres.models import TINY, builtin_path
from halteres.observe.metrics import read_rows
from halteres.rollouts.groups import as_data
from halteres.tokenizer import Tokenizer

FOLDER = builtin_path(TINY)
assert FOLDER is not None
TOKENIZER = Tokenizer(FOLDER)
END = TOKENIZER.eos_token_id


def group(last: list[int], finish: list[str] | None = None) -> ScoredDataGroup:
    """Answers of one token, which is this one."""
    made = ScoredDataGroup(
        tokens=[[5, token] for token in last],
        masks=[[-100, token] for token in last],
        scores=[0.0 for _ in last],
    )
    if finish:
        made["finish"] = finish
    return made


@pytest.mark.parametrize(
    ("made", "truncated"),
    [
        (group([7, 7, END, END], ["stop", "length", "length", "stop"]), 0.5),  # as the sampler said
        # an author's own group, that says nothing: by its last tokens
        (group([7, 7, 7, END]), 0.75),
    ],
)
def test_the_share_of_answers_that_were_cut_off_is_counted(
    made: ScoredDataGroup, truncated: float
) -> None:
    records = Records(None, TOKENIZER)
    records.group(1, 0, "item", made)
    records.tally(1).group(group([END] * 4))  # dropped, and still sampled
    assert records.close(before=2)[1]["train/truncated"] == truncated / 2


def test_what_only_the_environment_sees_is_left_for_the_supervisor(tmp_path: Path) -> None:
    Records(str(tmp_path), TOKENIZER).notice("no_reward_variance", 3, "64 groups.", "Mend it.")
    (event,) = read_rows(tmp_path / "events.jsonl")
    assert (event["type"], event["rule"], event["step"]) == ("notice", "no_reward_variance", 3)


def test_half_a_character_in_a_task_or_a_failure_ends_no_environment(tmp_path: Path) -> None:
    records = Records(str(tmp_path), TOKENIZER)
    failure = as_data(EnvironmentFailed("score raised KeyError: '\ud83d'."))
    records.failed(1, 0, {"answer": "\ud83d"}, [failure])
    (row,) = read_rows(tmp_path / "rollouts" / "step_1.jsonl")
    assert row["item"] == {"answer": "?"}
    assert row["failures"][0]["why"] == "score raised KeyError: '?'."


def test_turns_are_kept_apart_with_what_was_observed_between_them(tmp_path: Path) -> None:
    first, seen, second = (TOKENIZER.encode(text) for text in ("Higher", "Too low", "4"))
    tokens = [5, *first, END, *seen, *second, END]
    masks = [-100, *first, END, *[-100] * len(seen), *second, END]
    several = ScoredDataGroup(tokens=[tokens], masks=[masks], scores=[1.0])
    records = Records(str(tmp_path), TOKENIZER)
    records.group(1, 0, "item", several)
    records.group(1, 1, "item", group([7]))
    turns, one = (
        row["completions"][0] for row in read_rows(tmp_path / "rollouts" / "step_1.jsonl")
    )
    assert turns["turns"] == [
        {"text": "Higher", "observation": "Too low"},
        {"text": "4", "observation": ""},
    ]
    assert "turns" not in one
