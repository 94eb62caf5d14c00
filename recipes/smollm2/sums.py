"""The environment `sums`: what a pretrained model of 135 M parameters does now and then, and can
learn.

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

EXAMPLE: Sum = (21, 34)
"""Shown with its answer before each question."""

EVAL_SEED = 1


def is_held_out(item: Sum) -> bool:
    """Whether a pair is asked in evaluations alone."""
    return (3 * item[0] + item[1]) % 5 == 0


def draw(rng: random.Random, *, held_out: bool) -> Sum:
    """A pair of one of the two splits."""
    while True:
        item = (rng.randint(10, 60), rng.randint(10, 60))
        if is_held_out(item) == held_out and item != EXAMPLE:
            return item


def question(item: Sum) -> dict[str, str]:
    """The user's message that asks for a sum."""
    return {"role": "user", "content": f"{item[0]} + {item[1]} ="}


class Sums(SingleTurnEnv):
    """Sums of two numbers of two digits."""

    name = "sums"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Sequence[APIServerConfig]]:
        """Groups of 8, answers of up to 8 tokens."""
        config = BaseEnvConfig(
            group_size=8,
            batch_size=64,
            max_new_tokens=8,
            max_token_length=128,
            max_num_workers=16,
            eval_tasks=64,
            eval_samples=2,
        )
        return config, [APIServerConfig()]

    async def get_next_item(self) -> Sum:
        """A pair of the training split."""
        return draw(self.rng, held_out=False)

    def prompt(self, item: Sum) -> list[dict[str, str]]:
        """The example with its answer, then the question."""
        answer = {"role": "assistant", "content": str(sum(EXAMPLE))}
        return [question(EXAMPLE), answer, question(item)]

    def score(self, item: Sum, text: str) -> float:
        """1 where the last number is the sum."""
        numbers = re.findall(r"\d+", text)
        return float(numbers[-1:] == [str(sum(item))])

    def eval_items(self) -> list[Sum]:
        """Held-out pairs, the first `eval_tasks` of one fixed sequence."""
        rng = random.Random(EVAL_SEED)
        return [draw(rng, held_out=True) for _ in range(self.config.eval_tasks)]


if __name__ == "__main__":
    Sums.cli()
