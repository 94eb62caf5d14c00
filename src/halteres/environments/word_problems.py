"""The environment `word_problems`: short stories with small numbers, a set of our own that comes with the package.

The rows are made by recipes/word_problems.py. Their results are no results on GSM8K, which is another environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from halteres.environments.answers import boxed_answer, is_number
from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.rows import Row, load_rows
from halteres.environments.single_turn import SingleTurnEnv

ROWS = Path(__file__).with_name("data") / "word_problems"
"""A folder with train.jsonl and test.jsonl."""


class WordProblemsConfig(BaseEnvConfig):
    """Settings of `word_problems`."""

    prompt_template: Annotated[str, Field(description="the user's message; {question} is replaced")] = (
        "Question: {question}\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    example_question: Annotated[str, Field(description="shown to people who talk to the trained policy")] = (
        "Mia has 3 pens, buys 4 more, then gives 2 away. How many pens does Mia have at the end?"
    )


class WordProblemsEnv(SingleTurnEnv):
    """Short word problems made for this package; small enough for the built-in model."""

    name = "word_problems"
    env_config_cls: ClassVar[type[BaseEnvConfig]] = WordProblemsConfig
    config: WordProblemsConfig
    train: Sequence[Row]
    held_out: Sequence[Row]

    @classmethod
    def config_init(cls) -> tuple[WordProblemsConfig, Sequence[APIServerConfig]]:
        """Groups of 16, batches of 256, answers of up to 64 tokens."""
        config = WordProblemsConfig(
            group_size=16,
            batch_size=256,
            max_new_tokens=64,
            max_token_length=256,
            max_num_workers=64,
            max_eval_workers=64,
            ensure_scores_are_not_same=False,
            total_steps=-1,
        )
        return config, [APIServerConfig()]

    def load_dataset(self) -> None:
        """The rows of both files."""
        self.train, self.held_out = load_rows(ROWS)

    async def get_next_item(self) -> Row:
        """Any of the rows to train on."""
        return self.rng.choice(self.train)

    def prompt(self, item: Row) -> str:
        """The question in the template."""
        return self.config.prompt_template.replace("{question}", item.question)

    def score_answer(self, item: Row, answer: str) -> float:
        """1 for exactly the right number in the last box, else 0."""
        return float(is_number(boxed_answer(answer), item.answer))

    def eval_items(self) -> Sequence[Row]:
        """The first `eval_tasks` held-out rows."""
        return self.held_out[: self.config.eval_tasks]


if __name__ == "__main__":
    WordProblemsEnv.cli()
