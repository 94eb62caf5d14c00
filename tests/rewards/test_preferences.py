"""Preference data: every format is read, and what cannot be used is told with the numbers of its
rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from halteres.errors import InvalidConfig, InvalidData
from halteres.rewards.preferences import MarginFrom, hold_out, overlap, read_preferences

ULTRAFEEDBACK = Path(__file__).parent / "data" / "ultrafeedback_shape.jsonl"
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKED, RIGHT, WRONG = said("user", "2 + 2?"), said("assistant", "4"), said("assistant", "5")


def refusal(rows: list[Any], **options: Any) -> InvalidData:
    with pytest.raises(InvalidData) as raised:
        read_preferences(rows, **options)
    return raised.value


@pytest.mark.parametrize(
    ("row", "prompt", "completions"),
    [
        ({"chosen": "2 + 2? 4", "rejected": "2 + 2? 5"}, None, ("2 + 2? 4", "2 + 2? 5")),
        (PAIR, "2 + 2?", ("4", "5")),
        (
            {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
            None,
            ((ASKED, RIGHT), (ASKED, WRONG)),
        ),
        (
            {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
            (ASKED,),
            ((RIGHT,), (WRONG,)),
        ),
        ({"chosen_ids": [5, 6], "rejected_ids": [5, 7]}, None, ((5, 6), (5, 7))),
        ({"chosen_input_ids": [5, 6], "rejected_input_ids": [5, 7]}, None, ((5, 6), (5, 7))),
    ],
    ids=[
        "standard, implicit",
        "standard",
        "messages, implicit",
        "messages",
        "tokens",
        "tokens, older names",
    ],
)
def test_all_five_formats_of_a_pair_are_read(
    row: Mapping[str, Any], prompt: Any, completions: Any
) -> None:
    (one,) = read_preferences([row]).comparisons
    assert (one.prompt, one.completions, one.ranks, one.row) == (prompt, completions, (0, 1), 1)


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        ({"completions": ["a", "b", "c"], "ranks": [3, 1, 2]}, (2, 0, 1)),
        ({"completions": ["a", "b", "c"], "ranks": [1, 1, 5]}, (0, 0, 1)),
        ({"completions": ["a", "b", "c"], "scores": [0.5, 0.1, 0.9]}, (1, 2, 0)),
        ({"completions": [[RIGHT], [WRONG]], "scores": [1, 0], "prompt": [ASKED]}, (0, 1)),
        ({"chosen": ["a", "b"], "rejected": ["c"]}, (0, 0, 1)),
        (
            {
                "chosen": [[ASKED, RIGHT]],
                "rejected": [[ASKED, WRONG], [ASKED, said("assistant", "6")]],
            },
            (0, 1, 1),
        ),
        ({**PAIR, "tie": True}, (0, 0)),
    ],
)
def test_groups_are_ranked_from_zero_and_equal_ranks_are_ties(
    row: Mapping[str, Any], ranks: Any
) -> None:
    (one,) = read_preferences([row]).comparisons
    assert one.ranks == ranks


def test_everything_beside_the_texts_is_kept() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    row = {
        "prompt": [ASKED],
        "chosen": [{**RIGHT, "tool_calls": None}],
        "rejected": [WRONG],
        "margin": 0.5,
        "weight": 2,
        "subset": "sums",
        "tools": json.dumps([tool]),
        "chat_template_kwargs": {"enable_thinking": False, "style": None},
        "id": 7,
        "written_by": "nobody",
    }
    (one,) = read_preferences([row]).comparisons
    assert (one.margin, one.weight, one.kind, one.tools, one.id) == (0.5, 2.0, "sums", (tool,), "7")
    assert one.template_arguments == {"enable_thinking": False}
    assert one.completions[0] == (RIGHT,)  # a table gives every message the fields of all


def test_a_margin_is_made_of_two_columns_on_request_alone() -> None:
    plain, made = (
        read_preferences(ULTRAFEEDBACK, margin_from=by) for by in (None, MarginFrom(scale=0.5))
    )
    assert {one.margin for one in plain.comparisons} == {0.0}
    assert made.comparisons[1].margin == 0.5 * (8.5 - 3.5)
    assert "'score_chosen' is missing" in str(refusal([PAIR], margin_from=MarginFrom()))


def test_the_shape_of_ultrafeedback_is_read() -> None:
    found = read_preferences(ULTRAFEEDBACK)
    assert (len(found.comparisons), found.form, found.source) == (
        20,
        "conversational",
        "ultrafeedback_shape.jsonl",
    )
    assert [message["role"] for message in found.comparisons[0].completions[0]] == [
        "user",
        "assistant",
    ]  # type: ignore[index]
    assert not found.warnings and len(found.digest) == 64


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, "'rejected' is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "'rejected' is null"),
        (
            {"chosen": "b", "rejected": 4},
            "'rejected' is a number, not a string or a list of messages",
        ),
        ({"chosen": "b", "rejected": " \n"}, "'rejected' is empty"),
        ({"chosen": [], "rejected": [ASKED, WRONG]}, "'chosen' is empty"),
        (
            {"chosen": [ASKED, said("assistant", "")], "rejected": [ASKED, WRONG]},
            "the last message of 'chosen' is empty",
        ),
        (
            {"chosen": [ASKED], "rejected": [ASKED, WRONG]},
            "the last message of 'chosen' is not the assistant's",
        ),
        ({"chosen": [{"text": "4"}], "rejected": [WRONG]}, "a message of 'chosen' has no 'role'"),
        (
            {"prompt": "2 + 2?", "chosen": [RIGHT], "rejected": [WRONG]},
            "a string and a list of messages are mixed",
        ),
        ({"chosen": "4", "rejected": [WRONG]}, "standard and conversational completions are mixed"),
        ({**PAIR, "rejected": "4"}, "the completions are identical"),
        ({**PAIR, "margin": float("nan")}, "'margin' is not finite"),
        ({**PAIR, "margin": 10**400}, "'margin' is not finite"),
        ({**PAIR, "margin": "1"}, "'margin' is a string, not a number"),
        ({**PAIR, "weight": -1}, "'weight' is negative"),
        (
            {**PAIR, "objective": "correctness"},
            "the objective 'correctness' has the name of another metric",
        ),
        (
            {**PAIR, "objective": "out_of_range"},
            "the objective 'out_of_range' has the name of another metric",
        ),
        ({**PAIR, "kind": 3}, "'kind' is a number, not a string"),
        ({**PAIR, "tie": "yes"}, "'tie' is a string, not a truth value"),
        ({**PAIR, "tools": "[{"}, "'tools' is not JSON"),
        (
            {**PAIR, "tools": '[{"a": 1, "a": 2}]'},
            "'tools' is not JSON that can be read (line 1, c",
        ),
        (
            {"prompt": [ASKED], "chosen": [{"role": "assistant"}], "rejected": [WRONG]},
            "a message of 'chosen' has no 'content'",
        ),
        (
            {"prompt": [{"role": "user"}], "chosen": [RIGHT], "rejected": [WRONG]},
            "a message of 'prompt' has no 'content'",
        ),
        ({**PAIR, "chosen": "4\ud83d"}, "'chosen' holds half of a surrogate pair"),
        ({"chosen_ids": [1, 2]}, "'rejected_ids' is missing"),
        ({"chosen_ids": [1, 2.5], "rejected_ids": [1]}, "'chosen_ids' is not a list of token ids"),
        ({"completions": ["a", "b"]}, "'completions' has neither 'ranks' nor 'scores'"),
        ({"completions": ["a"], "ranks": [0]}, "'completions' is not a list of two or more"),
        (
            {"completions": ["a", "b"], "ranks": [0, 1, 2]},
            "'ranks' is not a list of as many finite numbers",
        ),
        (
            {"completions": ["a", "b", "c"], "ranks": [0, 1, 2], "margin": 1.0},
            "'tie' and 'margin' are for two completions",
        ),
        ("a text", "is not a JSON object"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row: Any, problem: str) -> None:
    error = refusal([row])
    assert error.what == "data cannot be used: 1 of 1 rows are wrong."
    assert f"data row 1: {problem}" in error.why


def test_forms_are_not_mixed_between_rows() -> None:
    rows = [
        PAIR,
        {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen_ids": [1], "rejected_ids": [2]},
    ]
    error = refusal(rows)
    assert "data row 2: is conversational, while row 1 is standard" in error.why
    assert "data row 3: is pre-tokenised, while row 1 is standard" in error.why


def test_a_problem_is_told_once_with_its_first_ten_rows(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    lines = (
        [json.dumps(PAIR)]
        + ['{"prompt": "a", "chosen": "b"}'] * 13
        + ["", "{", json.dumps({**PAIR, "weight": -1})]
    )
    file.write_text("\n".join(lines))
    with pytest.raises(InvalidData) as raised:
        read_preferences(file)
    error = raised.value
    assert error.what == "train.jsonl cannot be used: 15 of 16 rows are wrong."
    assert (
        "train.jsonl rows 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more: 'rejected' is missing."
        in error.why
    )
    assert "train.jsonl row 16: is not JSON that can be read (line 16, column 2: " in error.why
    assert "). train.jsonl row 17: 'weight' is negative." in error.why
    assert error.details["problems"][0]["count"] == 13


@pytest.mark.parametrize(
    ("policy", "ranks", "warnings"),
    [("tie", [(0, 0), (0, 1)], 0), ("drop", [(0, 1)], 1)],
)
def test_identical_completions_become_a_tie_or_are_dropped_on_request(
    policy: Any, ranks: Any, warnings: int
) -> None:
    found = read_preferences([{**PAIR, "rejected": "4"}, PAIR], on_identical=policy)
    assert [one.ranks for one in found.comparisons] == ranks
    assert len(found.warnings) == warnings
    group = {"completions": ["a", "b", "a"], "ranks": [0, 1, 2]}
    if policy == "tie":
        assert read_preferences([group], on_identical="tie").comparisons[0].ranks == (0, 1, 0)


PARTS = [{"type": "text", "text": "It is "}, {"type": "text", "text": "4."}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://example.org/four.png"}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (PARTS, "It is 4."),
        ([{"text": "It is 4."}], "It is 4."),
        ([{"type": "output_text", "text": "It is 4."}], "It is 4."),
        ([{"type": "text", "text": "It is 4.", "image_url": None}], "It is 4."),
        ({"type": "text", "text": "It is 4."}, "It is 4."),
        ([{"type": "refusal", "refusal": "No."}], "No."),
    ],
)
def test_content_in_parts_is_read_as_their_text(content: Any, text: str) -> None:
    rows = [
        {
            "prompt": [ASKED],
            "chosen": [{"role": "assistant", "content": content}],
            "rejected": [WRONG],
        }
    ]
    rows.append({**rows[0], "prompt": [{"role": "user", "content": content}]})
    first, second = read_preferences(rows).comparisons
    assert first.completions[0] == (said("assistant", text),)
    assert second.prompt == (said("user", text),)


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "input_audio"},
        {"type": "text", "text": 4},
        {"type": "text"},
        "4",
        4,
        None,
        ["4"],
    ],
)
@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
def test_a_part_that_is_no_text_is_refused_by_its_row(part: Any, column: str) -> None:
    row: dict[str, Any] = {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}
    (message,) = row[column]
    bad = {**row, column: [{**message, "content": [{"type": "text", "text": "so"}, part]}]}
    error = refusal([row, bad])
    assert [one["rows"] for one in error.details["problems"]] == [[2]]
    assert f"'{column}'" in error.why


def test_content_that_is_null_stays_so_next_to_calls_and_is_empty_elsewhere() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
    }
    row = {"prompt": [ASKED, call], "chosen": [RIGHT], "rejected": [WRONG]}
    (one,) = read_preferences([row]).comparisons
    assert one.prompt == (ASKED, call)
    error = refusal([{**row, "chosen": [{"role": "assistant", "content": None}]}])
    assert "the last message of 'chosen' is empty" in error.why


def test_half_of_a_surrogate_pair_is_refused_wherever_a_message_holds_it() -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": "\ud83d"}}],
    }
    error = refusal([{"prompt": [ASKED], "chosen": [RIGHT], "rejected": [call]}])
    assert "half of a surrogate pair" in error.why


@pytest.mark.parametrize(
    "row",
    [
        {"question": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"system": "Be brief.", "Question": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"instruction": "Add.", "input": "2 + 2", "completions": ["4", "5"], "ranks": [0, 1]},
        {"question": "2 + 2?", "completions": ["2 + 2 is", "4."], "labels": [True, True]},
        {"question": "2 + 2?", "chosen": [RIGHT], "rejected": [WRONG]},
        {"messages": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}], "chosen": "4", "rejected": "5"},
        {"history": ["1 + 1?", "2"], "chosen": "4", "rejected": "5"},
    ],
)
def test_a_prompt_in_a_column_that_is_not_read_is_refused(row: Any) -> None:
    """TRL drops such columns, and trains on answers alone."""
    error = refusal([row])
    (problem,) = error.details["problems"]
    assert problem["rows"] == [1] and "not read" in problem["problem"]


@pytest.mark.parametrize(
    "row",
    [
        {**PAIR, "system": "Be brief."},
        {"system": "Be brief.", "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
        {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG], "context": "sums"},
    ],
)
def test_a_part_of_a_prompt_that_is_not_read_is_warned_of(row: Any) -> None:
    (warning,) = read_preferences([row, {**row, "weight": 2.0, "kind": "again"}]).warnings[:1]
    assert "rows 1, 2" in warning and "not read" in warning


@pytest.mark.parametrize(
    "row",
    [
        {
            "question": "2 + 2?",
            "chosen": "Human: 2  +\n2? Assistant: 4",
            "rejected": "Human: 2 + 2? Assistant: 5",
        },
        {**PAIR, "question": "2 + 2?", "input": "", "system": None, "history": []},
        {**PAIR, "source": "a data set", "task_id": "t7", "written_by": "a person"},
        {"messages": [ASKED, RIGHT], "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
        {"context": 7, "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
    ],
)
def test_columns_that_hold_no_other_prompt_are_left_alone(row: Any) -> None:
    assert read_preferences([row]).warnings == ()


def test_a_prompts_tokens_are_the_first_of_each_side() -> None:
    pair = {"chosen_ids": [30, 31, 5], "rejected_ids": [30, 31, 6]}
    assert read_preferences([{**pair, "prompt_ids": [30, 31]}]).comparisons[0].completions[0] == (
        30,
        31,
        5,
    )
    error = refusal(
        [{**pair, "prompt_ids": [30, 32]}, {"prompt_input_ids": [30], **pair, "chosen_ids": [5]}]
    )
    assert [one["rows"] for one in error.details["problems"]] == [[1], [2]]


SYSTEM = said("system", "Be brief.")


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ([ASKED], [ASKED, RIGHT], [ASKED, WRONG]),
        ([ASKED], [RIGHT], [ASKED, WRONG]),
        ([SYSTEM, ASKED], [ASKED, RIGHT], [ASKED, WRONG]),
        ([ASKED], [SYSTEM, ASKED, RIGHT], [SYSTEM, ASKED, WRONG]),
        ([SYSTEM], [SYSTEM, ASKED, RIGHT], [SYSTEM, ASKED, WRONG]),
        ([ASKED, RIGHT], [ASKED, RIGHT, ASKED, RIGHT], [ASKED, RIGHT, ASKED, WRONG]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "2 + 2? "}]}],
            [ASKED, RIGHT],
            [ASKED, WRONG],
        ),
    ],
)
def test_completions_that_hold_the_prompt_are_refused(
    prompt: Any, chosen: Any, rejected: Any
) -> None:
    error = refusal([{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
    assert [one["rows"] for one in error.details["problems"]] == [[1]]


def test_a_prompt_that_is_asked_again_later_is_read() -> None:
    before = [said("user", "1 + 1?"), said("assistant", "2")]
    rows: list[Any] = [
        ([SYSTEM], [ASKED, RIGHT]),
        (before, [ASKED, RIGHT]),
        ([ASKED], [WRONG, ASKED, RIGHT]),
    ]
    for prompt, chosen in rows:
        row = {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": [*chosen[:-1], said("assistant", "6")],
        }
        assert read_preferences([row]).warnings == ()


def test_strings_that_begin_with_their_prompt_are_warned_of() -> None:
    row = {"prompt": "2 + 2? ", "chosen": "2 + 2? 4", "rejected": "2 + 2? 5"}
    (warning,) = read_preferences([row, {**PAIR, "prompt": "3 + 1?"}]).warnings
    assert "row 1:" in warning and "twice" in warning


def test_repeated_rows_are_told() -> None:
    assert read_preferences([PAIR, PAIR, {**PAIR, "chosen": "four"}]).warnings == (
        "data row 2: the same as a row before.",
    )


def rows_of_prompts(count: int) -> list[dict[str, Any]]:
    return [{**PAIR, "prompt": f"{n // 2} + 1?", "chosen": f"{n}."} for n in range(2 * count)]


def test_no_prompt_is_on_both_sides_of_a_split() -> None:
    whole = read_preferences(rows_of_prompts(50))
    train, held_out = hold_out(whole, 0.1)
    assert (len(train.comparisons), len(held_out.comparisons)) == (90, 10)
    assert overlap(train, held_out) == ""
    assert len({whole.digest, train.digest, held_out.digest}) == 3
    assert hold_out(whole, 0.1) == (train, held_out)
    assert hold_out(whole, 0.1, seed=1) != (train, held_out)
    assert overlap(train, whole).startswith("data rows ")
    with pytest.raises(InvalidConfig, match="1 prompts, of which 0"):
        hold_out(read_preferences([PAIR]))


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
        {"chosen": "Human: 2 + 2?\nAssistant: 4", "rejected": "Human: 2 + 2?\nAssistant: 5"},
    ],
)
def test_a_prompt_inside_the_completions_is_a_prompt(row: Mapping[str, Any]) -> None:
    other = json.loads(json.dumps(row).replace("5", "7"))
    first, second = read_preferences([row, other]).comparisons
    assert first.prompt_key == second.prompt_key
    assert (
        first.prompt_key
        != read_preferences([json.loads(json.dumps(row).replace("2 +", "3 +"))])
        .comparisons[0]
        .prompt_key
    )
