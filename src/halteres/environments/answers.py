"""Answers in a model's text, and the numbers that they state.

Text is never evaluated. A number may have thousands commas, a currency, units, decimals, or be a fraction.
"""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 100
"""Characters of an answer in which a number is looked for; a longer one holds none."""

_BOX = "\\boxed{"
_GLUE = re.compile(r"\\[,;:!]|\{,\}")
_WORDS_MACRO = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_FRACTION_MACRO = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_NUMBER = re.compile(
    r"(?:[A-Za-z ]*[A-Za-z ][=:]?)?\s*"  # x =
    r"[$€£]?\s*(?P<sign>[-+]?)\s*[$€£]?\s*"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?P<decimals>\.[0-9]*)?"
    r"(?:\s*/\s*(?P<divisor>[0-9]+))?"
    r"\s*[%°$€£]?[A-Za-z ./%]*"  # square feet, km/h
)


def boxed_answer(text: str) -> str | None:
    """The content of the last `\\boxed{...}` without outer spaces, braces within it balanced; None without a whole one.

    >>> boxed_answer(r"So \\boxed{1}, no: \\boxed{\\text{2 cm}}.")
    '\\\\text{2 cm}'
    """
    begin = text.rfind(_BOX)
    if begin < 0:
        return None
    depth = 1
    for place in range(begin + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + len(_BOX) : place].strip()
    return None


def tagged_answer(text: str) -> str | None:
    """The content of the last `<answer>...</answer>` without outer spaces, or None."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    return content.strip() if opened and closed else None


def number_in(answer: str) -> Fraction | None:
    """The one number that an answer states, exactly; None where it states none, several, or a sum.

    Words around the number are units: "$1,000.50", "72 square feet", "50\\%", "\\frac{1}{2} cup", "x = -3".

    >>> number_in("1,000.5 dollars"), number_in("3 or 4"), number_in("3 + 4")
    (Fraction(2001, 2), None, None)
    """
    if len(answer) > LONGEST:
        return None
    glued = _GLUE.sub(lambda space: {"{,}": ",", "\\!": "", "\\,": ""}.get(space[0], " "), answer)
    plain = _WORDS_MACRO.sub(r" \1 ", glued)
    plain = _FRACTION_MACRO.sub(r" \1/\2 ", plain).replace("\\$", "$").replace("\\%", "%").replace("^\\circ", "°")
    # Runs of spaces become one: on fifty of them the pattern would try for seconds.
    found = _NUMBER.fullmatch(" ".join(plain.split()).replace("\u2212", "-"))
    if found is None or not re.search("[0-9]", found["whole"] + (found["decimals"] or "")):
        return None
    divisor = int(found["divisor"] or 1)
    if divisor == 0:
        return None
    value = Fraction(f"{found['whole'].replace(',', '') or '0'}{found['decimals'] or ''}".rstrip(".")) / divisor
    return -value if found["sign"] == "-" else value


def is_number(answer: str | None, expected: str) -> bool:
    """Whether an answer states exactly the number that `expected` does; None states none."""
    number = number_in(answer) if answer is not None else None
    return number is not None and number == number_in(expected)
