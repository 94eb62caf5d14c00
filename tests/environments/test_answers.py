"""Reading answers: which spellings of a number count, and that nothing else does."""

from __future__ import annotations

import pytest

from halteres.environments.answers import boxed_answer, is_number, number_in, tagged_answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("72", "72"),
        ("72.0", "72"),
        ("72.", "72"),
        (".5", "1/2"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        ("1\\,000", "1000"),
        ("1,000.50", "1000.5"),
        ("\\$18", "18"),
        ("$-5", "-5"),
        ("50\\%", "50"),
        ("72 \\text{ square feet}", "72"),
        ("\\text{72 dollars}", "72"),
        ("90^\\circ", "90"),
        ("5 km/h", "5"),
        ("x = 4", "4"),
        ("\\frac{1}{2} cup", "0.5"),
        ("3/4", "0.75"),
        ("negative 5", "-5"),
        ("minus 5", "-5"),
        ("Minus $5", "-5"),
        ("x = minus 5", "-5"),
        ("The answer is negative 5", "-5"),
        ("-\\frac{1}{2}", "-0.5"),
        ("\\frac{-1}{2}", "-0.5"),
        ("\u20135", "-5"),
        ("positive 5", "5"),
        ("5\\ \\text{km}", "5"),
        ("5~\\text{km}", "5"),
        ("5 \\mathrm{~km}", "5"),
        ("5 m\u00b2", "5"),
        ("5 \\text{ m}^2", "5"),
        ("5\\,\\mathrm{m\\,s^{-2}}", "5"),
        ("5^{\\circ}", "5"),
        ("5^{\\circ}\\text{C}", "5"),
        ("\\frac12", "1/2"),
        ("\\dfrac{3}4", "3/4"),
        ("\\(5\\)", "5"),
        ("\\[ 5 \\].", "5"),
        ("$5$", "5"),
        ("$\\$5$", "5"),
        ("**5**", "5"),
        ("(5)", "5"),
        ("\\left(-5\\right)", "-5"),
        ("\u00a55", "5"),
        ("USD 5", "5"),
        ("US$5", "5"),
        ("a total of 5", "5"),
        ("5 months", "5"),
        ("300 K", "300"),
        ("5 \\times 10^{-5}", "0.00005"),
        ("-2.5 x 10^3 km", "-2500"),
        ("10^{16}", "10000000000000000"),
    ],
)
def test_a_number_is_read_exactly_in_the_ways_people_write_it(answer: str, expected: str) -> None:
    assert is_number(answer, expected)


@pytest.mark.parametrize(
    "answer",
    [
        *("", ".", "seven", "3 or 4", "3 + 4", "3-4", "7!", "2^3", "10**9", "1e9", "0x10", "1/0"),
        *("1,0000", "1 000"),
        *("3\\frac{1}{2}", "\u0663", "\uff12", "--5", "__import__('os').system('true')", "9" * 101),
    ],
)
def test_what_is_no_single_number_is_none(answer: str) -> None:
    assert number_in(answer) is None
    assert not is_number(answer, answer)


@pytest.mark.parametrize(
    "answer",
    [
        *("half of 5", "half 5", "twice 5", "a third of 5", "square root of 5", "20% of 5"),
        *("not 5", "never 5", "anything but 5", "5 is wrong", "no more than 5", "5, no", "isn't 5"),
        *("5 million", "$5 million", "5 hundred", "5 dozen", "5k", "5K", "$5 M", "$5m", "5bn"),
        *("less than 5", "more than 5", "at least 5", "5 at most", "5 or more", "up to 5"),
        *("5 below zero", "5 and a half", "5 halves", "twenty 5", "5 squared", "5 factorial"),
        *("x - 5", "x + 5", "x minus 5", "minus minus 5", "\\pm 5"),
        *("5x", "5 xy", "5i", "5 pi", "x5"),
        *("> 5", "\\leq 5", "x \\neq 5", "5^2", "5^{2}", "5\u00b2", "10^{1}6", "\\sqrt{5}", "|5|"),
        *("3\\,\\frac{1}{2}", "5 \\cdot x", "5/x", "(5", "(5) + (6)", "$5$ or $6$"),
    ],
)
def test_words_and_signs_that_say_another_number_make_an_answer_without_one(answer: str) -> None:
    """A wrong number would be paid for; a number that is not read is only not paid for."""
    assert number_in(answer) is None


def test_the_last_whole_box_counts_with_the_braces_in_it() -> None:
    assert boxed_answer("\\boxed{1}, no: \\boxed{ \\text{2 cm} }.") == "\\text{2 cm}"
    assert boxed_answer("\\boxed{1} or \\boxed{2") is None, "the last one was cut off"
    assert boxed_answer("2") is None
    assert not is_number(boxed_answer("2"), "2")


def test_the_last_tag_counts() -> None:
    assert tagged_answer("<answer>1</answer> no: <answer> 2\n3 </answer> done") == "2\n3"
    assert tagged_answer("<answer>1") is None
    assert tagged_answer("1</answer>") is None


def test_long_and_deep_text_costs_no_time() -> None:
    """The test's own deadline holds it."""
    deep = "\\boxed{" * 100_000
    assert boxed_answer(deep) is None
    assert boxed_answer(deep + "}" * 100_000) == ""
    assert all(
        number_in(text) is None for text in ("a b " * 25, "1 " + "a./% " * 19 + "!", "1,111" * 20)
    )


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    "answer",
    [
        *("x" + " " * 98 + "#", "\\text{ } " * 11 + "#", "." * 99, "(" * 50 + ")" * 50, "$" * 100),
        *("1" + "^2" * 49, "10^" * 33, "1,111" * 20, "m^2" * 33, "\\frac1" * 16, "1 " + "- " * 49),
    ],
)
def test_an_answer_made_to_take_long_is_read_at_once(answer: str) -> None:
    assert number_in(answer) is None
