"""Answers in a model's text, and the numbers that they state.

Text is never evaluated. A number may have thousands commas, a sign in digits or in words, a
currency, units, decimals, be a fraction, or be written with a power of ten. Words that say another
number than the digits do, such as "5 million", "half of 5" or "not 5", make an answer one that
states no number: a wrong number would be paid for.
"""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 100
"""Characters of an answer in which a number is looked for; a longer one holds none."""

_BOX = "\\boxed{"


def boxed_answer(text: str) -> str | None:
    """The content of the last `\\boxed{...}` without outer spaces, braces within it balanced; None
    without a whole one.

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


def is_number(answer: str | None, expected: str) -> bool:
    """Whether an answer states exactly the number that `expected` does; None states none."""
    number = number_in(answer) if answer is not None else None
    return number is not None and number == number_in(expected)


# -- numbers
# --------------------------------------------------------------------------------------------------

_CURRENCY = "$€£¥₹₩₽₺₫₱¢"
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMERAL = re.compile(
    rf"(?:(?P<factor>{_DECIMAL}) ?[×x*·] ?)?10\^(?P<exponent>[-+]?[0-9]{{1,3}})"  # 5 × 10^-3
    rf"|(?P<decimal>{_DECIMAL})(?: ?/ ?(?P<divisor>[0-9]+))?"
)
_BEFORE = re.compile(
    r"(?P<words>[A-Za-z ]*)(?P<equals>[=:])?"  # x =
    rf" ?[{_CURRENCY}]? ?(?P<sign>[-+])? ?[{_CURRENCY}]? ?"
)
_AFTER = re.compile(
    rf" ?[{_CURRENCY}]?"
    r"(?:[A-Za-zµμΩ ./·%°]|(?<=[A-Za-z])(?:\^-?[0-9]|[⁻¹²³]))*"  # square feet, km/h, m^2, m·s⁻²
)


def number_in(answer: str) -> Fraction | None:
    """The one number that an answer states, exactly; None where it states none, several, a sum or a
    bound.

    Words around the number are units: "$1,000.50", "72 square feet", "50\\%", "\\frac{1}{2} cup",
    "x = -3".

    >>> answers = ("1,000.5 dollars", "minus 5", "3 + 4", "5 million")
    >>> tuple(map(number_in, answers))
    (Fraction(2001, 2), Fraction(-5, 1), None, None)
    """
    if len(answer) > LONGEST:
        return None
    plain = _plain(answer)
    is_money = not set(_CURRENCY).isdisjoint(plain)
    numeral = _NUMERAL.search(plain)
    if numeral is None:
        return None
    before = _BEFORE.fullmatch(plain[: numeral.start()])
    after = plain[numeral.end() :]
    if before is None or not _leads_to_a_number(before, numeral[0]):
        return None
    if not _AFTER.fullmatch(after) or not _is_unit(after, is_money=is_money):
        return None
    value = _value(numeral)
    if value is not None and before["sign"] == "-":
        return -value
    return value


def _value(numeral: re.Match[str]) -> Fraction | None:
    if numeral["exponent"]:
        return _decimal(numeral["factor"] or "1") * Fraction(10) ** int(numeral["exponent"])
    divisor = int(numeral["divisor"] or 1)
    if divisor == 0:
        return None
    return _decimal(numeral["decimal"]) / divisor


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip("."))


# -- LaTeX and Markdown as plain text
# ----------------------------------------------------------------------------------

_BRACKETS = (("\\(", "\\)"), ("\\[", "\\]"), ("(", ")"), ("{", "}"))
_MARKS = ("$$", "$", "**", "`", '"')
_SPACES = re.compile(r"\\(?:[,;:! ]|q?quad\b)|\{,\}|(?<=\S)~")
# What may stand between the digits of a number; the others are spaces.
_GLUED = {"{,}": ",", "\\!": "", "\\,": ""}
_EXPONENT = re.compile(r"\^\{([^{}]*)\}")
_DECORATION = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])")
_FRACTION = re.compile(
    r"\\[cdt]?frac ?(?:\{(?P<top>-?[0-9]+)\}|(?P<digit>[0-9]))"
    r" ?(?:\{(?P<bottom>[0-9]+)\}|(?P<other_digit>[0-9]))"
)
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\{([^{}]*)\}"
)
_SYMBOLS = {
    "\\$": "$",
    "\\%": "%",
    "\\pounds": "£",
    "\\times": "×",
    "\\cdot": "·",
    "^\\circ": "°",
    "^°": "°",
    "\\degree": "°",
    "\\mu": "µ",
    "\\Omega": "Ω",
}
_SYMBOL = re.compile("|".join(re.escape(symbol) + "(?![A-Za-z])" for symbol in _SYMBOLS))
_MINUS_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
_SIGN_WORD = re.compile(
    rf"\b(?:(?P<minus>minus|negative)|plus|positive) (?=[{_CURRENCY}]? ?[0-9.])", re.IGNORECASE
)


def _plain(answer: str) -> str:
    plain = _unquoted(_DECORATION.sub("", answer))
    plain = _SPACES.sub(lambda space: _GLUED.get(space[0], " "), plain)
    plain = _EXPONENT.sub(r"^\1 ", plain)
    plain = _FRACTION.sub(_fraction, _WORDS.sub(r" \1 ", plain))
    plain = _SYMBOL.sub(lambda symbol: _SYMBOLS[symbol[0]], plain)
    # Runs of spaces become one: on fifty of them a pattern would try for seconds.
    plain = " ".join(plain.translate(_MINUS_SIGNS).split()).replace(" ^", "^")
    return _SIGN_WORD.sub(lambda word: "-" if word["minus"] else "+", plain)


def _unquoted(answer: str) -> str:
    """The answer without the marks around all of it: math mode, parentheses, emphasis."""
    answer = answer.strip()
    for left, right in (*_BRACKETS, *zip(_MARKS, _MARKS, strict=True)):
        is_quoted = answer.startswith(left) and answer.removesuffix(".").endswith(right)
        if is_quoted and len(answer) > len(left) + len(right):
            return _unquoted(answer.removesuffix(".")[len(left) : -len(right)])
    return answer


def _fraction(found: re.Match[str]) -> str:
    return f" {found['top'] or found['digit']}/{found['bottom'] or found['other_digit']} "


# -- words that change the number
# --------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEGATIONS = _words("not no never neither nor none cannot except excluding")
_NUMBER_WORDS = _words("""
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    hundred hundreds thousand thousands million millions mio mln mn billion billions bln bn
    trillion trillions dozen dozens lakh lakhs crore crores
    half halves thirds fourths fifths sixths sevenths eighths ninths tenths hundredths
    thousandths millionths
