"""An environment that takes its time: a run of it goes on for long and leaves the machine to
others.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.single_turn import SingleTurnEnv


class PacedEnv(SingleTurnEnv):
    """Rewards that say nothing, a few a second."""

    name = "paced"
    pace_s = 0.2

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Sequence[APIServerConfig]]:
        config = BaseEnvConfig(
            group_size=4,
            batch_size=8,
            max_new_tokens=16,
            max_token_length=96,
            eval_tasks=2,
            eval_samples=1,
            ensure_scores_are_not_same=False,
        )
        return config, [APIServerConfig()]

    async def get_next_item(self) -> int:
        return self.rng.randrange(1000)

    def prompt(self, item: Any) -> str:
        return f"Say {item}."

    async def score(self, item: Any, text: str) -> float:
        await asyncio.sleep(self.pace_s)
        return float(zlib.crc32(text.encode()) % 2)

    def eval_items(self) -> list[int]:
        return list(range(self.config.eval_tasks))


if __name__ == "__main__":
    PacedEnv.cli()
