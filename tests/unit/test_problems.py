"""The arithmetic problems: what is drawn, what is held out, what counts as right. All of it is our
choice.
"""

import random
import re
from collections.abc import Iterator

import pytest

from halteres.environments.problems import (
    EVAL_SHARE,
    OPERATORS,
    WORDINGS,
    Problem,
    Split,
    draw_problem,
    equations,
    extract_boxed,
    is_correct,
    is_worked,
    split_of,
    user_message,
    worked_answer,
)

SPLITS: tuple[Split, ...] = ("train", "eval")
RECORDED_SPLITS: dict[str, Split] = {
    "3+4": "train",
    "9*9": "train",
    "3+4*2": "train",
    "5+9": "eval",
    "6*5": "eval",
}


def draws(split: Split, num_problems: int = 2000, seed: int = 0) -> Iterator[Problem]:
    rng = random.Random(seed)
    return (draw_problem(rng, split) for _ in range(num_problems))


def problem(numbers: tuple[int, ...] = (3, 4, 2), answer: int = 14) -> Problem:
    return Problem(
        question="What is the value of (3 + 4) * 2? Give the result as a whole number.",
        answer=answer,
        numbers=numbers,
        operators=("+", "*"),
        wording="expression",
    )


def test_the_same_generator_state_draws_the_same_problems() -> None:
    assert list(draws("train", 50, seed=7)) == list(draws("train", 50, seed=7))
    assert list(draws("train", 50, seed=7)) != list(draws("train", 50, seed=8))


def test_numbers_are_one_digit_and_answers_are_small_and_never_negative() -> None:
    for drawn in draws("train"):
        assert set(drawn.numbers) <= set(range(1, 10))
        assert len(drawn.operators) == len(drawn.numbers) - 1 in (1, 2)
        assert 0 <= drawn.answer <= 99


def test_answers_agree_with_python_from_left_to_right() -> None:
    for drawn in draws("train"):
        text = str(drawn.numbers[0])
        for operator, number in zip(drawn.operators, drawn.numbers[1:], strict=True):
            text = f"({text}){operator}{number}"
        assert drawn.answer == eval(text)  # noqa: S307  our own digits and operators


def test_every_operator_length_and_wording_occurs() -> None:
    drawn = list(draws("train"))
    assert {operator for p in drawn for operator in p.operators} == set(OPERATORS)
    assert {len(p.operators) for p in drawn} == {1, 2}
    assert {p.wording for p in drawn} == set(WORDINGS)


@pytest.mark.parametrize("split", SPLITS)
def test_a_draw_belongs_to_the_split_asked_for(split: Split) -> None:
    assert {split_of(drawn.key) for drawn in draws(split)} == {split}


def test_no_held_out_problem_is_drawn_for_training_in_any_wording() -> None:
    seen = {drawn.key for drawn in draws("train", 20_000)}
    held_out = {drawn.key for drawn in draws("eval", 4_000)}
    assert seen and held_out and not seen & held_out


def test_the_split_does_not_depend_on_the_machine_or_the_process() -> None:
    """Recorded once: a change would move problems between training and evaluation."""
    assert {key: split_of(key) for key in RECORDED_SPLITS} == RECORDED_SPLITS


def test_about_a_tenth_of_all_problems_is_held_out() -> None:
    keys = [
        f"{a}{f}{b}{g}{c}"
        for a in range(9)
        for b in range(9)
        for c in range(9)
        for f in OPERATORS
        for g in OPERATORS
    ]
    share = sum(split_of(key) == "eval" for key in keys) / len(keys)
    assert abs(share - EVAL_SHARE) < 0.01


def test_the_key_is_the_content_without_the_wording() -> None:
    assert problem().key == "3+4*2"


def test_the_questions_of_all_wordings_read_as_recorded() -> None:
    drawn = {
        p.wording: p.question
        for p in draws("train", 100)
        if p.key == "9-2" or len(p.operators) == 2
    }
    assert re.fullmatch(
        r"What is the value of \(\d [-+*] \d\) [-+*] \d\? Give the result as a whole number\.",
        drawn["expression"],
    )
    assert re.fullmatch(
        r"Start with the number \d, [a-z ]+ \d, then [a-z ]+ \d\. What is the result at the end\?",
        drawn["steps"],
    )
    assert re.fullmatch(
        r"[A-Z][a-z]+ has \d [a-z]+, [a-z\d ]+, then [a-z\d ]+\. How many [a-z]+ does [A-Z][a-z]+ "
        r"have at the end\?",
        drawn["story"],
    )


def test_the_user_message_is_the_general_template_of_seed_003() -> None:
    assert user_message(problem()) == (
        "Question: What is the value of (3 + 4) * 2? Give the result as a whole number."
        "\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def test_a_worked_answer_shows_each_step_and_is_right() -> None:
    assert worked_answer(problem()) == "3 + 4 = 7. 7 * 2 = 14. So the answer is \\boxed{14}."
    assert equations(problem()) == ("3 + 4 = 7.", "7 * 2 = 14.")
    for drawn in draws("eval", 500):
        assert is_correct(worked_answer(drawn), drawn)
        assert is_worked(worked_answer(drawn))


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{14}", "14"),
        (r"first \boxed{1}, then \boxed{ 2 }.", "2"),
        (r"\boxed{}", ""),
        (r"\boxed{3", None),
        ("boxed{3}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_box_counts(text: str, boxed: str | None) -> None:
    assert extract_boxed(text) == boxed


@pytest.mark.parametrize(
    "text",
    [r"\boxed{14}", r"\boxed{3} no: \boxed{ 14 }", r"\boxed{014}", r"x \boxed{14}<|im_end|>"],
)
def test_an_exact_integer_is_correct(text: str) -> None:
    assert is_correct(text, problem())


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{15}",
        r"\boxed{14} or \boxed{15}",
        r"\boxed{14.0}",
        r"\boxed{1 4}",
        r"\boxed{7 * 2}",
        r"\boxed{١٤}",
        "14",
        "",
    ],
)
def test_anything_else_is_wrong(text: str) -> None:
    assert not is_correct(text, problem())


@pytest.mark.parametrize(
    ("text", "worked"),
    [
        (r"3 + 4 = 7. So the answer is \boxed{7}.", True),
        (r"3+4=8, \boxed{8}", True),
        (r"2 - 5 = -3 \boxed{-3}", True),
        (r"I think the answer is \boxed{7}.", False),
        (r"\boxed{7} since 3 + 4 = 7", False),
        ("3 + 4 = 7", True),
        ("3 + 4 is 7", False),
    ],
)
def test_an_answer_is_worked_when_an_equation_stands_before_its_box(
    text: str, worked: bool
) -> None:
    assert is_worked(text) is worked
