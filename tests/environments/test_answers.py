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
    ],
)
def test_a_number_is_read_exactly_in_the_ways_people_write_it(answer: str, expected: str) -> None:
    assert is_number(answer, expected)


@pytest.mark.parametrize(
    "answer",
    [
        *("", ".", "seven", "3 or 4", "3 + 4", "3-4", "7!", "2^3", "10**9", "1e9", "0x10", "1/0", "1,0000", "1 000"),
        *("3\\frac{1}{2}", "\u0663", "\uff12", "--5", "__import__('os').system('true')", "9" * 101),
    ],
)
def test_what_is_no_single_number_is_none(answer: str) -> None:
    assert number_in(answer) is None
    assert not is_number(answer, answer)


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
    assert all(number_in(text) is None for text in ("a b " * 25, "1 " + "a./% " * 19 + "!", "1,111" * 20))


@pytest.mark.timeout(5)
@pytest.mark.parametrize("answer", ["x" + " " * 98 + "#", "\\text{ } " * 11 + "#", "." * 99])
def test_an_answer_of_spaces_is_read_at_once(answer: str) -> None:
    assert number_in(answer) is None
