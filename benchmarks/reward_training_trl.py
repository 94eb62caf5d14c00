"""The party TRL in `reward_training.py`: `RewardTrainer`, a round of steps per `go`. Runs in TRL's
own environment.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

from party import Channel, work

WORK = work()
CHANNEL = Channel()

import torch  # noqa: E402  after the channel: nothing may print on it
from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import RewardConfig, RewardTrainer  # noqa: E402


class Gate(TrainerCallback):
    """Stops after every round until the driver says `go`, and tells it what the round did."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % WORK["round"]:
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        CHANNEL.say(steps=state.global_step, tokens=trainer._total_train_tokens, peak_mb=peak)
        if not CHANNEL.wait():
            raise SystemExit(0)


torch.set_num_threads(WORK["threads"])
config = RewardConfig(
    output_dir=WORK["scratch"],
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=WORK["batch"],
    learning_rate=WORK["learning_rate"],
    lr_scheduler_type="constant",
    max_steps=10_000,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = RewardTrainer(
    model=AutoModelForSequenceClassification.from_pretrained(
        WORK["folder"], num_labels=1, dtype=torch.float32
    ),
    args=config,
    processing_class=AutoTokenizer.from_pretrained(WORK["folder"]),
    train_dataset=Dataset.from_list(json.loads(Path(WORK["rows"]).read_text(encoding="utf-8"))),
    callbacks=[Gate()],
)
import trl  # noqa: E402

CHANNEL.say(ready=True, torch=torch.__version__, version=trl.__version__)
if CHANNEL.wait():
    trainer.train()
