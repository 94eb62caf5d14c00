"""Sums of one or two steps, with the answer in a box."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.problems import Problem, draw_problem, user_message
from halteres.environments.single_turn import SingleTurnEnv

_BOX = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")


class SumsEnv(SingleTurnEnv):
    """Sums of one or two steps."""

    name = "sums"

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
            eval_samples=2,
        )
        return config, [APIServerConfig()]

    async def get_next_item(self) -> Problem:
        return draw_problem(self.rng, "train")

    def prompt(self, item: Any) -> str:
        return user_message(item)

    def score(self, item: Any, text: str) -> float:
        said = _BOX.findall(text)[-1]
        return float(said == item.answer)

    def eval_items(self) -> list[Problem]:
        rng = random.Random(7)
        return [draw_problem(rng, "eval") for _ in range(self.config.eval_tasks)]


if __name__ == "__main__":
    SumsEnv.cli()
