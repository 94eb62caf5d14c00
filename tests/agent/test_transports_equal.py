"""The same call has the same answer, through whatever transport it comes."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from halteres.agent.table import BY_NAME
from halteres.runs.directory import runs_home

from .run_results import add_group, completion, trained
from .transports import TRANSPORTS, Answer, Transport, home_of

pytestmark = pytest.mark.runs

Calls = tuple[tuple[str, dict[str, Any]], ...]

WITHOUT_A_RUN: Calls = (
    ("rl_health_check", {}),
    ("rl_list_environments", {}),
    ("rl_list_environments", {"query": "arithmetic", "refresh": True}),
    ("rl_get_current_config", {}),  # nothing is selected yet
    ("rl_edit_config", {"field": "group_size", "value": 16}),
    ("rl_test_inference", {}),
    ("rl_select_environment", {}),
    ("rl_select_environment", {"name": "arithmetik"}),
    ("rl_select_environment", {"name": "arithmetic"}),
    ("rl_get_current_config", {}),
    ("rl_get_current_config", {"detail": "full"}),
    ("rl_get_current_config", {"field": "group_size"}),
    ("rl_get_current_config", {"detail": "everything"}),
    ("rl_edit_config", {"field": "group_size", "value": 16}),
    ("rl_edit_config", {"field": "group_size", "value": "banana"}),
    ("rl_edit_config", {"field": "grop_size", "value": 16}),
    ("rl_edit_config", {"changes": {"total_steps": 7, "learning_rate": 0.001}}),
    ("rl_edit_config", {"changes": {"total_steps": 9, "learning_rate": "fast"}}),
    ("rl_edit_config", {"field": "group_size", "value": None}),
    ("rl_select_environment", {"name": "arithmetic", "changes": {"total_steps": 3}}),
    ("rl_score", {"environment": "nowhere", "completions": ["x"]}),
    ("rl_score", {"completions": ["", "x"]}),
    ("rl_score", {"completions": []}),
    ("rl_start_training", {"environment": "nowhere"}),
    ("rl_start_training", {"resume_from": "nowhere"}),
    ("rl_list_runs", {}),
    ("rl_list_runs", {"status": "", "limit": 5}),  # an empty text is one that was not given
    ("rl_list_runs", {"limit": 0}),
    ("rl_check_status", {}),
    ("rl_check_status", {"run_id": "abc12345"}),
    ("rl_check_status", {"run_id": "abc12345", "wait_s": 99}),
    ("rl_check_status", {"run": "abc12345"}),
    ("rl_stop_training", {"run_id": "abc12345"}),
    ("rl_get_results", {"run_id": "abc12345", "plot": True}),
    ("rl_evaluate", {"run_id": "abc12345"}),
    ("rl_evaluate", {"evaluation_id": "e-00000000"}),
    ("rl_get_logs", {"run_id": "abc12345"}),
    ("rl_get_rollouts", {"run_id": "../.."}),
    ("rl_compare_runs", {"run_ids": ["abc12345", "def67890"]}),
    ("rl_compare_runs", {"run_ids": []}),
    ("rl_list_reward_models", {}),
    ("rl_train_reward_model", {"data": "/nowhere/pairs.jsonl", "dry_run": True}),
    ("rl_train_reward_model", {"data": "x", "settings": {"learning_rat": 1.0}}),
    ("rl_evaluate_reward_model", {"model": "/nowhere", "data": "/nowhere/pairs.jsonl"}),
    ("rl_rank_completions", {"evaluation_id": "r-00000000"}),
    ("rl_open_session", {"run_id": "abc12345", "pin_policy": True}),
    ("rl_open_session", {"service": "nowhere", "pin_policy": 3}),
    ("rl_post_reward", {"session": "s-1", "reward": 1, "run_id": "abc12345"}),
    ("rl_post_reward", {"session": "../s-1", "rewards": {"right": 1.0}}),
    ("rl_do_what_i_mean", {"now": True}),
)

WITH_TWO_RUNS: Calls = (
    ("rl_list_runs", {}),
    ("rl_check_status", {"run_id": "3fa9", "wait_s": 1.0, "until": "terminal"}),
    ("rl_stop_training", {"run_id": "3fa9c1d2"}),
    ("rl_get_results", {"run_id": "3fa9c1d2", "points": 4, "plot": True}),
    ("rl_get_results", {"run_id": "3fa9c1d2", "metrics": ["reward/mean"]}),
    ("rl_get_logs", {"run_id": "3fa9c1d2", "role": "trainer", "lines": 2}),
    ("rl_get_logs", {"run_id": "3fa9c1d2", "role": "../trainer"}),
    ("rl_get_rollouts", {"run_id": "3fa9c1d2", "which": "best", "n": 1}),
    ("rl_compare_runs", {"run_ids": ["3fa9c1d2", "4b2e7f00"]}),
)

CALLS = WITHOUT_A_RUN + WITH_TWO_RUNS

VOLATILE = {"draft", "free_gb"}
"""Keys whose value may differ: each transport works on a draft of its own here, and the machine has
other work.
"""

SELECTED_AT = re.compile(r"-\d{8}-\d{6}$")
"""What the seeds append to an environment's name at selection."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Answer]]:
    """What Python says, in a home that all transports then share: their answers hold its path."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        home_of(tmp_path_factory.mktemp("home"), monkeypatch)
        yield asyncio.run(transcript(TRANSPORTS["python"], "one", monkeypatch))


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if name != "python"])
async def test_a_transport_answers_as_python_does(
    name: str, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await transcript(TRANSPORTS[name], f"another-{name.replace(' ', '-')}", monkeypatch)
    for call, ours, theirs in zip(CALLS, expected, told, strict=True):
        assert theirs == ours, f"{call} differs"


def test_an_answer_says_what_to_do_next_and_an_error_what_went_wrong(
    expected: list[Answer],
) -> None:
    for call, answer in zip(CALLS, expected, strict=True):
        assert answer["next"], f"{call} says nothing to do next"
        assert "\n" not in answer["next"]
        assert list(answer)[-1] == "next"
        assert answer.get("code") != "internal", f"{call}: {answer['error']}"
        assert ("error" in answer) == ("code" in answer)


def test_a_success_fits_the_schema_that_was_promised(expected: list[Answer]) -> None:
    """MCP clients refuse one that does not; errors are exempt."""
    fitting = [
        (name, answer)
        for (name, _), answer in zip(CALLS, expected, strict=True)
        if "error" not in answer
    ]
    of_models = {"rl_train_reward_model", "rl_evaluate_reward_model", "rl_rank_completions"}
    of_models |= {"rl_test_inference", "rl_start_training", "rl_evaluate"}
    # test_gateway_sessions has theirs
    of_models |= {"rl_open_session", "rl_post_reward"}
    assert {name for name, _ in fitting} == set(BY_NAME) - of_models
    for name, answer in fitting:
        jsonschema.validate(answer, BY_NAME[name].output_schema())


async def transcript(
    transport: Transport, draft: str, monkeypatch: pytest.MonkeyPatch
) -> list[Answer]:
    """The answers to CALLS, one after the other, on a draft of this name."""
    monkeypatch.setenv("HALTERES_SESSION", draft)
    async with transport() as call:
        before = [await call(name, dict(arguments)) for name, arguments in WITHOUT_A_RUN]
        make_runs()
        after = [await call(name, dict(arguments)) for name, arguments in WITH_TWO_RUNS]
    shutil.rmtree(runs_home())
    return [steady(answer) for answer in before + after]


def make_runs() -> None:
    """Two runs that have ended, the same every time."""
    for run_id, skill in (("3fa9c1d2", 0.3), ("4b2e7f00", 0.1)):
        run = trained(
            run_id, steps=20, skill=skill, created_at=1.7e9, started_at=1.7e9, ended_at=1.7e9 + 60
        )
        run.log("trainer").write_text("first\nlast\n")
        add_group(run, 20, completion("42", 1.0), completion("41"))


def _masked(value: Any) -> Any:
    """Of the same type, as the schema has it."""
    return 0 if isinstance(value, int | float) else "..."


def steady(value: Any) -> Any:
    """An answer without what may differ."""
    if isinstance(value, dict):
        return {
            name: _masked(item) if name in VOLATILE else steady(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [steady(item) for item in value]
    return SELECTED_AT.sub("-<time>", value) if isinstance(value, str) else value
