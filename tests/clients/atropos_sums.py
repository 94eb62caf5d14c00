"""An environment as an Atropos user writes it: atroposlib 0.4.0 and nothing of ours.

It runs in an environment of its own (`python atropos_sums.py serve --config FILE`), asks for the
sum of two numbers, and takes tokens and logprobs from atroposlib's managed server.
"""

from __future__ import annotations

import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class SumsEnv(BaseEnv):
    """One group per task: the same sum, `group_size` answers."""

    name = "sums"
    env_config_cls = BaseEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(), [APIServerConfig()]

    async def setup(self) -> None:
        self.random = random.Random(0)

    async def get_next_item(self) -> tuple[int, int]:
        return self.random.randint(1, 9), self.random.randint(1, 9)

    async def collect_trajectories(
        self, item: tuple[int, int]
    ) -> tuple[ScoredDataGroup | None, list[Any]]:
        messages = [{"role": "user", "content": f"What is {item[0]} + {item[1]}?"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=24, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node, choice in zip(nodes, completion.choices, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(score(sum(item), choice.message.content or ""))
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to evaluate."""


def score(wanted: int, answer: str) -> float:
    """1 for the sum; for the rest up to 0.5, so that answers of one task differ and a group teaches
    something.
    """
    return (
        1.0 if str(wanted) in answer else 0.5 * sum(map(str.isdigit, answer)) / max(1, len(answer))
    )


if __name__ == "__main__":
    SumsEnv.cli()
