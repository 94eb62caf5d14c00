"""Our advantages, returns and loss of values beside those of TRL 1.9.2's PPOTrainer, the last
release that has one.

TRL has one turn in an episode and discounts from token to token; we discount from turn to turn. So
that its γ can be compared, every token is a turn here. It pays an answer that has stopped at the
place after its last token; that place counts as one of the episode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from halteres.models import TINY, builtin_path
from halteres.rewards.torch.critic import value_loss
from halteres.training.advantages import standardised
from halteres.training.gae import SampledTokens, TokenValues, estimate_tokens

from .test_reference_values import ran

pytestmark = pytest.mark.clients

PROMPTS = [
    f"{a} + {b} =" for a, b in ((1, 1), (2, 3), (7, 1), (4, 4), (9, 3), (5, 4), (8, 8), (3, 6))
]
LENGTHS = [7, 3, 5, 7, 1, 6, 2, 4]
"""Tokens of each answer, its stop token among them; 7 are the most."""

CLIP = 0.2


@pytest.fixture(
    scope="module", params=[(1.0, 0.95), (0.9, 0.8)], ids=["TRL's defaults", "gamma 0.9"]
)
def trl(
    request: pytest.FixtureRequest,
    client_python: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    folder = tmp_path_factory.mktemp("trl")
    discount, decay = request.param
    asked = {
        "model": str(builtin_path(TINY)),
        "scratch": str(folder),
        "prompts": PROMPTS,
        "lengths": LENGTHS,
        "length": max(LENGTHS),
        "stop": 300,
        "learning_rate": 0.05,
        "beta": 0.1,
        "gamma": discount,
        "lambda": decay,
        "clip": CLIP,
    }
    python = client_python("trl-1.9", "torch", "trl==1.9.2")
    return {"how": request.param, **ran(python, "trl_ppo_values.py", folder, asked)}


def ours(trl: Any) -> tuple[TokenValues, np.ndarray]:
    """Of the places that have a value in TRL, and which those are."""
    valued = np.array(trl["valued"])
    episode_M, row_M = np.nonzero(valued)
    count = len(episode_M)
    tokens = SampledTokens(
        inputs_S=tuple(np.zeros(valued.shape[1], np.int64) for _ in valued),
        sequence_M=episode_M,
        row_M=row_M,
        turn_M=np.arange(count),
        episode_M=episode_M,
    )
    rewards_M, values_M = (np.array(trl[name])[valued] for name in ("rewards", "values"))
    discount, decay = trl["how"]
    return estimate_tokens(tokens, rewards_M, values_M, discount=discount, decay=decay), valued


def test_advantages_and_returns_are_trls(trl: Any) -> None:
    found, valued = ours(trl)
    # the place after a stop token is one more; where there is no room, there is none
    assert valued.sum(axis=1).tolist() == [min(7, length + 1) for length in LENGTHS]
    np.testing.assert_allclose(found.advantages_M, np.array(trl["advantages"])[valued], atol=1e-5)
    np.testing.assert_allclose(found.returns_M, np.array(trl["returns"])[valued], atol=1e-5)


def test_whitened_advantages_are_trls(trl: Any) -> None:
    sampled = np.array(trl["sampled"])
    assert sampled.sum(axis=1).tolist() == LENGTHS
    whitened = standardised(np.array(trl["advantages"])[sampled])
    np.testing.assert_allclose(whitened, np.array(trl["whitened"])[sampled], atol=1e-5)


def test_the_loss_of_the_values_and_what_the_clip_raises_are_trls(trl: Any) -> None:
    """In the second epoch the critic has moved so far that the clip binds."""
    for step in trl["steps"]:
        mask = np.array(step["mask"])
        present, sampled, returns = (
            torch.tensor(np.array(step[name])[mask]) for name in ("present", "sampled", "returns")
        )
        loss_M, raised_M = value_loss(present, sampled, returns, CLIP)
        assert loss_M.mean().item() == pytest.approx(step["loss"], rel=1e-5)
        assert raised_M.double().mean().item() == pytest.approx(step["clipped"], abs=1e-6)
    assert [step["clipped"] > 0 for step in trl["steps"]] == [False, True]
