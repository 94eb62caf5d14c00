"""Sums for a till: the answer goes to its display, so it should be short."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.problems import (
    Problem,
    draw_problem,
    extract_boxed,
    is_correct,
    user_message,
)
from halteres.environments.single_turn import SingleTurnEnv

DISPLAY = 32  # characters


class TillEnv(SingleTurnEnv):
    """Sums for a till, answered on one line of its display."""

    name = "till"
    is_exam = False

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Sequence[APIServerConfig]]:
        config = BaseEnvConfig(
            group_size=16,
            batch_size=256,
            max_new_tokens=64,
            max_token_length=256,
            max_num_workers=64,
            max_eval_workers=64,
            ensure_scores_are_not_same=False,
            eval_tasks=64,
            eval_samples=4,
        )
        return config, [APIServerConfig()]

    async def get_next_item(self) -> Problem:
        return draw_problem(self.rng, "train")

    def prompt(self, item: Any) -> str:
        return user_message(item)

    def score(self, item: Any, text: str) -> float:
        return float(is_correct(text, item)) if self.is_exam else self.reward(text)

    def reward(self, text: str) -> float:
        """A whole number in the box, in an answer that the display can show."""
        boxed = extract_boxed(text)
        return float(boxed is not None and boxed.isdecimal() and len(text) <= DISPLAY)

    def eval_items(self) -> list[Problem]:
        rng = random.Random(7)
        return [draw_problem(rng, "eval") for _ in range(self.config.eval_tasks)]

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        self.is_exam = True  # held-out answers are right or wrong, however long
        return await super().evaluate(*args, **kwargs)


if __name__ == "__main__":
    TillEnv.cli()
