"""The environment `word_problems`: short stories with small numbers, a set of our own that comes
with the package.

The rows are made by recipes/word_problems.py. Their results are no results on GSM8K, which is
another environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from halteres.config.problem import MissingPackage
from halteres.environments.config import APIServerConfig, BaseEnvConfig, setting
from halteres.environments.gsm8k_tinker import GSM8KEnv
from halteres.environments.rows import load_rows

ROWS = Path(__file__).with_name("data") / "word_problems"
"""A folder with train.jsonl and test.jsonl."""


class WordProblemsConfig(BaseEnvConfig):
    """Settings of `word_problems`."""

    prompt_template: str = setting(
        "Question: {question}\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.",
        "the user's message; {question} is replaced",
        reaches="nothing",
    )
    example_question: str = setting(
        "Mia has 3 pens, buys 4 more, then gives 2 away. How many pens does Mia have at the end?",
        "shown to people who talk to the trained policy",
        reaches="nothing",
    )


class WordProblemsEnv(GSM8KEnv):
    """Short word problems made for this package; small enough for the built-in model."""

    name = "word_problems"
    env_config_cls: ClassVar[type[BaseEnvConfig]] = WordProblemsConfig
    config: WordProblemsConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # it has no `dataset`

    @classmethod
    def missing_packages(cls, config: BaseEnvConfig) -> Sequence[MissingPackage]:
        """None: the problems are in the package."""
        return ()

    @classmethod
    def config_init(cls) -> tuple[WordProblemsConfig, Sequence[APIServerConfig]]:  # pyright: ignore[reportIncompatibleMethodOverride]
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


if __name__ == "__main__":
    WordProblemsEnv.cli()
