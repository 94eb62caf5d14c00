"""The environment `two_digit_sums`: what a pretrained model of 135 M parameters does now and then, and can learn.

Trained on are operands from 10 to 60, held out those from 61 to 89. 1 for an answer whose last number is the sum.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.single_turn import SingleTurnEnv

Sum = tuple[int, int]

SHOWN: Sum = (21, 34)


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
        return self.rng.randint(10, 60), self.rng.randint(10, 60)

    def prompt(self, item: Sum) -> list[dict[str, str]]:
        """One sum worked, so that the answer is a number alone."""
        return [question(*SHOWN), {"role": "assistant", "content": str(sum(SHOWN))}, question(*item)]

    def score(self, item: Sum, text: str) -> float:
        numbers = re.findall(r"\d+", text)
        return float(numbers[-1:] == [str(sum(item))])

    def eval_items(self) -> list[Sum]:
        rng = random.Random(1)
        return [(rng.randint(61, 89), rng.randint(61, 89)) for _ in range(self.config.eval_tasks)]


if __name__ == "__main__":
    TwoDigitSums.cli()
