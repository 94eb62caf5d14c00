"""The party TRL in `smollm2_trl.py`: `GRPOTrainer` with a PEFT adapter, from its newest checkpoint
on. Runs in TRL's own environment; it is told its work on the command line and writes into a folder.
"""

from __future__ import annotations

import json
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from party import work
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WORK = work()
FOLDER = Path(WORK["folder"])
CURVE = FOLDER / "curve.jsonl"
AT_ONCE = 64
"""Held-out questions in one batch of `generate`."""
PASSES = 4
"""Parts of a step's answers that go forward and backward one after the other: the logits of 64
answers at once take several gigabytes. All are sampled at once, and there is one optimiser step.
"""


def main() -> None:
    torch.set_num_threads(WORK["threads"])
    begun = time.monotonic()
    trainer = made()
    evaluate(trainer, "before")
    clock = Clock()
    trainer.add_callback(clock)
    newest = max(FOLDER.glob("checkpoint-*"), key=step_of, default=None)
    clock.start()
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    evaluate(trainer, "after")
    adapted = [each for each in trainer.model.parameters() if each.requires_grad]
    facts = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "adapter_parameters": sum(each.numel() for each in adapted),
        "last_life_s": round(time.monotonic() - begun, 1),
    }
    write(FOLDER / "facts.json", facts)


def made() -> GRPOTrainer:
    """The trainer on the work's prompts, in their order."""
    config = GRPOConfig(
        output_dir=str(FOLDER),
        use_cpu=True,
        bf16=WORK["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": WORK["dtype"]},
        per_device_train_batch_size=WORK["answers"] // PASSES,
        gradient_accumulation_steps=PASSES,
        num_generations=WORK["group_size"],
        max_completion_length=WORK["max_tokens"],
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        learning_rate=WORK["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=WORK["steps"],
        shuffle_dataset=False,
        save_strategy="steps",
        save_steps=5,
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=WORK["seed"],
    )
    adapter = LoraConfig(
        r=WORK["rank"], lora_alpha=32, target_modules=WORK["targets"], task_type="CAUSAL_LM"
    )
    rows = Dataset.from_list(WORK["training"])
    return GRPOTrainer(
        model=WORK["model"],
        args=config,
        reward_funcs=reward,
        train_dataset=rows,
        peft_config=adapter,
    )


REWARDS: list[float] = []
"""Mean reward of the step under way."""


def reward(completions: list[Any], right: list[str], **_: Any) -> list[float]:
    """1 where the last number of an answer is the right one."""
    texts = [completion[0]["content"] for completion in completions]
    scores = [score(text, answer) for text, answer in zip(texts, right, strict=True)]
    REWARDS.append(sum(scores) / len(scores))
    return scores


def score(text: str, right: str) -> float:
    return float(re.findall(r"\d+", text)[-1:] == [right])


class Clock(TrainerCallback):
    """Writes what each step got and cost. Steps that are done again after an interruption are
    written again, and cost again.
    """

    def start(self) -> None:
        self.wall_s, self.cpu_s = time.monotonic(), cpu_s()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wall_s, cpu = time.monotonic(), cpu_s()
        row = {
            "step": state.global_step,
            "reward/mean": REWARDS.pop(),
            "wall_s": round(wall_s - self.wall_s, 2),
            "cpu_s": round(cpu - self.cpu_s, 2),
        }
        append(CURVE, row)
        print(row, flush=True)
        self.wall_s, self.cpu_s = wall_s, cpu


def cpu_s() -> float:
    """User and system seconds of this process and of those that it has waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(each.ru_utime + each.ru_stime for each in used)


def evaluate(trainer: GRPOTrainer, when: str) -> None:
    """Shares of right answers to the held-out questions, sampled once each and greedy."""
    file = FOLDER / f"{when}.json"
    if file.exists():
        return
    torch.manual_seed(WORK["seed"])
    found = {
        "sampled": share_right(trainer, do_sample=True, temperature=1.0, top_k=0, top_p=1.0),
        "greedy": share_right(trainer, do_sample=False),
    }
    write(file, found)


@torch.no_grad()
def share_right(trainer: GRPOTrainer, **how: Any) -> float:
    tokenizer, model = trainer.processing_class, trainer.model
    tokenizer.padding_side = "left"
    model.eval()
    right = 0.0
    for start in range(0, len(WORK["held_out"]), AT_ONCE):
        rows = WORK["held_out"][start : start + AT_ONCE]
        asked = tokenizer.apply_chat_template(
            [row["prompt"] for row in rows],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        tokens = model.generate(**asked, max_new_tokens=WORK["max_tokens"], **how)
        width = asked["input_ids"].shape[1]
        texts = tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True)
        right += sum(score(text, row["right"]) for text, row in zip(texts, rows, strict=True))
    model.train()
    return right / len(WORK["held_out"])


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def write(file: Path, value: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    os.replace(part, file)


main()
