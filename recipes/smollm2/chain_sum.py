"""The environment `chain_sum`: two numbers of two digits, added or subtracted, asked and scored by
reasoning-gym's task of that name.

Two examples in the prompt, the package's own questions. 1 for an answer whose last number is the
result. No question of an evaluation is one of training's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from halteres.environments.config import APIServerConfig
from halteres.environments.reasoning_gym_tasks import (
    NUM_HELD_OUT,
    NUM_TRAIN,
    ReasoningGymConfig,
    ReasoningGymEnv,
    TaskItem,
)

QUESTION = "State the final answer to the following arithmetic problem: {} ="

EXAMPLES = (("21 + 34", "55"), ("17 - 42", "-25"))
"""Shown as turns of the chat before each question."""


class ChainSum(ReasoningGymEnv):
    """Sums and differences of two numbers of two digits."""

    name = "chain_sum"
    held_out_questions: frozenset[str] = frozenset()

    @classmethod
    def config_init(cls) -> tuple[ReasoningGymConfig, Sequence[APIServerConfig]]:
        """Groups of 8, answers of up to 8 tokens."""
        settings = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
        config = ReasoningGymConfig(
            task="chain_sum",
            task_settings=settings,
            group_size=8,
            batch_size=64,
            max_new_tokens=8,
            max_token_length=192,
            max_num_workers=16,
            eval_tasks=64,
            eval_samples=2,
            success_threshold=0.99,
        )
        return config, [APIServerConfig()]

    async def load_dataset(self) -> None:
        """The package's worker, and the questions that training must not ask."""
        await super().load_dataset()
        held_out = [await self.item(NUM_TRAIN + number) for number in range(NUM_HELD_OUT)]
        self.held_out_questions = frozenset(item.question for item in held_out)

    async def get_next_item(self) -> TaskItem:
        """An item of the training split."""
        while True:
            item = await super().get_next_item()
            if item.question not in self.held_out_questions:
                return item

    def prompt(self, item: TaskItem) -> list[dict[str, str]]:
        """The examples with their answers, then the question."""
        chat: list[dict[str, str]] = []
        for problem, answer in EXAMPLES:
            chat.append({"role": "user", "content": QUESTION.format(problem)})
            chat.append({"role": "assistant", "content": answer})
        return [*chat, {"role": "user", "content": item.question}]

    async def score_answer(self, item: TaskItem, answer: str) -> float:
        """1 where the package pays in full for the last number, in the form that it reads."""
        numbers = re.findall(r"-?\d+", answer)
        if not numbers:
            return 0.0
        paid = await super().score_answer(item, f"<answer>{numbers[-1]}</answer>")
        return float(paid >= self.config.success_threshold)


if __name__ == "__main__":
    ChainSum.cli()
