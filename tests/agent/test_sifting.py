"""Edits that a draft was given once and can have no more: set aside and told, and the draft goes
on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halteres.agent.drafts import load_draft, save_draft
from halteres.agent.tool import Caller

from .draft_fixtures import refused, told

ME = Caller(draft="mine")
RATE = "trainer.learning_rate"
KEPT = {"trainer.lora_rank": 4, "inference.engine": "scripted"}
"""A start measures the engine; this one is soon there."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
async def locked(home: Path) -> None:
    """A draft with two edits, one of which the operator has locked since."""
    await told("rl_select_environment", name="arithmetic", changes={"learning_rate": 0.002, **KEPT})
    (home / "policy.yaml").write_text("lock: {trainer: {learning_rate: 4.0e-5}}\n")


async def test_a_setting_locked_since_is_set_aside_and_told_once(locked: None) -> None:
    answer = await told("rl_get_current_config")
    assert answer["discarded_edits"] == {RATE: 0.002}
    assert load_draft(ME, None).changes == KEPT
    assert "discarded_edits" not in await told("rl_get_current_config")


async def test_another_setting_can_still_be_edited(locked: None) -> None:
    answer = await told("rl_edit_config", field="lora_rank", value=8)
    assert (answer["value"], answer["discarded_edits"]) == (8, {RATE: 0.002})


@pytest.mark.runs
async def test_a_start_is_told_of_it_too(locked: None) -> None:
    answer = await told("rl_start_training", dry_run=True)
    assert answer["discarded_edits"] == {RATE: 0.002}
    await told("rl_start_training", dry_run=True)


@pytest.mark.runs
async def test_a_start_with_changes_is_told_of_it_too(locked: None) -> None:
    answer = await told("rl_start_training", dry_run=True, changes={"lora_rank": 8})
    assert answer["discarded_edits"] == {RATE: 0.002}


async def test_a_test_goes_on_without_it(locked: None) -> None:
    answer = await told("rl_test_inference", num_steps=1, group_size=1, wait_s=0)
    assert answer["discarded_edits"] == {RATE: 0.002}


async def test_settings_that_are_no_more_are_set_aside(home: Path) -> None:
    draft_of = {"trainer.nonsense": 3, "env.difficulty_of_old": 1, "trainer.lora_rank": 4}
    await told("rl_select_environment", name="arithmetic")
    save_draft(replace(load_draft(ME, None), changes=draft_of))
    answer = await told("rl_get_current_config")
    assert answer["discarded_edits"] == {"trainer.nonsense": 3, "env.difficulty_of_old": 1}
    assert load_draft(ME, None).changes == {"trainer.lora_rank": 4}


async def test_an_edit_that_the_policy_locks_now_is_refused_as_ever(locked: None) -> None:
    answer = await refused("rl_edit_config", field="learning_rate", value=0.1)
    assert answer["code"] == "locked_field"


async def test_a_value_that_is_only_above_a_cap_is_not_set_aside(home: Path) -> None:
    await told("rl_select_environment", name="arithmetic", changes={"total_steps": 40})
    (home / "policy.yaml").write_text("caps: {max_steps: 15}\n")
    answer = await refused("rl_get_current_config")
    assert answer["code"] == "policy_cap"
    assert load_draft(ME, None).changes == {"trainer.total_steps": 40}
