"""Figures of a step's rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halteres.environments.records import Records
from halteres.environments.scored import ScoredDataGroup
from halteres.errors import EnvironmentFailed
from halteres.groups.rollout_rows import TokenLimits, group_id, has_tokens
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
    assert [(turn["text"], turn["observation"]) for turn in turns["turns"]] == [
        ("Higher", "Too low"),
        ("4", ""),
    ]
    assert "turns" not in one


def rows_of(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    return read_rows(folder / "rollouts" / f"step_{step}.jsonl")


def test_a_row_has_every_token_its_log_probability_and_whether_it_was_sampled(
    tmp_path: Path,
) -> None:
    """Prompt, turns and observations in order are the sequence that was trained on."""
    first, seen, second = (TOKENIZER.encode(text) for text in ("Higher 🎲", "Too low", "4"))
    tokens = [5, 6, *first, END, *seen, *second, END]
    masks = [-100, -100, *first, END, *[-100] * len(seen), *second, END]
    logprobs = [1.0 if mask == -100 else -at / 7 for at, mask in enumerate(masks)]
    made = ScoredDataGroup(
        tokens=[tokens], masks=[masks], scores=[1.0], inference_logprobs=[logprobs]
    )
    Records(str(tmp_path), TOKENIZER).group(1, 0, "item", made)
    (row,) = rows_of(tmp_path)
    turns = row["completions"][0]["turns"]
    rebuilt = list(row["prompt_ids"])
    for turn in turns:
        rebuilt += [*turn["ids"], *turn["observation_ids"]]
        assert sum(turn["lengths"]) == len(turn["text"])
        assert len(turn["lengths"]) == len(turn["ids"]) == len(turn["logprobs"])
    assert rebuilt == tokens
    sampled = [one for turn in turns for one in turn["logprobs"]]
    kept = [one for one in logprobs if one <= 0]
    assert sampled == pytest.approx(kept, abs=0.0005)
    assert row["id"] == group_id(made["tokens"], made["scores"])


def test_dropped_groups_are_written_with_their_reason(tmp_path: Path) -> None:
    records = Records(str(tmp_path), TOKENIZER)
    records.dropped(1, 0, "item", group([7, 7]), "same_scores")
    kept = group([7, 9])
    records.group(1, 1, "item", kept)
    records.set_aside(1, 1, kept, "It was too old.")
    dropped, sent, why = rows_of(tmp_path)
    assert dropped["dropped"] == {"code": "same_scores"} and len(dropped["completions"]) == 2
    assert "dropped" not in sent
    assert why["dropped"] == {"code": "set_aside", "why": "It was too old."}
    assert (why["id"], why["completions"]) == (sent["id"], [])


@pytest.mark.parametrize(
    ("limits", "setting"),
    [
        (TokenLimits(megabytes=0.0005), "env.rollout_tokens_mb"),
        (TokenLimits(groups=1), "env.rollout_token_groups"),
    ],
)
def test_what_is_left_out_of_a_row_is_said_in_it(
    limits: TokenLimits, setting: str, tmp_path: Path
) -> None:
    long = group([7] * 40)
    for life in range(2):  # a restarted environment goes on where the first was
        records = Records(str(tmp_path), TOKENIZER, token_limits=limits)
        for number in range(2):
            records.group(1, number, "item", {**long, "scores": [life + number / 2] * 40})
    records.dropped(1, 9, "item", group([9] * 40), "same_scores")
    first, *others = rows_of(tmp_path)
    assert has_tokens(first) and "left_out" not in first
    assert len(others) == 4 and not any(map(has_tokens, others))
    assert {row["left_out_by"] for row in others} == {setting}
    assert all("prompt_ids" not in row for row in others)
    texts_too = setting == "env.rollout_tokens_mb"
    assert others[-1]["left_out"] == ["tokens", "texts"][: 1 + texts_too]
    assert ("text" in others[-1]["completions"][0]) == (not texts_too)
    assert all("text" in row["completions"][0] for row in others[:-1])


def test_a_group_that_an_earlier_life_wrote_is_not_written_again(tmp_path: Path) -> None:
    for _ in range(2):
        records = Records(str(tmp_path), TOKENIZER)
        records.group(1, 0, "item", group([7, 9]))
        records.failed(1, 1, "item", [as_data(EnvironmentFailed("score raised."))])
    assert [row["group"] for row in rows_of(tmp_path)] == [0, 1]
    Records(str(tmp_path), TOKENIZER).group(1, 0, "other", group([9, 9]))
    assert len(rows_of(tmp_path)) == 3
