"""What TRL's PPOTrainer computes on its own episodes, for `test_trl_ppo`: rewards, values,
advantages, returns, the loss of the values.

Runs in TRL's own environment: `python trl_ppo_values.py QUESTIONS ANSWERS`, two JSON files. The
trainer takes one step of two epochs on random models of two layers. What it makes of rewards and
values is no function of its own, and is read where it whitens and averages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

BATCH = 8


def numbers(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().tolist()


def watch(answers: dict[str, Any], asked: dict[str, Any]) -> None:
    """Read the trainer's own values where it calls two of its functions; in its answers put a stop
    token where they are to end.
    """
    generate = ppo_trainer.batch_generation

    def generated(*how: Any) -> Any:
        rows, logits = generate(*how)
        for row, length in zip(rows, asked["lengths"], strict=True):
            if length < asked["length"]:
                row[length - asked["length"] - 1] = asked["stop"]
        return rows, logits

    ppo_trainer.batch_generation = generated
    whiten, mean = ppo_trainer.masked_whiten, ppo_trainer.masked_mean

    def whitened(values: torch.Tensor, mask: torch.Tensor, **how: Any) -> torch.Tensor:
        found = whiten(values, mask, **how)
        local = sys._getframe(1).f_locals
        names = ("rewards", "values", "advantages", "returns", "scores", "kl")
        answers.update({name: numbers(local[name]) for name in names})
        answers["whitened"] = numbers(found)
        answers["sampled"] = (~local["padding_mask"]).tolist()
        answers["valued"] = (~local["padding_mask_p1"]).tolist()
        return found

    def averaged(values: torch.Tensor, mask: torch.Tensor, *how: Any) -> torch.Tensor:
        found = mean(values, mask, *how)
        local = sys._getframe(1).f_locals
        if values is local.get("vf_loss_max"):
            names = {"vpred": "present", "mb_values": "sampled", "mb_return": "returns"}
            step = {ours: numbers(local[theirs]) for theirs, ours in names.items()}
            step |= {"mask": mask.tolist(), "loss": 0.5 * found.item()}
            answers["steps"].append(step)
        if "vf_losses2" in local and torch.equal(
            values, (local["vf_losses2"] > local["vf_losses1"]).float()
        ):
            answers["steps"][-1]["clipped"] = found.item()
        return found

    ppo_trainer.masked_whiten, ppo_trainer.masked_mean = whitened, averaged


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    torch.manual_seed(0)
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    policy, reference = (Qwen3ForCausalLM(Qwen3Config(**config)) for _ in range(2))
    value, reward = (
        Qwen3ForSequenceClassification(Qwen3Config(**config, num_labels=1)) for _ in range(2)
    )
    prompts = [{"input_ids": tokenizer(text)["input_ids"]} for text in asked["prompts"]]
    answers: dict[str, Any] = {"steps": []}
    watch(answers, asked)
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=asked["scratch"],
            per_device_train_batch_size=BATCH,
            total_episodes=BATCH,
            num_ppo_epochs=2,
            num_mini_batches=1,
            learning_rate=asked["learning_rate"],
            response_length=asked["length"],
            stop_token_id=asked["stop"],
            temperature=1.0,
            kl_coef=asked["beta"],
            kl_estimator="k1",
            gamma=asked["gamma"],
            lam=asked["lambda"],
            cliprange_value=asked["clip"],
            num_sample_generations=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_list(prompts),
        eval_dataset=Dataset.from_list(prompts),
    )
    trainer.train()
    Path(sys.argv[2]).write_text(json.dumps(answers))


main()
