"""The party TRL in `rl_step.py`: `GRPOTrainer` with a PEFT adapter, a step per `go`. Runs in TRL's
own environment.
"""

from __future__ import annotations

from typing import Any

from party import Channel, work

WORK = work()
CHANNEL = Channel()

import torch  # noqa: E402  after the channel: nothing may print on it
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Gate(TrainerCallback):
    """Stops before every step until the driver says `go`, and tells it when the step is done."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not CHANNEL.wait():
            control.should_training_stop = True
            raise SystemExit(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        CHANNEL.say(step=state.global_step, tokens=LENGTHS.pop())


LENGTHS: list[int] = []


def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of distinct tokens: cheap, and unequal within a group."""
    assert all(completion[0]["content"] is not None for completion in completions)
    LENGTHS.append(sum(len(ids) for ids in completion_ids))
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def main() -> None:
    torch.set_num_threads(WORK["threads"])
    group, tokens = WORK["group_size"], WORK["max_tokens"]
    config = GRPOConfig(
        output_dir=WORK["scratch"],
        use_cpu=True,
        bf16=WORK["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": WORK["dtype"]},
        per_device_train_batch_size=len(WORK["prompts"]) * group,
        num_generations=group,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},  # no answer ends early: equal work for both
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        learning_rate=WORK["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=10_000,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=WORK["folder"],
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": text}] for text in WORK["prompts"]]}
        ),
        peft_config=LoraConfig(
            r=WORK["rank"], lora_alpha=32, target_modules=WORK["targets"], task_type="CAUSAL_LM"
        ),
        callbacks=[Gate()],
    )
    adapter = sum(
        parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad
    )
    import trl

    CHANNEL.say(
        ready=True, torch=torch.__version__, version=trl.__version__, adapter_parameters=adapter
    )
    trainer.train()


main()
