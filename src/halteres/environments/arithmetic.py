"""The environment `arithmetic`: easy problems of one or two steps; 1 for the right integer in the
last box, else 0.

Whether an equation was written is a metric, not a reward.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from halteres.environments.config import APIServerConfig, BaseEnvConfig, setting
from halteres.environments.problems import Problem, draw_problem, is_correct, is_worked
from halteres.environments.single_turn import SingleTurnEnv

EVAL_SEED = 20_260_801  # of the held-out problems: the same for every run


class ArithmeticConfig(BaseEnvConfig):
    """Settings of `arithmetic`."""

    prompt_template: str = setting(
        "Question: {question}\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.",
        "the user's message; {question} is replaced",
        reaches="nothing",
    )
    example_question: str = setting(
        "What is the value of (3 + 4) * 2? Give the result as a whole number.",
        "shown to people who talk to the trained policy",
        reaches="nothing",
    )


class ArithmeticEnv(SingleTurnEnv):
    """Easy arithmetic with exact answers; the built-in model learns it in about a minute."""

    name = "arithmetic"
    env_config_cls: ClassVar[type[BaseEnvConfig]] = ArithmeticConfig
    config: ArithmeticConfig

    @classmethod
    def config_init(cls) -> tuple[ArithmeticConfig, Sequence[APIServerConfig]]:
        """Groups of 16, batches of 256, answers of up to 64 tokens."""
        config = ArithmeticConfig(
            group_size=16,
            batch_size=256,
            max_new_tokens=64,
            max_token_length=256,
            max_num_workers=64,
            max_eval_workers=64,
            ensure_scores_are_not_same=False,
            eval_tasks=128,
            eval_samples=4,
            total_steps=-1,
            use_wandb=False,
        )
        return config, [APIServerConfig()]

    async def get_next_item(self) -> Problem:
        """A problem of the training split."""
        return draw_problem(self.rng, "train")

    def prompt(self, item: Any) -> str:
        """The question in the template."""
        return self.config.prompt_template.replace("{question}", item.question)

    def score(self, item: Any, text: str) -> float:
        """1 for the right answer, else 0."""
        return float(is_correct(text, item))

    def measure(self, item: Any, text: str) -> Mapping[str, float]:
        """Whether the answer shows an equation before its box."""
        return {"worked_share": float(is_worked(text))}

    def eval_items(self) -> list[Problem]:
        """Held-out problems, the first `eval_tasks` of one fixed sequence."""
        rng = random.Random(EVAL_SEED)  # noqa: S311 - tasks, not secrets
        return [draw_problem(rng, "eval") for _ in range(self.config.eval_tasks)]


if __name__ == "__main__":
    ArithmeticEnv.cli()
