"""Answers that a scorer may evaluate: right ones pass, and nothing passes that could do more than
be a value.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halteres.environments.answer_filters import FILTERS

from .hostile_answers import Place, hostile_answers

RIGHT = {
    "binary_matrix": ("0 0 0\n0 1 0\n1 2 1", "[[0, 0], [0, 1]]"),
    "countdown": ("6*(98 - 54) - 34 - 66", "42*(30 - 4 - 23)", "7//2 + 3"),
    "intermediate_integration": (
        "-4*(-2*x - 8)**(3/2)/3 + C",
        "-2*x**3*cos(x) + 6*x**2*sin(x) + 12*x*cos(x) - 12*sin(x) + C",
        "3*Integral(x**3*cos(3*x), x) + C",
        "E**(-(x+1)) + 2**x + x**-2 + (x+1)**1.5 + x*ln(abs(x)) + C",
        "sin(x**2)**3",
    ),
    "n_queens": ("_ Q _ _\n_ _ _ Q\nQ _ _ _\n_ _ Q _", "[['_', 'Q'], [\"Q\", \"_\"]]"),
    "polynomial_multiplication": (
        "-327405*y**6 + 934619*y**5 - 1083174*y**4 + 623128*y**3",
        "x**2*y + 3*z",
    ),
    "puzzle24": ("10*(8 - 5) - 6", "9*3*8/9"),
    "simple_integration": ("-34*x**8/15 - 5*x/4 + C", "-5*X**9 - 2*X**6/3 + 4*X**3 + C"),
    "spiral_matrix": ("9 1 6 9 3", "[9, 1, 6]"),
    "string_insertion": ("DACEDDCDCEBEBCBAE", "['D', 'A']"),
}
"""Stored answers, and other spellings that the scorers pay for."""

WRONG_FORM = {
    "binary_matrix": ("1000", "-1", "1.5", "a", "0x1"),
    "countdown": ("2**3", "1234567", "x", "9!", "6 x 4", "abs(1)"),
    "intermediate_integration": (
        *("x**100", "10**10**10", "2**(2**x)", "x.diff", "N(1)", "S(1)", "1e999", "x2", "x^2"),
        *("lambda x: x", "diff(x)", "x***2", "x**", "1_0", "'x'", "[x]", "x**2**3"),
    ),
    "n_queens": ("__", "Q1", "q _", "(Q)"),
    "polynomial_multiplication": ("sin(x)", "x**100", "9" * 41),
    "puzzle24": ("100", "2**3", "4!", "24 = 24"),
    "simple_integration": ("factorial(9)", "x**y**"),
    "spiral_matrix": ("10", "-1"),
    "string_insertion": ("F", "A1", "A+B", "A.B", "join(A)"),
}


def test_right_answers_pass_in_every_spelling_that_is_paid() -> None:
    assert RIGHT.keys() == FILTERS.keys()
    for task, answers in RIGHT.items():
        assert [one for one in answers if not FILTERS[task].passes(one)] == [], task


@pytest.mark.parametrize("task", FILTERS)
def test_what_is_no_answer_of_the_task_does_not_pass(task: str) -> None:
    assert [one for one in WRONG_FORM[task] if FILTERS[task].passes(one)] == []
    assert not FILTERS[task].passes("1" + " " * FILTERS[task].longest), "too long"


@pytest.mark.parametrize("task", FILTERS)
def test_no_hostile_answer_passes_but_what_is_a_value_by_itself(task: str, tmp_path: Path) -> None:
    """Grids of brackets and numbers, and mathematics of single letters: slow at worst."""
    place = Place(marker=tmp_path / "marker", secret=tmp_path / "secret", port=9, word="word")
    passed = [one for one in hostile_answers(place) if FILTERS[task].passes(one)]
    words = {word for one in passed for word in re.findall(r"[^\W\d_]{2,}", one)}
    assert words <= {"sin", "exp", "Integral"}
    assert not [one for one in passed if re.search(r"[^\w\s\[\]()+\-*/,]", one)]
    assert len(passed) <= 12
