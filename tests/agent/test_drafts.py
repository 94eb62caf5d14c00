"""Drafts: one per handle, kept on disk, changed whole or not at all."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from halteres.agent import drafts
from halteres.agent.drafts import (
    Draft,
    NoEnvironment,
    choose,
    edited,
    editing,
    load_draft,
    save_draft,
)
from halteres.agent.tool import Caller
from halteres.config import program
from halteres.config.environ import for_child
from halteres.config.problem import UnknownField
from halteres.errors import InvalidConfig, NotReady, UserError

from .draft_fixtures import QUIZ, environment, refused, told

ME = Caller(draft="mine")


def select(environment: str, changes: Mapping[str, Any] | None = None) -> Draft:
    choose(ME, None, environment, changes or {})
    return load_draft(ME, None)


def edit(draft: Draft, changes: Mapping[str, Any]) -> Draft:
    return draft.with_edits_of(edited(ME, draft, changes))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


def test_a_draft_without_an_environment_says_so_in_the_seeds_words() -> None:
    with pytest.raises(
        NoEnvironment,
        match=r"^No environment selected\. Use rl_select_environment\(name\) first\.$",
    ):
        load_draft(ME, None).resolve()


def test_a_selection_is_named_after_the_environment_and_the_time() -> None:
    """Seed 002: wandb_name = {name}-%Y%m%d-%H%M%S."""
    draft = select("arithmetic")
    assert re.fullmatch(r"arithmetic-\d{8}-\d{6}", draft.name)
    assert draft.resolve().settings.run.name == draft.name
    other = edit(draft, {"wandb_name": "other"})
    assert other.resolve().settings.run.name == "other"


def test_edits_are_kept_by_their_whole_names_as_they_hold() -> None:
    draft = select("arithmetic", {"lora_rank": "8", "steps_per_eval": 5, "group_size": "8"})
    assert draft.changes == {"trainer.lora_rank": 8, "trainer.eval_every": 5, "env.group_size": 8}
    again = edit(draft, {"eval_every": 7, "trainer.lora_rank": 4})
    assert again.changes == {"env.group_size": 8, "trainer.eval_every": 7, "trainer.lora_rank": 4}


def test_selecting_again_discards_edits_and_tells_them() -> None:
    select("arithmetic", {"lora_rank": 8})
    again = choose(ME, None, "arithmetic", {})
    assert again.discarded == {"trainer.lora_rank": 8}
    assert load_draft(ME, None).changes == {}


def test_a_draft_outlives_the_process_that_made_it() -> None:
    script = (
        "from halteres.agent.drafts import choose\nfrom halteres.agent.call import Caller\n"
        "choose(Caller(draft='mine'), None, 'arithmetic', {'lora_rank': 8})"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=for_child(), timeout=60)
    assert load_draft(ME, None).resolve().settings.trainer.lora_rank == 8


async def test_two_agents_with_two_handles_never_meet(home: Path) -> None:
    environment(home, "quiz", QUIZ)
    await asyncio.gather(
        told("rl_select_environment", "one", name="arithmetic", changes={"lora_rank": 8}),
        told("rl_select_environment", "two", name="quiz", changes={"lora_rank": 4}),
    )
    by_caller = await told("rl_get_current_config", "one")
    by_argument = await told("rl_get_current_config", "one", draft="two")
    assert (by_caller["environment"], by_caller["draft"]) == ("arithmetic", "one")
    assert (by_argument["environment"], by_argument["draft"]) == ("quiz", "two")
    assert by_argument["next"] == 'rl_test_inference(draft="two")', (
        "the call works on the same draft"
    )
    await refused("rl_get_current_config", "three")


async def test_edits_made_at_once_are_all_kept() -> None:
    """An agent may send several calls in one message."""
    await told("rl_select_environment", name="arithmetic")
    changes = {"lora_rank": 8, "learning_rate": 1e-3, "eval_every": 5, "seed": 3, "total_steps": 9}
    await asyncio.gather(
        *(told("rl_edit_config", field=name, value=value) for name, value in changes.items())
    )
    kept = load_draft(ME, None).changes
    assert {key.rpartition(".")[2]: value for key, value in kept.items()} == changes


def test_nobody_changes_a_draft_while_somebody_else_does() -> None:
    inside, done = threading.Event(), threading.Event()
    select("arithmetic")

    def other() -> None:
        inside.set()
        select("arithmetic", {"lora_rank": 4})
        done.set()

    thread = threading.Thread(target=other)
    with editing(ME, None) as draft:
        thread.start()
        assert inside.wait(5)
        assert not done.is_set()
        save_draft(edit(draft, {"lora_rank": 8}))
    assert done.wait(20)
    thread.join()
    assert load_draft(ME, None).changes == {"trainer.lora_rank": 4}


def test_an_edit_waits_for_another_but_not_for_ever_and_says_who_has_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    select("arithmetic")
    monkeypatch.setattr(drafts, "WITHIN_S", 0.05)
    said = rf"The draft 'mine' is just being edited\. Process {os.getpid()} holds .*mine\.lock"
    with (
        ThreadPoolExecutor(1) as other,
        editing(ME, None),
        pytest.raises(NotReady, match=said),
    ):
        other.submit(select, "arithmetic").result(20)


def test_nobody_waits_while_an_environment_that_is_selected_describes_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take twenty seconds: the draft is free meanwhile."""
    environment(home, "quiz", QUIZ)
    select("arithmetic")
    asked, answer = threading.Event(), threading.Event()
    ask = program._ask

    def slowly(*given: Any) -> Any:
        asked.set()
        assert answer.wait(20)
        return ask(*given)

    monkeypatch.setattr(program, "_ask", slowly)
    with ThreadPoolExecutor(1) as other:
        selecting = other.submit(select, "quiz")
        assert asked.wait(20)
        try:
            with editing(ME, None) as draft:
                assert draft.environment == "arithmetic"
        finally:
            answer.set()
        assert selecting.result(20).environment == "quiz"


