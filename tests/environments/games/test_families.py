"""GEM's ids beside the games: each is answered with what to use."""

from __future__ import annotations

import importlib

import pytest

from halteres.config.discovery import find_environment
from halteres.config.gem_ids import OTHER_FAMILIES, family_of
from halteres.environments.games import IDS, make
from halteres.errors import InvalidConfig, NotFound


@pytest.mark.parametrize(
    ("id", "instead"),
    [
        ("rg:chain_sum", "Use the environment reasoning_gym with env.task='chain_sum'."),
        ("math:GSM8K", "gsm8k_tinker"),
        ("math:ASDiv2K", "env.dataset"),
        ("math:Math12K", "environment of your own"),
        ("code:CodeContest", "PythonTool"),
        ("qa:HotpotQA", "environment of your own"),
        ("logic:RuleTaker-d0", "reasoning_gym"),
        ("eval:CodeContest", "PythonTool"),
        ("eval:AIME24", "rl_evaluate"),
        ("game:Crosswords-v0-easy", "game:WordSearch-v1-easy"),
        ("game:WikiGame-v0-hard", "needs none"),
    ],
)
def test_an_id_of_another_family_says_what_to_use(id: str, instead: str) -> None:
    for asked_for in (make, find_environment):
        with pytest.raises(
            InvalidConfig, match=f"(?s){id} is no game.*{instead.replace('(', '.')}"
        ):
            asked_for(id)


def test_games_are_native_and_other_names_are_unknown() -> None:
    assert all(
        family_of(id) == next(one for one in OTHER_FAMILIES if one.prefix == "game:") for id in IDS
    )
    assert family_of("chess") is None
    with pytest.raises(NotFound, match="'game:Wordle-v0-easy'"):
        make("Wordle-v0-easy")


def test_the_environments_that_stand_in_exist() -> None:
    modules = {"reasoning_gym": "reasoning_gym_tasks", "gsm8k_tinker": "gsm8k_tinker"}
    for family in OTHER_FAMILIES:
        assert (family.kind == "adapter") == (family.environment is not None)
        if family.environment:
            importlib.import_module(f"halteres.environments.{modules[family.environment]}")
