"""The environment `two_digit_sums`: what a pretrained model of 135 M parameters does now and then,
and can learn.

Operands from 10 to 60; a fifth of all pairs is held out. 1 for an answer whose last number is the
sum.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.single_turn import SingleTurnEnv

Sum = tuple[int, int]

SHOWN: Sum = (21, 34)


def is_held_out(item: Sum) -> bool:
    return (3 * item[0] + item[1]) % 5 == 0


def drawn(rng: random.Random, *, held_out: bool) -> Sum:
    while is_held_out(item := (rng.randint(10, 60), rng.randint(10, 60))) != held_out:
        pass
    return item


def question(left: int, right: int) -> dict[str, str]:
    return {"role": "user", "content": f"{left} + {right} ="}


class TwoDigitSums(SingleTurnEnv):
    """Sums of two numbers of two digits."""

    name = "two_digit_sums"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Sequence[APIServerConfig]]:
        config = BaseEnvConfig(
            group_size=8,
            batch_size=32,
            max_new_tokens=8,
            max_token_length=128,
            max_num_workers=16,
            eval_tasks=32,
            eval_samples=2,
        )
        return config, [APIServerConfig()]

    async def get_next_item(self) -> Sum:
        return drawn(self.rng, held_out=False)

    def prompt(self, item: Sum) -> list[dict[str, str]]:
        """One sum worked, so that the answer is a number alone."""
        return [
            question(*SHOWN),
            {"role": "assistant", "content": str(sum(SHOWN))},
            question(*item),
        ]

    def score(self, item: Sum, text: str) -> float:
        numbers = re.findall(r"\d+", text)
        return float(numbers[-1:] == [str(sum(item))])

    def eval_items(self) -> list[Sum]:
        rng = random.Random(1)
        return [drawn(rng, held_out=True) for _ in range(self.config.eval_tasks)]


if __name__ == "__main__":
    TwoDigitSums.cli()
