"""The party Halteres in `reward_training.py`: `RewardTrainer`, a round of steps per `go`."""

from __future__ import annotations

import resource

from party import Channel, work

WORK = work()
CHANNEL = Channel()

import torch  # noqa: E402  after the channel: nothing may print on it

from halteres.rewards import RewardConfig, RewardTrainer  # noqa: E402


def main() -> None:
    torch.set_num_threads(WORK["threads"])
    steps = 0

    def ended() -> bool:
        nonlocal steps
        steps += 1
        if steps % WORK["round"]:
            return False
        tokens = trainer.num_tokens
        CHANNEL.say(
            steps=steps,
            tokens=tokens,
            peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        )
        return not CHANNEL.wait()

    config = RewardConfig(
        output_dir=WORK["scratch"],
        per_device_train_batch_size=WORK["batch"],
        learning_rate=WORK["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=10_000,
        logging_steps=10_000,
        save_strategy="no",
        disable_tqdm=True,
        **WORK["settings"],
    )
    trainer = RewardTrainer(WORK["folder"], config, train_dataset=WORK["rows"], should_stop=ended)
    CHANNEL.say(ready=True, torch=torch.__version__)
    if CHANNEL.wait():
        trainer.train()


main()
