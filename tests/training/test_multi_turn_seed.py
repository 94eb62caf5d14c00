"""The multi-turn seed's own functions and ours, on the same random episodes: equal advantages,
equal datums.

The seed normalises all turns in float32, then draws some of them; its order is kept here. Equal
means to 2e-7, relative above 1, where that is less than two steps of float32.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halteres.losses import find_kind
from halteres.training.advantages import estimate
from halteres.training.datums import spread, to_examples, to_sequences
from halteres.training.policy import _datum
from halteres.training.turns import turns_of
from halteres.types import CONTEXT_LOGPROB, MASKED, Batch, Group, Span

PROGRAM = Path(__file__).parents[3] / "shared" / "seeds" / "restored" / "tinker_train_gem.py"
GAMMA = 0.9


def seed_functions() -> dict[str, Any]:
    """Two functions of the program; the rest of it wants packages that are none of ours."""
    import tinker
    import torch
    from tinker.types.tensor_data import TensorData

    wanted = {"augment_transitions_with_advantages", "make_training_data"}
    tree = ast.parse(PROGRAM.read_text())
    tree.body = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted
    ]
    names: dict[str, Any] = {
        "np": np,
        "torch": torch,
        "types": tinker.types,
        "TensorData": TensorData,
    }
    exec(compile(tree, str(PROGRAM), "exec"), names)  # noqa: S102 - a file of this project's own tests
    return names


def random_episodes(rng: np.random.Generator) -> list[list[dict[str, Any]]]:
    def turn() -> dict[str, Any]:
        num = int(rng.integers(1, 6))
        return {
            "obs_tokens": rng.integers(0, 600, int(rng.integers(1, 9))).tolist(),
            "act_tokens": rng.integers(0, 600, num).tolist(),
            "act_logprobs": (-rng.exponential(size=num)).astype(np.float32).tolist(),
            "reward": float(rng.choice([-0.1, 0.07, 0.3, 0.81, 1.0])),
        }

    return [[turn() for _ in range(rng.integers(1, 6))] for _ in range(8)]


def as_batch(episodes: list[list[dict[str, Any]]]) -> Batch:
    """Every turn a sequence of its own, as in the seed: each prompt is written anew."""
    turns = [(number, turn) for number, episode in enumerate(episodes) for turn in episode]
    starts = [len(turn["obs_tokens"]) for _, turn in turns]
    return Batch(
        groups=(
            Group(
                tokens=tuple((*turn["obs_tokens"], *turn["act_tokens"]) for _, turn in turns),
                masks=tuple((*[MASKED] * len(t["obs_tokens"]), *t["act_tokens"]) for _, t in turns),
                scores=tuple(0.0 for _ in turns),
                logprobs=tuple(
                    (*[CONTEXT_LOGPROB] * len(turn["obs_tokens"]), *turn["act_logprobs"])
                    for _, turn in turns
                ),
                versions=(),
                episodes=tuple(number for number, _ in turns),
                spans=tuple(
                    Span(
                        sequence=i,
                        start=start,
                        stop=start + len(turn["act_tokens"]),
                        reward=turn["reward"],
                    )
                    for i, (start, (_, turn)) in enumerate(zip(starts, turns, strict=True))
                ),
            ),
        )
    )


@pytest.mark.skipif(not PROGRAM.exists(), reason="the seeds are not here")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("use_rebn", [True, False])
def test_advantages_and_datums_are_those_of_the_multi_turn_seed(seed: int, use_rebn: bool) -> None:
    theirs, rng = seed_functions(), np.random.default_rng(seed)
    episodes = random_episodes(rng)
    batch = as_batch(episodes)
    num_turns = sum(map(len, episodes))
    batch_size = num_turns - 5 if seed % 2 else num_turns
    config = SimpleNamespace(gamma=GAMMA, use_rebn=use_rebn, batch_size=batch_size)

    np.random.seed(seed)
    chosen = theirs["augment_transitions_with_advantages"](episodes, config)
    np.random.seed(seed)
    order = (
        range(num_turns)
        if batch_size == num_turns
        else np.random.choice(num_turns, batch_size, replace=False)
    )

    turns, loss = turns_of(batch), find_kind("importance_sampling")
    advantages_K = estimate(turns, "rebn" if use_rebn else "reinforce", GAMMA)
    assert [float(advantages_K[k]) for k in order] == pytest.approx(
        [turn["return"] for turn in chosen], rel=2e-7, abs=2e-7
    )

    sequences = to_sequences(batch, needs_logprobs=True)
    examples = to_examples(sequences, spread(turns, advantages_K, sequences), 100, loss, {})
    assert len(examples.useful) == num_turns
    for k, datum in zip(order, theirs["make_training_data"](chosen), strict=True):
        ours = _datum(examples.useful[k], loss)
        assert ours.model_input.to_ints() == datum.model_input.to_ints()
        for name, expected in datum.loss_fn_inputs.items():
            assert ours.loss_fn_inputs[name].dtype == expected.dtype
            assert ours.loss_fn_inputs[name].data == pytest.approx(
                expected.data, rel=2e-7, abs=2e-7
            ), name
