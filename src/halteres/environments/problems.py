"""Easy arithmetic problems: the smallest task on which reinforcement learning can be watched.

Owns: which problems exist, how they are worded, which are held out, what counts as a right answer.
Never: samples a model, keeps a generator of its own, reads a file.
Promise: a problem's split depends on its numbers and operators alone, so a held-out problem never appears in
training, in no wording, on no machine.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from typing import Literal

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
        numbers, operators = _draw_content(rng)
        if _is_easy(numbers, operators) and split_of(_key(numbers, operators)) == split:
            wording = rng.choice(WORDINGS)
            question = _ask(rng, numbers, operators, wording)
            answer = _values(numbers, operators)[-1]
            return Problem(question=question, answer=answer, numbers=numbers, operators=operators, wording=wording)


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


def _draw_content(rng: random.Random) -> tuple[tuple[int, ...], tuple[Operator, ...]]:
    num_steps = 2 if rng.random() < TWO_STEP_SHARE else 1
    numbers = tuple(rng.randint(1, 9) for _ in range(num_steps + 1))
    return numbers, tuple(rng.choice(OPERATORS) for _ in range(num_steps))


def _is_easy(numbers: tuple[int, ...], operators: tuple[Operator, ...]) -> bool:
    """No value below 0, and only one-digit numbers are multiplied, as in the multiplication table."""
    values = _values(numbers, operators)
    multiplied = (value for value, operator in zip(values, operators, strict=False) if operator == "*")
    return min(values) >= 0 and all(1 <= value <= 9 for value in multiplied)


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


def _ask(rng: random.Random, numbers: tuple[int, ...], operators: tuple[Operator, ...], wording: Wording) -> str:
    if wording == "expression":
        return f"What is the value of {_expression(numbers, operators)}? Give the result as a whole number."
    if wording == "steps":
        commands = _joined([f"{_COMMANDS[op]} {n}" for op, n in zip(operators, numbers[1:], strict=True)])
        return f"Start with the number {numbers[0]}, {commands}. What is the result at the end?"
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    deeds = _joined([_DEEDS[op].format(n) for op, n in zip(operators, numbers[1:], strict=True)])
    return f"{name} has {numbers[0]} {things}, {deeds}. How many {things} does {name} have at the end?"


def _expression(numbers: tuple[int, ...], operators: tuple[Operator, ...]) -> str:
    first = f"{numbers[0]} {operators[0]} {numbers[1]}"
    return first if len(numbers) == 2 else f"({first}) {operators[1]} {numbers[2]}"


def _joined(parts: list[str]) -> str:
    return ", then ".join(parts)
