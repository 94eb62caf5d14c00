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
        {"configurable_fields": [{"name": "env.judge_api_key", "default": "x", "current_value": KEY}]},
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
    shown = {"api_key": "x", "tokens": "many words", "item": {"answer_key": "Berlin"}, "completion": "It is Berlin."}
    assert Redactor([]).json(shown) == shown
