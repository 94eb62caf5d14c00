"""Preference pairs made of arithmetic problems: the smallest data on which a reward model can be
watched.

Three kinds of preference. *polite*: a friendly remark beside the answer against a rude one.
*complete*: a whole answer against one that breaks off, and is often shorter. *correct*: the right
number against a near one, in an answer of the same form; the model has to do the sum. In the first
and the last, the length of a side does not tell which is chosen. Promise: the same seed gives the
same rows; training and held-out rows have no problem in common (`problems.split_of`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

from halteres.environments.problems import Problem, Split, draw_problem, equations, user_message

Kind = Literal["correct", "polite", "complete"]

KINDS: tuple[Kind, ...] = ("correct", "polite", "complete")

_FRIENDLY = (
    "I am glad to help.",
    "Thank you for the question, I am happy to help you with it.",
    "Of course!",
    "You are welcome to ask again.",
)
_RUDE = (
    "Work it out yourself.",
    "What a silly question, and do not ask me again.",
    "So what?",
    "You could have done that alone.",
)
_BREAKS_OFF = ("And so on.", "The rest is left out.", "I stop here, without the result.", "")


def preference_pairs(
    count: int, *, seed: int = 0, split: Split = "train"
) -> Iterator[dict[str, Any]]:
    """Rows of messages, all different, their kinds in turn: `prompt`, `chosen`, `rejected`, `kind`.

    >>> row = next(preference_pairs(1))
    >>> row["prompt"][0]["role"], row["chosen"][0]["role"], row["kind"]
    ('user', 'assistant', 'correct')
    """
    rng = random.Random(f"{seed}:{split}")  # noqa: S311 - tasks, not secrets
    seen: set[tuple[str, str, str]] = set()
    while len(seen) < count:
        problem, kind = draw_problem(rng, split), KINDS[len(seen) % len(KINDS)]
        chosen, rejected = _sides(rng, problem, kind)
        if (problem.question, chosen, rejected) in seen:
            continue
        seen.add((problem.question, chosen, rejected))
        yield {
            "prompt": [{"role": "user", "content": user_message(problem)}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
            "kind": kind,
        }


def _sides(rng: random.Random, problem: Problem, kind: Kind) -> tuple[str, str]:
    steps, answer = rng.random() < 0.5, problem.answer
    right = _answer(problem, answer, steps=steps)
    if kind == "correct":
        near = [number for number in range(max(0, answer - 3), answer + 4) if number != answer]
        return right, _answer(problem, rng.choice(near), steps=steps)
    if kind == "polite":
        first = rng.random() < 0.5
        friendly, rude = (
            f"{remark} {right}" if first else f"{right} {remark}"
            for remark in map(rng.choice, (_FRIENDLY, _RUDE))
        )
        return friendly, rude
    begun = " ".join(equations(problem)[: rng.randint(0, 1)])
    return right, " ".join(part for part in (begun, rng.choice(_BREAKS_OFF)) if part) or "Well,"


def _answer(problem: Problem, number: int, *, steps: bool) -> str:
    """With the steps or without; a wrong number is wrong in the last step as well."""
    shown = list(equations(problem)) if steps else []
    if shown:
        shown[-1] = f"{shown[-1].rpartition('= ')[0]}= {number}."
    return " ".join([*shown, f"So the answer is \\boxed{{{number}}}."])
