"""What TRL's DPOTrainer computes on one batch, for `test_trl_dpo`: token ids, loss, gradient.

Runs in TRL's own environment: `python trl_dpo_values.py QUESTIONS ANSWERS`, two JSON files. Nothing
is trained. The policy is the base model with another scale before its head, so that it differs from
the reference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

SCALE = 1.3


def logprobs(model: Any, ids: torch.Tensor, mask: torch.Tensor, attention: Any) -> torch.Tensor:
    """Of each sequence: the summed log-probability of its completion."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].double()
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (chosen * mask[:, 1:]).sum(1)


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    policy = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    weight = policy.model.norm.weight
    with torch.no_grad():
        weight.mul_(SCALE)
    trainer = DPOTrainer(
        model=policy,
        ref_model=base,
        args=DPOConfig(
            output_dir=asked["scratch"],
            per_device_train_batch_size=len(asked["rows"]),
            beta=asked["beta"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        train_dataset=Dataset.from_list(asked["rows"]),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    policy.train()
    loss = trainer.compute_loss(policy, dict(batch))
    loss.backward()
    gradient = weight.grad.clone()
    ids, mask = batch["input_ids"], batch["completion_mask"]
    attention = batch["attention_mask"]
    with torch.no_grad():
        reference = logprobs(base, ids, mask, attention)
    sums = logprobs(policy, ids, mask, attention)
    # how each sequence's log-probability changes with the weight
    slopes = [torch.autograd.grad(one, weight, retain_graph=True)[0].tolist() for one in sums]
    answers = {
        "ids": [row[seen.bool()].tolist() for row, seen in zip(ids, attention, strict=True)],
        "masks": [row[seen.bool()].tolist() for row, seen in zip(mask, attention, strict=True)],
        "policy": sums.tolist(),
        "reference": reference.tolist(),
        "slopes": slopes,
        "loss": loss.item(),
        "gradient": gradient.tolist(),
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))


main()
