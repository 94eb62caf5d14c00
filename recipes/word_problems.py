"""Makes the rows of the environment `word_problems`: python recipes/word_problems.py

Owns: the stories, how many rows there are, that no sum of the test rows is in the training rows in
other words. Never: changes what it wrote before without a change here: the seed is fixed. The sums
are those of `halteres.environments.problems`, with its split: the built-in model has seen no test
row's sum.
"""

import json
import random

from halteres.environments.problems import Problem, Split, draw_problem, equations
from halteres.environments.word_problems import ROWS

SEED = 20_261_122
SIZES: dict[Split, int] = {"train": 800, "eval": 128}
FILES: dict[Split, str] = {"train": "train.jsonl", "eval": "test.jsonl"}

PEOPLE = ("Mia", "Sam", "Ida", "Leo", "Zoe", "Jon", "Amy", "Kim")
STORIES = (
    (
        "{who} has {first} {things}, {rest}. How many {things} does {who} have at the end?",
        {"+": "buys {} more", "-": "gives {} away", "*": "multiplies them by {}"},
        ("pens", "stamps", "toys", "shells"),
    ),
    (
        "{who} has {first} {things} and {rest}. How many {things} does {who} have now?",
        {"+": "finds {} more", "-": "sells {} of them", "*": "multiplies them by {}"},
        ("coins", "beads", "nuts"),
    ),
    (
        "{who} bakes {first} {things}, {rest}. How many {things} does {who} have at the end?",
        {"+": "makes {} more", "-": "gives {} away", "*": "multiplies them by {}"},
        ("cakes", "rolls", "pies"),
    ),
    (
        "There are {first} {things} in a box. {who} {rest}. How many {things} are in the box at "
        "the end?",
        {"+": "adds {} more", "-": "takes {} away", "*": "multiplies them by {}"},
        ("cards", "keys", "balls"),
    ),
)


def question(problem: Problem, rng: random.Random) -> str:
    """A story that asks for the problem's result."""
    frame, deeds, things = rng.choice(STORIES)
    rest = [
        deeds[operator].format(number)
        for operator, number in zip(problem.operators, problem.numbers[1:], strict=True)
    ]
    return frame.format(
        who=rng.choice(PEOPLE),
        first=problem.numbers[0],
        things=rng.choice(things),
        rest=", then ".join(rest),
    )


def rows(split: Split) -> list[dict[str, str]]:
    """The rows of a split, each with other numbers or operators than all others."""
    rng = random.Random(f"{SEED} {split}")
    problems: dict[str, Problem] = {}
    while len(problems) < SIZES[split]:
        problem = draw_problem(rng, split)
        if _is_told_well(problem):
            problems.setdefault(problem.key, problem)
    return [
        {
            "question": question(problem, rng),
            "answer": f"{' '.join(equations(problem))} #### {problem.answer}",
        }
        for problem in problems.values()
    ]


def _is_told_well(problem: Problem) -> bool:
    """Nobody has "1 pens", or makes it "1 times as many"."""
    times = (
        number
        for operator, number in zip(problem.operators, problem.numbers[1:], strict=True)
        if operator == "*"
    )
    return problem.numbers[0] > 1 and 1 not in times


def main() -> None:
    """Write both files."""
    ROWS.mkdir(parents=True, exist_ok=True)
    for split, file in FILES.items():
        text = "".join(json.dumps(row) + "\n" for row in rows(split))
        (ROWS / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
