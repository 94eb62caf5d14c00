"""What an environment file asks, and what it pays: a program, because the file is the agent's.

    python probe.py FILE < TEMPLATES

Prints {"asks": [...], "pays": {template: [...]}}: prompts of held-out and of training tasks; the
score of each template as an answer to each of a few problems of our own, or what scoring raised. In
a template RIGHT stands for the answer, WRONG for another number, WORK for the steps that lead to
the answer.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import random
import sys
from pathlib import Path
from typing import Any

from halteres.environments.problems import Problem, draw_problem, equations
from halteres.environments.single_turn import SingleTurnEnv

NUM_PROBLEMS = 24


def environment(file: Path) -> SingleTurnEnv:
    """The file's environment, without a model."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    kinds = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, SingleTurnEnv) and kind.__module__ == file.stem
    ]
    env = object.__new__(kinds[-1])
    env.config, env.rng = kinds[-1].config_init()[0], random.Random(0)
    return env


def filled(template: str, problem: Problem) -> str:
    """A template as an answer to a problem."""
    words = {
        "RIGHT": problem.answer,
        "WRONG": problem.answer + 1,
        "WORK": " ".join(equations(problem)),
    }
    for word, meant in words.items():
        template = template.replace(word, str(meant))
    return template


async def pay(env: SingleTurnEnv, problem: Problem, text: str) -> float | str:
    """The score of an answer."""
    try:
        score: Any = env.score(problem, text)
        return float(await score if inspect.isawaitable(score) else score)
    except Exception as error:  # noqa: BLE001  the agent's code may raise anything
        return f"{type(error).__name__}: {error}"


async def main() -> None:
    """Ask and pay."""
    templates, env = json.load(sys.stdin), environment(Path(sys.argv[1]))
    items = [*env.eval_items(), *[await env.get_next_item() for _ in range(NUM_PROBLEMS)]]
    rng = random.Random(1)
    problems = [draw_problem(rng, "eval") for _ in range(NUM_PROBLEMS)]
    pays = {
        one: [await pay(env, problem, filled(one, problem)) for problem in problems]
        for one in templates
    }
    print(json.dumps({"asks": [env.prompt(item) for item in items], "pays": pays}))


if __name__ == "__main__":
    asyncio.run(main())
