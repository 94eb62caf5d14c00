"""The environment `middle`: which of three numbers lies between the others.

Numbers from 10 to 99, all different; a fifth of all triples is held out, in every order. 1 for an
answer whose last number is the middle one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.single_turn import SingleTurnEnv

Triple = tuple[int, int, int]

EXAMPLE: Triple = (52, 17, 34)
"""Shown with its answer before each question."""

EVAL_SEED = 1


def is_held_out(item: Triple) -> bool:
    """Whether a triple is asked in evaluations alone; its order does not matter."""
    low, middle, high = sorted(item)
    return (low + 3 * middle + 7 * high) % 5 == 0


def draw(rng: random.Random, *, held_out: bool) -> Triple:
    """A triple of one of the two splits."""
    while True:
        first, second, third = rng.sample(range(10, 100), 3)
        item = (first, second, third)
        if is_held_out(item) == held_out and sorted(item) != sorted(EXAMPLE):
            return item


def question(item: Triple) -> dict[str, str]:
    """The user's message that asks for the middle one."""
    first, second, third = item
    text = f"Which of the numbers {first}, {second} and {third} is the middle one?"
    return {"role": "user", "content": text}


class Middle(SingleTurnEnv):
    """The middle one of three numbers."""

    name = "middle"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Sequence[APIServerConfig]]:
        """Groups of 8, answers of up to 6 tokens."""
        config = BaseEnvConfig(
            group_size=8,
            batch_size=128,
            max_new_tokens=6,
            max_token_length=128,
            max_num_workers=16,
            eval_tasks=64,
            eval_samples=2,
        )
        return config, [APIServerConfig()]

    async def get_next_item(self) -> Triple:
        """A triple of the training split."""
        return draw(self.rng, held_out=False)

    def prompt(self, item: Triple) -> list[dict[str, str]]:
        """The example with its answer, then the question."""
        answer = {"role": "assistant", "content": str(sorted(EXAMPLE)[1])}
        return [question(EXAMPLE), answer, question(item)]

    def score(self, item: Triple, text: str) -> float:
        """1 where the last number is the middle one."""
        numbers = re.findall(r"\d+", text)
        return float(numbers[-1:] == [str(sorted(item)[1])])

    def eval_items(self) -> list[Triple]:
        """Held-out triples, the first `eval_tasks` of one fixed sequence."""
        rng = random.Random(EVAL_SEED)
        return [draw(rng, held_out=True) for _ in range(self.config.eval_tasks)]


if __name__ == "__main__":
    Middle.cli()
