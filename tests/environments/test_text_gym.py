"""Text environments of other packages, each in a process of its own, by another Python where it
needs one.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from halteres.environments.scored import rollouts_of
from halteres.environments.text_gym import TextGymEnv
from halteres.errors import InvalidConfig

from .fakes import Inference
from .test_multi_turn import made, settled

PACKAGE = '''"""Draws from the process's own generator, as GEM does."""
import os, random

class Guess:
    def __init__(self, id, most=9):
        assert id == "guess-v0", f"no environment {id}"
        self.most = most

    def reset(self, seed=None):
        random.seed(seed)
        self.turns = 0
        return f"Guess, up to {self.most}.", {"suffix": "Your guess?"}

    def step(self, action):
        self.turns += 1
        number = random.randint(0, self.most)
        if action == "die":
            os._exit(3)
        if action == "raise":
            raise RuntimeError("the board is broken")
        print("noise of the package")
        return f"It was {number}.", 0.5, self.turns == 3, self.turns == 2 and action == "cut", {"suffix": "Again?"}

make = Guess

def numbers(id):
    return type("Numbers", (), {"reset": lambda self, seed=None: (7, {})})()
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that only another Python finds: a script that adds its folder."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "guessing.py").write_text(PACKAGE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "other"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@asynccontextmanager
async def playing(
    inference: Inference, answer: str, package: str, **changes: Any
) -> AsyncIterator[TextGymEnv]:
    inference.answer = lambda prompt, digest: answer
    env = made(
        TextGymEnv, inference, make="guessing:make", task="guess-v0", python=package, **changes
    )
    await env.setup()
    yield env
    env.workers.close()


async def test_an_episode_is_played_in_the_other_python_and_turns_are_paid(
    inference: Inference, package: str
) -> None:
    async with playing(inference, "5", package, options={"most": 3}, group_size=1) as env:
        result = await settled(env, {"task": "guess-v0", "seed": 5})
        (group,) = result.groups
        assert [span[3] for span in group["spans"]] == [0.5] * 3  # type: ignore[index]
        assert group["scores"][0] == 1.5 and len(group["tokens"]) == 1, (
            "a chat that grows is one sequence"
        )
        assert env.workers.num_running == 1, "its process is free again"


async def test_episodes_at_once_do_not_disturb_each_others_generators(
    inference: Inference, package: str
) -> None:
    async with playing(inference, "5", package, group_size=6) as env:
        (group,) = (await settled(env, {"task": "guess-v0", "seed": 5})).groups
        said = [env.tokenizer.decode(tokens) for tokens in group["tokens"]]
        assert len(set(said)) == 1, "one seed, one episode"
        assert len(rollouts_of(group)) == 6 and 1 < env.workers.num_running <= 6


@pytest.mark.parametrize(("view", "sequences"), [("chat", 1), ("concat", 3), ("last", 3)])
async def test_what_the_policy_sees_is_a_chat_or_all_or_the_last_observation(
    inference: Inference, package: str, view: str, sequences: int
) -> None:
    async with playing(inference, "5", package, view=view, group_size=1) as env:
        (group,) = (await settled(env, {"task": "guess-v0", "seed": 5})).groups
        assert len(group["tokens"]) == sequences
        last = env.tokenizer.decode(group["tokens"][-1])
        assert ("Guess, up to" in last) == (view != "last") and last.count("Your guess?") == (
            view == "chat"
        )


async def test_a_package_that_raises_or_dies_costs_that_episode_alone(
    inference: Inference, package: str
) -> None:
    for answer, told in (("raise", "the board is broken"), ("die", "exit code is 3")):
        async with playing(inference, answer, package, group_size=1, rollout_retries=1) as env:
            result = await settled(env, {"task": "guess-v0", "seed": 5})
            assert not result.groups and told in result.failures[-1].why
            assert len(result.failures) == 2, "tried again"
        async with playing(inference, "5", package, group_size=1) as env:
            assert (await settled(env, {"task": "guess-v0", "seed": 5})).groups


async def test_an_episode_that_its_package_cuts_short_has_reached_its_limit(
    inference: Inference, package: str
) -> None:
    async with playing(inference, "cut", package, group_size=1) as env:
        (group,) = (await settled(env, {"task": "guess-v0", "seed": 5})).groups
        assert group["metrics"][0]["outcome/turn_limit"] == 1.0  # type: ignore[typeddict-item]


def test_a_package_that_is_not_here_is_told_before_a_run_begins() -> None:
    config, _ = TextGymEnv.config_init()
    absent = config.model_copy(update={"make": "no_such_package.envs:make"})
    (missing,) = TextGymEnv.missing_packages(absent)
    assert missing.package == "no_such_package"
    assert "env.python" in missing.fix
    assert not TextGymEnv.missing_packages(config.model_copy(update={"make": "json:loads"}))
    elsewhere = absent.model_copy(update={"python": "/another/python"})
    assert not TextGymEnv.missing_packages(elsewhere), "only that Python knows"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"make": "no_such_package:make"}, "No module named 'no_such_package'"),
        ({"make": "guessing:making"}, "has no attribute 'making'"),
        ({"task": "gess-v0"}, "no environment gess-v0"),
        ({"make": "guessing:numbers"}, "its observation is of type int, not a text"),
    ],
)
async def test_what_cannot_be_played_is_a_sentence_before_the_first_episode(
    inference: Inference, package: str, changes: dict[str, str], told: str
) -> None:
    values = {"make": "guessing:make", "task": "guess-v0", "python": package, **changes}
    env = made(TextGymEnv, inference, **values)
    with pytest.raises(InvalidConfig, match=f"cannot be played.*{told}.*Set env.make"):
        await env.setup()
    await env.server.close()
