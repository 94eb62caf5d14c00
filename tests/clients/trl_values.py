"""What TRL computes, for `test_reference_values`: its trainers, with given log-probabilities and
rewards.

Runs in TRL's own environment: `python trl_values.py QUESTIONS ANSWERS`, two JSON files. Nothing is
trained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

PROMPT = "1 + 1 = "
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "model_init_kwargs": {"dtype": "float32"},
    "max_completion_length": 3,
    "generation_kwargs": {"min_new_tokens": 3},
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
}


class Given:
    """A trainer's model and reward functions, replaced by numbers."""

    rewards: torch.Tensor
    rows: list[torch.Tensor]  # log-probabilities, in the order in which they are asked for

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        return self.rewards[:, None]

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        row = self.rows.pop(0)
        return row, torch.zeros_like(row), None


class Grpo(Given, GRPOTrainer):
    """GRPO of given numbers."""


class Rloo(Given, RLOOTrainer):
    """RLOO of given numbers."""


def trainer(kind: Any, config: Any, asked: dict[str, Any], **settings: Any) -> Any:
    size = len(asked["rewards"])
    args = config(
        output_dir=asked["scratch"],
        per_device_train_batch_size=size,
        num_generations=asked["group"],
        **COMMON,
        **settings,
    )
    made = kind(
        model=asked["model"],
        args=args,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": [PROMPT] * size}),
    )
    made.model.train()
    made.current_gradient_accumulation_steps = 1  # the loop's, which is not run
    made.rewards = torch.tensor(asked["rewards"], dtype=torch.float64)
    return made


def advantages(made: Any, rows: list[Any]) -> list[float]:
    made.rows = [torch.tensor(row, dtype=torch.float64) for row in rows]
    scored = made._generate_and_score_completions([{"prompt": PROMPT}] * len(made.rewards))
    assert bool((scored["completion_mask"] == 1).all())
    return scored["advantages"].tolist()


def loss(asked: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    made = trainer(Grpo, GRPOConfig, asked, beta=0.0, **settings)
    logprobs = torch.tensor(asked["logprobs"], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(asked["mask"])
    made.rows = [logprobs]
    value = made._compute_loss(
        made.model,
        {
            "prompt_ids": torch.ones(len(mask), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
            "completion_ids": torch.ones_like(mask),
            "completion_mask": mask,
            "advantages": torch.tensor(asked["advantages"], dtype=torch.float64),
            "old_per_token_logps": torch.tensor(asked["sampled"], dtype=torch.float64),
            "num_items_in_batch": mask.sum(),
        },
    )
    value.backward()
    assert logprobs.grad is not None
    return {"value": value.item(), "gradient": logprobs.grad.tolist()}


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    sampled, reference = asked["sampled"], asked["reference"]
    grpo = {
        scale: trainer(Grpo, GRPOConfig, asked, scale_rewards=scale, beta=0.0)
        for scale in ("group", "none")
    }
    rloo = {
        beta: trainer(Rloo, RLOOConfig, asked, beta=beta, normalize_advantages=False)
        for beta in (0.0, asked["beta"])
    }
    answers = {
        "group_std": advantages(grpo["group"], [sampled]),
        "group_mean": advantages(grpo["none"], [sampled]),
        "rloo": advantages(rloo[0.0], [sampled]),
        "rloo_kl": advantages(rloo[asked["beta"]], [sampled, reference]),
        "losses": {name: loss(asked, settings) for name, settings in asked["losses"].items()},
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))


main()
