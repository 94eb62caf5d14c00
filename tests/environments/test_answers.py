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
        ("5 \\times 10^{3}", "5000"),
        ("5 \u00d7 10\u00b3", "5000"),
        ("5e-05", "1/20000"),
        ("-2.5E+3 km", "-2500"),
        ("1e9", "1000000000"),
        ("3 1/2", "7/2"),
        ("-3\\frac{1}{2}", "-7/2"),
        ("3\\,\\frac{1}{2}", "7/2"),
        ("\u00bd cup", "1/2"),
        ("3\u00bd cups of flour", "7/2"),
        ("\uff0d\uff11\uff0c\uff10\uff10\uff10", "-1000"),
        ("\u0663\u066b\u0665", "3.5"),
        ("\u0967\u0968", "12"),
        ("\\boxed{5}", "5"),
        ("\\boxed{\\text{5 km}}", "5"),
        ("The answer is $\\boxed{3\\tfrac12}$ cups", "7/2"),
        ("1 apple", "1"),
        ("$5/hour", "5"),
        ("5 \u20ac", "5"),
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
        *("", ".", "seven", "3 or 4", "3 + 4", "3-4", "7!", "2^3", "10**9", "0x10", "1/0"),
        *("1,0000", "1 000", "3 5/2", "3 1/0", "3.5 1/2", "3\\frac{x}{2}", "5e", "1e2e3", "1e1000"),
        *("--5", "__import__('os').system('true')", "9" * 101),
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
        *("5 \\cdot x", "5/x", "(5", "(5) + (6)", "$5$ or $6$"),
    ],
)
def test_words_and_signs_that_say_another_number_make_an_answer_without_one(answer: str) -> None:
    """A wrong number would be paid for; a number that is not read is only not paid for."""
    assert number_in(answer) is None


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "5 mil",
            "5 Millionen",
            "5 Mio.",
            "5 Mrd.",
            "5 mille",
            "5 millones",
            "5 milh\u00f5es",
            "5 mila",
        ),
        *(
            "5 miliardi",
            "5 duizend",
            "5 tusen",
            "5 Dutzend",
            "5 docenas",
            "5 tysi\u0119cy",
            "5 tis\u00edc",
        ),
        *(
            "5 milijonas",
            "5 \u0442\u044b\u0441\u044f\u0447",
            "5 mille euros",
            "5 tausend Euros",
            "5 lakhs",
        ),
        *(
            "5 k",
            "5 K",
            "5 M",
            "5 B",
            "5 T",
            "5 K dollars",
            "5 gross",
            "5 pairs",
            "5 Paar",
            "5 tens",
        ),
        *(
            "5th",
            "5 th",
            "5ish",
            "5!",
            "5-",
            "5?",
            "5:30",
            "5 less",
            "5 less apples",
            "5 quintillion",
        ),
        *("neg 5", "max 5", "min 5", "without 5", "about 5", "~5", "less 5", "excl. 5", "by 5"),
        *("wrong: 5", "error: 5", "max: 5", "v5", "no. 5", "#5", "step 5", "reciprocal of 5"),
        *(
            "max 5 apples",
            "neg 5 apples",
            "without 5 apples",
            "exceeds 5 dollars",
            "about 5 apples",
        ),
        *("is Neg 5 dollars", "divides 5 apples", "5 kilo dollars", "5 zillions", "5 fives"),
        *(
            "up to nearly 5 apples",
            "can exceed 5 dollars",
            "\\boxed{5} million",
            "half of \\boxed{5}",
        ),
    ],
)
def test_what_is_not_known_to_stand_around_an_answer_makes_it_one_without_a_number(
    answer: str,
) -> None:
    assert number_in(answer) is None


@pytest.mark.parametrize(
    "sentence",
    [
        "The answer is 12 apples.",
        "So she has 12 apples left",
        "So, Betty has 12 small chocolate chip cookies left over.",
        "Janet makes $12 every day at the farmers' market.",
        "Therefore, Ann needs 12 more red marbles.",
        "In total, Ken has 12 trees.",
        "Maila's total is 12.",
        "It will take Carlos 12 years before he starts earning money.",
        "So Raymond has to babysit 12 hours.",
        "Marissa hikes 12 miles each day.",
        "Lily donates $12 to charity.",
        "Melanie started with 12 vacuum cleaners.",
        "The total comes to $12.",
        "John paid a total of $12.",
        "The store offers a discount of $12.",
        "Final answer: 12 people",
        "12 of the students are left.",
        "**12 miles per hour**",
    ],
)
def test_the_last_sentence_of_a_worked_answer_states_its_number(sentence: str) -> None:
    assert is_number(sentence, "12")


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
