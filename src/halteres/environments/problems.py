"""Easy arithmetic problems: the smallest task on which reinforcement learning can be watched; and preference pairs made
of them, the smallest data on which a reward model can.

Never: samples a model, holds a generator of its own, reads a file.
Promise: a problem's split depends on its numbers and operators alone, so a held-out problem never appears in
training, in no wording, on no machine. The same seed gives the same problems and pairs.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Operator = Literal["+", "-", "*"]
Split = Literal["train", "eval"]
Wording = Literal["expression", "steps", "story"]

OPERATORS: tuple[Operator, ...] = ("+", "-", "*")
WORDINGS: tuple[Wording, ...] = ("expression", "steps", "story")
EVAL_SHARE = 0.1  # of all problems, by hash
TWO_STEP_SHARE = 0.7  # of all draws

_NAMES = ("Ann", "Ben", "Tom", "Eva", "Max", "Lea")
_THINGS = ("apples", "coins", "books", "stones", "cards", "eggs")
_COMMANDS = {"+": "add", "-": "subtract", "*": "multiply by"}
_DEEDS = {"+": "finds {} more", "-": "gives {} away", "*": "multiplies them by {}"}
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_INTEGER = re.compile(r"-?[0-9]+")
_EQUATION = re.compile(r"[0-9]\s*[-+*]\s*[0-9]+\s*=\s*-?[0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question and its answer; operators apply from left to right."""

    question: str  # as asked, without the chat template
    answer: int  # 0 or more, at most two digits
    numbers: tuple[int, ...]  # two or three of 1-9
    operators: tuple[Operator, ...]  # one fewer than numbers
    wording: Wording

    @property
    def key(self) -> str:
        """The content without its wording, e.g. "3+4*2" for (3 + 4) * 2."""
        return _key(self.numbers, self.operators)


def draw_problem(rng: random.Random, split: Split) -> Problem:
    """Draw a problem of the split; the same generator state gives the same problem."""
    while True:
        num_steps = 2 if rng.random() < TWO_STEP_SHARE else 1
        numbers = tuple(rng.randint(1, 9) for _ in range(num_steps + 1))
        operators: tuple[Operator, ...] = tuple(rng.choice(OPERATORS) for _ in range(num_steps))
        values = _values(numbers, operators)
        # Only one-digit numbers are multiplied, as in the multiplication table.
        multiplied = (value for value, operator in zip(values, operators, strict=False) if operator == "*")
        if min(values) < 0 or not all(1 <= value <= 9 for value in multiplied):
            continue
        if split_of(_key(numbers, operators)) == split:
            wording = rng.choice(WORDINGS)
            question = _question(rng, numbers, operators, wording)
            return Problem(question=question, answer=values[-1], numbers=numbers, operators=operators, wording=wording)


def split_of(key: str) -> Split:
    """The split of a problem's `key`: a pure function of the text, equal on every machine."""
    digest = hashlib.sha256(f"halteres/problems/1:{key}".encode()).digest()
    return "eval" if int.from_bytes(digest[:4], "big") < EVAL_SHARE * 2**32 else "train"


def user_message(problem: Problem) -> str:
    """The user's message of seed 003's `qwen3_general` template."""
    return f"Question: {problem.question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def worked_answer(problem: Problem) -> str:
    """A right answer that shows each step as an equation, then the box."""
    return f"{' '.join(equations(problem))} So the answer is \\boxed{{{problem.answer}}}."


def equations(problem: Problem) -> tuple[str, ...]:
    """The steps of a worked answer, e.g. ("3 + 4 = 7.", "7 * 2 = 14.")."""
    values = _values(problem.numbers, problem.operators)
    steps = zip(values, problem.operators, problem.numbers[1:], values[1:], strict=False)
    return tuple(f"{left} {operator} {right} = {value}." for left, operator, right, value in steps)


def extract_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` without outer spaces, or None where there is none."""
    found = _BOXED.findall(text)
    return found[-1].strip() if found else None


def is_correct(text: str, problem: Problem) -> bool:
    """Whether the last box holds exactly the answer, as an integer in ASCII digits."""
    boxed = extract_boxed(text)
    return boxed is not None and _INTEGER.fullmatch(boxed) is not None and int(boxed) == problem.answer


def is_worked(text: str) -> bool:
    """Whether an equation, right or wrong, stands before the last box."""
    boxes = list(_BOXED.finditer(text))
    return _EQUATION.search(text[: boxes[-1].start()] if boxes else text) is not None


def _values(numbers: tuple[int, ...], operators: tuple[Operator, ...]) -> tuple[int, ...]:
    """The first number and the value after each step."""
    values = [numbers[0]]
    for operator, number in zip(operators, numbers[1:], strict=True):
        left = values[-1]
        values.append({"+": left + number, "-": left - number, "*": left * number}[operator])
    return tuple(values)


def _key(numbers: tuple[int, ...], operators: tuple[Operator, ...]) -> str:
    pairs = zip(operators, numbers[1:], strict=True)
    return str(numbers[0]) + "".join(f"{operator}{number}" for operator, number in pairs)


def _question(rng: random.Random, numbers: tuple[int, ...], operators: tuple[Operator, ...], wording: Wording) -> str:
    if wording == "expression":
        first = f"{numbers[0]} {operators[0]} {numbers[1]}"
        expression = first if len(numbers) == 2 else f"({first}) {operators[1]} {numbers[2]}"
        return f"What is the value of {expression}? Give the result as a whole number."
    parts = list(zip(operators, numbers[1:], strict=True))
    if wording == "steps":
        commands = ", then ".join(f"{_COMMANDS[operator]} {number}" for operator, number in parts)
        return f"Start with the number {numbers[0]}, {commands}. What is the result at the end?"
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    deeds = ", then ".join(_DEEDS[operator].format(number) for operator, number in parts)
    return f"{name} has {numbers[0]} {things}, {deeds}. How many {things} does {name} have at the end?"


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


def preference_pairs(count: int, *, seed: int = 0, split: Split = "train") -> Iterator[dict[str, Any]]:
    """Rows of messages, all different, their kinds in turn: `prompt`, `chosen`, `rejected`, `kind`.

    *polite*: a friendly remark beside the answer against a rude one. *complete*: a whole answer against one that breaks
    off, and is often shorter. *correct*: the right number against a near one, in an answer of the same form; the model
    has to do the sum. In the first and the last, the length of a side does not tell which is chosen.

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
        friendly, rude = rng.choice(_FRIENDLY), rng.choice(_RUDE)
        return (f"{friendly} {right}", f"{rude} {right}") if first else (f"{right} {friendly}", f"{right} {rude}")
    begun = " ".join(equations(problem)[: rng.randint(0, 1)])
    return right, " ".join(part for part in (begun, rng.choice(_BREAKS_OFF)) if part) or "Well,"


def _answer(problem: Problem, number: int, *, steps: bool) -> str:
    """With the steps or without; a wrong number is wrong in the last step as well."""
    shown = list(equations(problem)) if steps else []
    if shown:
        shown[-1] = f"{shown[-1].rpartition('= ')[0]}= {number}."
    return " ".join([*shown, f"So the answer is \\boxed{{{number}}}."])