def test_a_refused_selection_or_edit_leaves_the_draft_as_it_was(home: Path) -> None:
    before = select("arithmetic", {"lora_rank": 8})
    environment(home, "ruin", "from x import BaseEnv\nclass Ruin(BaseEnv): ...\n1 / 0\n")
    for bad in (("nowhere", {}), ("ruin", {}), ("arithmetic", {"banana": 1})):
        with pytest.raises(UserError):
            select(*bad)
    assert load_draft(ME, None) == before


def test_one_setting_under_two_names_is_refused() -> None:
    draft = select("arithmetic")
    with pytest.raises(InvalidConfig, match="the same setting as eval_every"):
        edited(ME, draft, {"eval_every": 5, "steps_per_eval": 6})
    with pytest.raises(InvalidConfig, match="rl_select_environment selects another one"):
        edited(ME, draft, {"environment": "quiz"})


@pytest.mark.parametrize("handle", ["", "a/b", "../x", "a b", "x" * 65, "a\n"])
def test_a_handle_is_a_plain_word(handle: str) -> None:
    with pytest.raises(UserError, match="no handle of a draft"):
        load_draft(Caller(draft=handle), None)


def test_a_draft_that_cannot_be_read_counts_as_empty(home: Path) -> None:
    select("arithmetic")
    (home / "drafts" / "mine.json").write_text('{"handle": "mine", "changes": [')
    assert load_draft(ME, None) == Draft(handle="mine")
    assert choose(ME, None, "arithmetic", {}).discarded == {}


def test_a_disk_that_will_not_have_it_is_told(home: Path) -> None:
    (home / "drafts").write_text("no folder")
    with pytest.raises(drafts.DraftNotStored, match="cannot be kept in"):
        select("arithmetic")


def test_an_edit_that_the_file_no_longer_knows_is_told(home: Path) -> None:
    file = environment(home, "quiz", QUIZ)
    draft = select("quiz", {"level": 5})
    file.write_text(file.read_text().replace("level", "grade"))
    with pytest.raises(UnknownField, match=r"Unknown field 'env\.level'"):
        draft.resolve()


@pytest.mark.parametrize("handle", [".", ".."])
def test_the_name_of_a_folder_is_no_handle(handle: str) -> None:
    with pytest.raises(UserError, match="no handle of a draft"):
        load_draft(ME, handle)
