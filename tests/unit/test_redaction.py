"""What is struck out of answers, pages and files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halteres.redaction import Redactor

KEY = "sk-6f1e8d0c9b2a"


@pytest.mark.parametrize(
    "shown",
    [
        {"config": {"judge_api_key": KEY}},
        {"config": {"env.judge_api_key": [KEY, KEY]}},
        {"settings_that_differ": {"env.judge_api_key": {"aaaa1111": KEY, "bbbb2222": None}}},
        {
            "configurable_fields": [
                {"name": "env.judge_api_key", "default": "x", "current_value": KEY}
            ]
        },
        {"message": f"Updated judge_api_key = {KEY}", "field": "judge_api_key", "value": KEY},
        {"problems": [{"field": "env.judge_api_key", "got": {"now": KEY}}]},
        {"settings": [{"name": "env.judge_api_key", "value": KEY, "source": "edit"}]},
        {"openai": [{"api_key": KEY}], "next": f"rl_edit_config(judge_api_key={KEY})"},
    ],
)
def test_a_setting_named_like_a_secret_is_shown_nowhere(shown: dict[str, Any]) -> None:
    told = json.dumps(Redactor([]).json(shown))
    assert KEY not in told
    assert "***" in told


def test_what_is_no_secret_stays() -> None:
    shown = {
        "api_key": "",
        "tokens": "many words",
        "item": {"token": "Berlin1"},
        "completion": "It is Berlin1.",
    }
    assert Redactor([]).json(shown) == shown


def test_a_name_that_only_ends_like_a_secrets_garbles_no_text() -> None:
    shown = {
        "config": {
            "env.eos_token": "<|im_end|>",
            "answer_key": "final_answer_of_the_task",
            "key": "question",
        },
        "metrics": {"loss_per_token": 0.25, "max_token": 64},
        "completion": "The final_answer_of_the_task is a question.<|im_end|>",
    }
    assert Redactor([]).json(shown) == shown
    words = {"judge_token": "please", "completion": "please judge"}
    assert Redactor([]).json(words) == {"judge_token": "***", "completion": "please judge"}


@pytest.mark.parametrize("value", ["12345", 123456789, ["ab", "cd"], "x"])
def test_a_setting_named_like_a_secret_is_struck_out_in_its_place_however_short(value: Any) -> None:
    told = Redactor([]).json(
        {"env": {"judge_key": value}, "settings": [{"name": "env.judge_key", "value": value}]}
    )
    blank = ["***", "***"] if isinstance(value, list) else "***"
    assert told == {
        "env": {"judge_key": blank},
        "settings": [{"name": "env.judge_key", "value": blank}],
    }
