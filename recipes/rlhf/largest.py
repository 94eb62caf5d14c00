"""The environment `largest`: which of four numbers is the largest.

Numbers from 10 to 99, all different; a fifth of all sets of four is held out, in every order. An
answer counts where the last number in it is the largest. That is the verifier: what is trained on
is a reward model's score.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.single_turn import SingleTurnEnv

Four = tuple[int, int, int, int]

NUMBERS = range(10, 100)
EVAL_SEED = 1


def is_held_out(item: Four) -> bool:
    """Whether a set of four is asked in evaluations alone; its order does not matter."""
    one, two, three, four = sorted(item)
    return (one + 3 * two + 7 * three + 2 * four) % 5 == 0


def draw(rng: random.Random, *, held_out: bool) -> Four:
    """Four numbers of one of the two splits."""
    while True:
        one, two, three, four = rng.sample(NUMBERS, 4)
        item = (one, two, three, four)
        if is_held_out(item) == held_out:
            return item


def question(item: Four) -> dict[str, str]:
    """The user's message that asks for the largest."""
    one, two, three, four = item
    text = f"Which of the numbers {one}, {two}, {three} and {four} is the largest?"
    return {"role": "user", "content": text}


def is_right(item: Four, text: str) -> bool:
    """Whether the last number of an answer is the largest."""
    return re.findall(r"\d+", text)[-1:] == [str(max(item))]


class Largest(SingleTurnEnv):
    """The largest of four numbers."""

    name = "largest"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Sequence[APIServerConfig]]:
        """Groups of 8, answers of up to 24 tokens."""
        config = BaseEnvConfig(
            group_size=8,
            batch_size=64,
            max_new_tokens=24,
            max_token_length=128,
            max_num_workers=16,
            eval_tasks=128,
            eval_samples=2,
        )
        return config, [APIServerConfig()]

    async def get_next_item(self) -> Four:
        """Four numbers of the training split."""
        return draw(self.rng, held_out=False)

    def prompt(self, item: Four) -> list[dict[str, str]]:
        """The question alone: its form was learned from chats."""
        return [question(item)]

    def score(self, item: Four, text: str) -> float:
        """1 where the last number is the largest."""
        return float(is_right(item, text))

    def eval_items(self) -> list[Four]:
        """Held-out sets, the first `eval_tasks` of one fixed sequence."""
        rng = random.Random(EVAL_SEED)
        return [draw(rng, held_out=True) for _ in range(self.config.eval_tasks)]


if __name__ == "__main__":
    Largest.cli()
