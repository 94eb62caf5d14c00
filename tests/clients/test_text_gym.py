"""The environment `text_gym` plays the real GEM, which stands in an environment of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from environments.fakes import inference_server
from environments.games.episodes import GEM
from environments.test_multi_turn import made, settled

from halteres.environments.games import make
from halteres.environments.text_gym import TextGymEnv

pytestmark = pytest.mark.clients

ID, SEED = "game:GuessTheNumber-v0-easy", 7


async def test_an_episode_of_gem_is_ours_of_the_same_seed(
    client_python: Callable[..., str],
) -> None:
    game = make(ID)
    first, info = game.reset(SEED)
    async with inference_server() as inference:
        inference.answer = lambda prompt, digest: "\\boxed{3}"
        env = made(
            TextGymEnv,
            inference,
            task=ID,
            python=client_python(*GEM),
            options={"seed": 0},
            group_size=1,
        )
        await env.setup()
        (group,) = (await settled(env, {"task": ID, "seed": SEED})).groups
        env.workers.close()
    said = env.tokenizer.decode(group["tokens"][0])
    assert first in said and str(info["suffix"]) in said
    rewards: list[float] = []
    for _ in group["spans"] or ():
        observation, reward, terminated, truncated, info = game.step("\\boxed{3}")
        assert terminated or truncated or observation in said
        rewards.append(reward)
    assert [span[3] for span in group["spans"] or ()] == pytest.approx(rewards)
    assert terminated or truncated
