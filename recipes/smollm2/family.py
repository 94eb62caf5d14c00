"""The environment `family`: who is what to whom, asked and scored by reasoning-gym's task
family_relationships, in families of three and four.

Four examples in the prompt, the package's own questions with other names. 1 for an answer whose
last word is the relation. No question of an evaluation is one of training's.
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

THREE = "Hugo is married to Nina. They have a child called Paul."
FOUR = "Anton is married to Clara. They have a child called Felix. Felix is married to Rosa."
ONE_WORD = "Respond only with the word that describes their relationship."

EXAMPLES = (
    (f"{THREE}\n\nWhat is Nina to Paul? {ONE_WORD}", "mother"),
    (f"{FOUR}\n\nWhat relation is Anton to Rosa? Answer with a single word.", "father-in-law"),
    (f"{FOUR}\n\nWhat is Rosa to Felix? {ONE_WORD}", "wife"),
    (f"{THREE}\n\nHow is Paul related to Hugo? Provide the relationship in one word.", "son"),
)
"""Shown as turns of the chat before each question."""


class Family(ReasoningGymEnv):
    """Relations in a family of three or four."""

    name = "family"
    held_out_questions: frozenset[str] = frozenset()

    @classmethod
    def config_init(cls) -> tuple[ReasoningGymConfig, Sequence[APIServerConfig]]:
        """Groups of 8, answers of up to 8 tokens."""
        config = ReasoningGymConfig(
            task="family_relationships",
            task_settings={"min_family_size": 3, "max_family_size": 4},
            group_size=8,
            batch_size=64,
            max_new_tokens=8,
            max_token_length=384,
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
        for question, answer in EXAMPLES:
            chat.append({"role": "user", "content": question})
            chat.append({"role": "assistant", "content": answer})
        return [*chat, {"role": "user", "content": item.question}]

    async def score_answer(self, item: TaskItem, answer: str) -> float:
        """What the package pays for the last word, in the form that `reasoning_gym` reads."""
        words = re.findall(r"\w+(?:-\w+)*", answer)
        if not words:
            return 0.0
        return await super().score_answer(item, f"<answer>{words[-1]}</answer>")


if __name__ == "__main__":
    Family.cli()
