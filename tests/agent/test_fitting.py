"""No answer is long, whatever a call gives or an environment says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halteres.agent.answer_text import LONGEST, fitted
from halteres.agent.call import call
from halteres.agent.drafts import choose
from halteres.agent.tool import Caller


def length(body: Any) -> int:
    return len(json.dumps(body, ensure_ascii=False, separators=(",", ":")))


@pytest.fixture
def selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    choose(Caller(), None, "arithmetic", {})
    yield


@pytest.mark.parametrize(
    "body",
    [
        {"next": "x" * 100_000, "a": ["y" * 50] * 1000, "b": {str(n): n for n in range(5000)}},
        {"next": "x", "a": [["y"] * 300] * 300},
        {"next": "x", **{str(n): "z" * 700 for n in range(100)}},
        {"next": "x", "a": [[[[list(range(20))] * 20] * 20] * 8] * 8},
        {"next": "x", "a": "\u00e9\n" * 50_000},
    ],
)
def test_an_answer_of_any_length_is_made_to_fit_and_says_so(body: dict[str, Any]) -> None:
    told = fitted(body)
    assert length(told) <= LONGEST
    assert told.keys() == {*body, "shortened"}
    assert all(type(told[name]) is type(body[name]) for name in body), (
        "what is declared a list stays one"
    )


def test_a_short_answer_is_left_alone() -> None:
    body = {"next": "rl_list_runs()", "history": [{"step": 1}] * 20}
    assert fitted(body) == body


@pytest.mark.parametrize(
    ("tool", "arguments", "most"),
    [
        ("rl_edit_config", {"field": "system_prompt", "value": "x" * 200_000}, 2800),
        ("rl_edit_config", {"field": "group_size", "value": "x" * 200_000}, 2800),
        ("rl_edit_config", {"field": "x" * 5000, "value": 1}, 2800),
        ("rl_edit_config", {"changes": {f"unknown_{n}": n for n in range(2000)}}, 4000),
        ("rl_edit_config", {f"unknown_{n}": n for n in range(2000)}, 6000),
        ("rl_get_results", {"metrics": ["a"] * 3000}, 1400),
        ("rl_get_results", {"metrics": ["x" * 9000]}, 1400),
        ("rl_compare_runs", {"run_ids": ["a"], "metrics": ["x" * 9000]}, 1400),
        ("rl_select_environment", {"name": "x" * 5000}, 1400),
    ],
)
async def test_what_a_call_gives_is_not_told_back_at_length(
    selected: None, tool: str, arguments: dict[str, Any], most: int
) -> None:
    assert length((await call(tool, arguments, Caller())).body) <= most


async def test_a_value_that_is_short_is_told_as_it_is(selected: None) -> None:
    body = (
        await call("rl_edit_config", {"field": "system_prompt", "value": "Be brief."}, Caller())
    ).body
    assert (body["value"], body["config"]["system_prompt"]) == ("Be brief.", "Be brief.")


@pytest.mark.runs
async def test_a_long_setting_is_kept_whole_and_told_with_a_mark(selected: None) -> None:
    await call("rl_edit_config", {"field": "system_prompt", "value": "x" * 5000}, Caller())
    body = (await call("rl_edit_config", {"field": "group_size", "value": 8}, Caller())).body
    assert "characters left out" in body["config"]["system_prompt"]
    # a start measures the engine; this one is soon there
    changes = {"group_size": 4, "inference.engine": "scripted"}
    again = (await call("rl_start_training", {"dry_run": True, "changes": changes}, Caller())).body
    assert length(again) <= LONGEST


async def test_of_many_problems_the_first_are_told_and_all_are_counted(selected: None) -> None:
    body = (
        await call("rl_edit_config", {"changes": {f"unknown_{n}": n for n in range(50)}}, Caller())
    ).body
    assert (len(body["problems"]), body["num_problems"]) == (8, 50)
    assert "and 42 more" in body["error"]
