"""The environment `gsm8k`, also called `gsm8k_tinker`: grade-school word problems with exact
answers in a box.

A template: copy it, change `load_dataset`, `prompt` and `score_answer`.

Source: GSM8K (arXiv 2110.14168), read from the hub or from files in its form.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from halteres.config.problem import MissingPackage
from halteres.environments.answers import boxed_answer, is_number
from halteres.environments.config import APIServerConfig, BaseEnvConfig, setting
from halteres.environments.rows import Row, load_rows
from halteres.environments.single_turn import SingleTurnEnv

INSTALL = (
    "pip install 'halteres[hub]', or name a local JSONL file: --set "
    "env.dataset=/path/to/questions.jsonl"
)


class GSM8KConfig(BaseEnvConfig):
    """Settings of `gsm8k`."""

    dataset: str = setting(
        "openai/gsm8k",
        "a .jsonl file, a folder with train.jsonl and test.jsonl, or a name on the hub",
        reaches="name",
    )
    prompt_template: str = setting(
        "Question: {question}\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.",
        "the user's message; {question} is replaced",
        reaches="nothing",
    )
    example_question: str = setting(
        "Kim reads 12 pages on each of 5 days. The book has 100 pages. How many pages are left?",
        "shown to people who talk to the trained policy",
        reaches="nothing",
    )


class GSM8KEnv(SingleTurnEnv):
    """GSM8K word problems, from the hub or a local file; 1 for the right number in the last box,
    else 0.
    """

    name = "gsm8k"
    env_config_cls: ClassVar[type[BaseEnvConfig]] = GSM8KConfig
    config: GSM8KConfig
    train: Sequence[Row]
    held_out: Sequence[Row]

    @classmethod
    def config_init(cls) -> tuple[GSM8KConfig, Sequence[APIServerConfig]]:
        """Groups of 16, batches of 128, answers of up to 1024 tokens."""
        config = GSM8KConfig(group_size=16, batch_size=128, max_new_tokens=1024, total_steps=-1)
        return config, [APIServerConfig()]

    @classmethod
    def missing_packages(cls, config: GSM8KConfig) -> Sequence[MissingPackage]:
        """`datasets`, where the questions are on the hub."""
        path = Path(config.dataset).expanduser()
        if (
            path.is_dir()
            or path.suffix == ".jsonl"
            or path.is_absolute()
            or importlib.util.find_spec("datasets")
        ):
            return ()
        return (MissingPackage(package="datasets", fix=INSTALL),)

    def load_dataset(self) -> None:
        """The questions to train on, and the held-out ones."""
        self.train, self.held_out = load_rows(self.config.dataset)

    async def get_next_item(self) -> Row:
        """Any question of the training split."""
        return self.rng.choice(self.train)

    def prompt(self, item: Row) -> str:
        """The question in the template."""
        return self.config.prompt_template.replace("{question}", item.question)

    def score_answer(self, item: Row, answer: str) -> float:
        """1 for exactly the right number in the last box, else 0."""
        return float(is_number(boxed_answer(answer), item.answer))

    def eval_items(self) -> Sequence[Row]:
        """The first `eval_tasks` held-out questions."""
        return self.held_out[: self.config.eval_tasks]


if __name__ == "__main__":
    GSM8KEnv.cli()
