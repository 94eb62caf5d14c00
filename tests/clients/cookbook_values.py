"""What tinker-cookbook computes, for `test_reference_values`: advantages, datums, KL penalty,
returns, agreement.

Runs in the cookbook's own environment: `python cookbook_values.py QUESTIONS ANSWERS`, two JSON
files.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tinker
import torch
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.metrics import (
    compute_kl_sample_train,
    discounted_future_sum_vectorized,
    incorporate_kl_penalty,
)
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition


def trajectory(turns: list[dict[str, Any]]) -> Trajectory:
    transitions = [
        Transition(
            ob=tinker.ModelInput.from_ints(turn["prompt"]),
            ac=TokensWithLogprobs(tokens=turn["action"], maybe_logprobs=turn["logprobs"]),
            reward=turn["reward"],
            episode_done=turn is turns[-1],
        )
        for turn in turns
    ]
    return Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())


class Base:
    """A reference policy whose log-probability of every token is given, in the order of the
    sequences.
    """

    def __init__(self, logprobs: list[list[float]]) -> None:
        self.logprobs = iter(logprobs)

    def sample(self, **_: Any) -> Any:
        answer = SimpleNamespace(
            prompt_logprobs=[None, *next(self.logprobs)], sequences=[], prompt_cache_hit_tokens=0
        )

        async def soon() -> Any:
            return answer

        return SimpleNamespace(coroutine=soon)


def arrays(data: list[tinker.Datum]) -> list[dict[str, list[float]]]:
    return [
        {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()} for datum in data
    ]


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    groups = [
        TrajectoryGroup(
            [trajectory(turns) for turns in group], [0.0] * len(group), [{}] * len(group)
        )
        for group in asked["groups"]
    ]
    advantages = compute_advantages(groups)
    data, _ = assemble_training_data(groups, advantages)
    plain = arrays(data)
    training = [torch.tensor(row) for row in asked["training"]]
    agreement = compute_kl_sample_train(data, training)
    penalty, _ = asyncio.run(
        incorporate_kl_penalty(data, Base(asked["reference"]), asked["beta"], 0.0)
    )
    answers = {
        "advantages": [row.tolist() for row in advantages],
        "data": plain,
        "agreement": agreement,
        "penalised": arrays(data),
        "kl": penalty["kl_policy_base"],
        "returns": discounted_future_sum_vectorized(
            torch.tensor(asked["rewards"], dtype=torch.float64), asked["gamma"]
        ).tolist(),
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))


main()
