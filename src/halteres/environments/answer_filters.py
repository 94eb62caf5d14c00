"""What an answer to a task of reasoning-gym may look like, where its scorer runs the answer as
Python.

Owns: a filter for each of the nine tasks. Never: evaluates an answer; judges whether it is right.
Guarantees: an answer that passes is short, and names nothing but mathematical functions and single
letters.

Five of these scorers call `eval`, on what is a grid or a list here: without names, calls and
operators it has no effect. Four call `sympy.parse_expr`, on an expression. Both run in a cage: what
still takes too long, or too much memory, is ended there. Source: reasoning-gym 0.1.25.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

_TOKEN = re.compile(
    r"\*\*|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?![A-Za-z.])|[A-Za-z]+(?![0-9])|[-+*/(),]"
)
_SPACES = re.compile(r"[ \t\r\n]*")

_FUNCTIONS = frozenset(
    {
        # an integral that sympy did not find is the stored answer of one item in ten
        *("sqrt", "exp", "log", "ln", "Abs", "abs", "pi", "Integral"),
        *("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "sech", "csch"),
        *("asin", "acos", "atan", "acot", "asec", "acsc", "asinh", "acosh", "atanh", "acoth"),
    }
)

_LETTERS = frozenset("ABCDEFGHIJKLMPRTUVWXYZabcdefghijklmnopqrstuvwxyz")
"""Symbols; N, O, Q and S are functions of sympy's that read or compute more than they are given."""

_MOST_EXPONENT = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFilter:
    """What an answer to one task may be."""

    longest: int  # characters
    most_digits: int  # in a row
    has_form: Callable[[str], bool]

    def passes(self, answer: str) -> bool:
        """Whether the answer may be scored.

        >>> [FILTERS["puzzle24"].passes(text) for text in ("(9 - 1)*3*1", "9**99", "exit()")]
        [True, False, False]
        """
        if len(answer) > self.longest or "__" in answer:
            return False
        if re.search(rf"[0-9]{{{self.most_digits + 1}}}", answer):
            return False
        return self.has_form(answer)


def _is_of(characters: re.Pattern[str], answer: str) -> bool:
    """Whether the answer has no other characters."""
    return characters.fullmatch(answer) is not None


def _is_expression(names: frozenset[str], answer: str) -> bool:
    """Whether the answer consists of numbers, these names, brackets and + - * /, with small powers;
    without names there are no powers.
    """
    tokens = _tokens_of(answer)
    if tokens is None:
        return False
    if any(token.isalpha() and token not in names for token in tokens):
        return False
    if not names:
        return "**" not in tokens
    powers = (place for place, one in enumerate(tokens) if one == "**")
    return all(_is_small_power(tokens, place) for place in powers)


def _tokens_of(answer: str) -> list[str] | None:
    """The tokens of an expression; None where something else stands between them."""
    tokens, place = list[str](), 0
    while True:
        spaces = _SPACES.match(answer, place)
        place = place if spaces is None else spaces.end()
        if place == len(answer):
            return tokens
        token = _TOKEN.match(answer, place)
        if token is None:
            return None
        tokens.append(token[0])
        place = token.end()


def _is_small_power(tokens: list[str], place: int) -> bool:
    """Whether the `**` at this place raises to a number up to 99 that is raised no further, or to
    what begins with a name or, where no number is raised, with a bracket: x**2, E**(2*x), 2**x.
    """
    before, behind = tokens[:place][-1:], tokens[place + 1 :]
    if behind[:1] == ["-"]:
        behind = behind[1:]
    exponent = "".join(behind[:1])
    if _is_number(exponent):
        return float(exponent) <= _MOST_EXPONENT and behind[1:2] != ["**"]
    if exponent == "(":
        return not _is_number("".join(before))
    return exponent.isalpha()


def _is_number(token: str) -> bool:
    return token.startswith(tuple("0123456789."))


_GRID = re.compile(r"[0-9,\[\] \t\r\n]*")
_BOARD = re.compile(r"[Q_,'\"\[\] \t\r\n]*")
_STRING = re.compile(r"[ABCDE,'\"\[\] \t\r\n]*")

_ARITHMETIC = partial(_is_expression, frozenset[str]())
_CALCULUS = partial(_is_expression, _FUNCTIONS | _LETTERS)

FILTERS: Mapping[str, AnswerFilter] = {
    "binary_matrix": AnswerFilter(longest=10_000, most_digits=3, has_form=partial(_is_of, _GRID)),
    "countdown": AnswerFilter(longest=500, most_digits=6, has_form=_ARITHMETIC),
    "intermediate_integration": AnswerFilter(longest=1_000, most_digits=12, has_form=_CALCULUS),
    "n_queens": AnswerFilter(longest=2_000, most_digits=0, has_form=partial(_is_of, _BOARD)),
    "polynomial_multiplication": AnswerFilter(
        longest=5_000, most_digits=40, has_form=partial(_is_expression, _LETTERS)
    ),
    "puzzle24": AnswerFilter(longest=100, most_digits=2, has_form=_ARITHMETIC),
    "simple_integration": AnswerFilter(longest=1_000, most_digits=12, has_form=_CALCULUS),
    "spiral_matrix": AnswerFilter(longest=10_000, most_digits=1, has_form=partial(_is_of, _GRID)),
    "string_insertion": AnswerFilter(
        longest=5_000, most_digits=0, has_form=partial(_is_of, _STRING)
    ),
}
"""By the task's name. Stored answers of 300 items each are shorter than a fifth of these, but for
grids, whose side is a setting.
"""