""")

_RELATIONS_BEFORE = _words("""
    of than half twice thrice double triple quadruple third quarter square cube root sqrt
    log ln lg sin cos tan exp over under above below beyond exceeding exceeds between
    nearly almost but and or times mod modulo plus minus least most more less fewer
    from past until till x y z n
""")
"""After one of these, the number stated is another than the digits that follow."""

_AMOUNT_OF = re.compile(
    r"\b(?:total|sum|amount|value|average|mean|cost|price|profit|score|distance|length|width"
    r"|height|area|perimeter|volume|weight|speed|probability) of$"
)
_NEAR_TO = re.compile(r"\b(?:up|down|close|near|next|half|quarter) to$")
_COPULAS = _words("is are be was were equals equal gives makes to of answer result")
"""Words after which "-" is a sign; after another, it subtracts."""

_CURRENCY_CODES = _words("usd eur gbp rs")

_RELATIONS_AFTER = _words("""
    or than plus minus negative squared cubed factorial divided multiplied mod modulo choose
    over above below up max maximum minimum
""")
_PHRASE_AFTER = re.compile(
    r"\b(?:at (?:least|most)|and (?:an?|more|some|change)|is (?:wrong|incorrect|false))\b"
)
_VARIABLE = re.compile(r"[xyz]+|[nike]|pi")
_UNIT_LETTERS = "mgshlpcdtLJNWVACFHSRµμΩ"
"""Letters that are units directly behind the digits; another is a variable (5x) or a scale (5K)."""

_MONEY_SCALE = re.compile(r" ?[kKmMbBtT](?![A-Za-z])")


def _leads_to_a_number(before: re.Match[str], numeral: str) -> bool:
    """Whether the words before the digits leave them the number that is stated."""
    phrase = before["words"].lower().strip()
    words = phrase.split()
    if not words:
        return True
    if _NEGATIONS.intersection(words) or {"divided", "multiplied"}.intersection(words):
        return False
    if before["equals"]:
        return True
    if before["sign"] and words[-1] not in _COPULAS:
        return False
    is_glued = before[0][-1:].isalpha()
    if is_glued and (words[-1] not in _CURRENCY_CODES or numeral.startswith(".")):
        return False
    while words and words[-1] in ("the", "a", "an"):
        words.pop()
    phrase = " ".join(words)
    if _AMOUNT_OF.search(phrase):
        return True
    if _NEAR_TO.search(phrase):
        return False
    return (_RELATIONS_BEFORE | _NUMBER_WORDS).isdisjoint(words[-1:])


def _is_unit(after: str, *, is_money: bool) -> bool:
    """Whether the words after the digits leave them the number that is stated."""
    letter = re.match("[A-Za-zµμΩ](?![A-Za-z])", after)
    if letter is not None and letter[0] not in _UNIT_LETTERS:
        return False
    if is_money and _MONEY_SCALE.match(after):
        return False
    words = re.findall("[A-Za-z]+", after)
    if any(_VARIABLE.fullmatch(word) for word in words):
        return False
    changed = _NEGATIONS | _NUMBER_WORDS | _RELATIONS_AFTER
    # "18 eggs left over": without anything behind it, it relates the number to nothing.
    if words and words[-1].lower() in ("over", "up", "above"):
        words = words[:-1]
    return changed.isdisjoint(map(str.lower, words)) and not _PHRASE_AFTER.search(after.lower())
