"""What TRL's `RewardTrainer` computes, for `test_trl_rewards`: token ids, losses, gradients, a
trained folder, scores.

Runs in TRL's own environment: `python trl_reward_values.py QUESTIONS ANSWERS`, two JSON files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
from trl import RewardConfig, RewardTrainer

COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "per_device_train_batch_size": 4,
}


def trainer(asked: dict[str, Any], rows: list[dict[str, Any]], **settings: Any) -> RewardTrainer:
    model = AutoModelForSequenceClassification.from_pretrained(
        asked["model"], num_labels=1, dtype=torch.float32
    )
    return RewardTrainer(
        model=model,
        args=RewardConfig(output_dir=asked["scratch"], **{**COMMON, **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
    )


def tokens(asked: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, rows in asked["formats"].items():
        data = trainer(asked, rows).train_dataset
        found[name] = [[row["chosen_ids"], row["rejected_ids"]] for row in data]
    return found


def losses(asked: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, (rows, coefficient) in asked["losses"].items():
        one = trainer(asked, rows, center_rewards_coefficient=coefficient)
        batch = one.data_collator(list(one.train_dataset))
        one.model.train()
        loss = one.compute_loss(one.model, batch)
        loss.backward()
        gradients = {key: value.grad.numpy() for key, value in one.model.named_parameters()}
        np.savez(Path(asked["scratch"]) / f"{name}.npz", **gradients)
        found[name] = loss.item()
    return found


def trajectory(asked: dict[str, Any]) -> list[float]:
    """Losses of a few steps over rows in the order in which they stand; the folder stays."""
    one = trainer(asked, asked["steps"], learning_rate=1e-3, logging_steps=1, num_train_epochs=1)
    one._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(one.train_dataset)
    one.train()
    one.save_model(asked["trained"])
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


def scores(folder: str, texts: list[str], ids: list[list[int]]) -> dict[str, Any]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        by_model = [model(input_ids=torch.tensor([row])).logits.item() for row in ids]
    classify = pipeline("text-classification", model=folder, dtype=torch.float32, device="cpu")
    return {"model": by_model, "pipeline": [one["score"] for one in classify(texts)]}


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    answers = {
        "tokens": tokens(asked),
        "losses": losses(asked),
        "trajectory": trajectory(asked),
        "ours": scores(asked["model"], asked["texts"], asked["ids"]),
        "theirs": scores(asked["trained"], asked["texts"], asked["ids"]),
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))


main()
