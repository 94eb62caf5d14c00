"""The environment `arithmetic`."""

from __future__ import annotations

import random

from halteres.environments.arithmetic import ArithmeticConfig, ArithmeticEnv
from halteres.environments.config import APIServerConfig
from halteres.environments.problems import draw_problem, split_of, user_message, worked_answer


def arithmetic(**changes: object) -> ArithmeticEnv:
    config, servers = ArithmeticEnv.config_init()
    return ArithmeticEnv(ArithmeticConfig(**{**config.model_dump(), **changes}), servers)


def test_it_asks_as_the_problems_are_worded() -> None:
    env = arithmetic()
    problem = draw_problem(random.Random(0), "train")
    assert env.prompt(problem) == user_message(problem)
    assert env.messages(problem) == [{"role": "user", "content": user_message(problem)}]


def test_a_system_prompt_comes_first() -> None:
    messages = arithmetic(system_prompt="Be brief.").messages(
        draw_problem(random.Random(0), "train")
    )
    assert [message["role"] for message in messages] == ["system", "user"]


async def test_training_draws_from_its_own_split_and_evaluation_from_the_other() -> None:
    env = arithmetic(eval_tasks=300)
    drawn = [await env.get_next_item() for _ in range(300)]
    assert {split_of(problem.key) for problem in drawn} == {"train"}
    assert {split_of(problem.key) for problem in env.eval_items()} == {"eval"}


def test_held_out_problems_are_the_same_for_every_run_and_nested() -> None:
    assert (
        arithmetic(seed=1, eval_tasks=64).eval_items()
        == arithmetic(seed=2, eval_tasks=128).eval_items()[:64]
    )


def test_the_right_box_pays_one_and_anything_else_nothing() -> None:
    env = arithmetic()
    problem = draw_problem(random.Random(3), "train")
    right = worked_answer(problem)
    assert (
        env.score(problem, right),
        env.score(problem, "\\boxed{x}"),
        env.score(problem, ""),
    ) == (1.0, 0.0, 0.0)
    assert env.measure(problem, right) == {"worked_share": 1.0}
    assert env.measure(problem, f"\\boxed{{{problem.answer}}}") == {"worked_share": 0.0}


def test_its_defaults_are_those_of_the_recipe() -> None:
    config, servers = ArithmeticEnv.config_init()
    assert (
        config.group_size,
        config.batch_size,
        config.max_new_tokens,
        config.max_token_length,
    ) == (16, 256, 64, 256)
    assert (config.eval_tasks, config.eval_samples, config.ensure_scores_are_not_same) == (
        128,
        4,
        False,
    )
    assert not config.use_wandb
    assert servers == [APIServerConfig()]
