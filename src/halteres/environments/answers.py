"""Answers in a model's text, and the numbers that they state.

Text is never evaluated. A number may have thousands commas, a sign in digits or in words, a
currency, units, decimals, be a fraction or a mixed number, or be written with a power of ten, in
the digits of any script. What stands directly around it decides whether it is the answer: before
it nothing, a sign of equality, or a word that leads to a number ("is", "has", "costs"); behind it
nothing, a unit, or a noun in the plural. Behind anything else ("neg 5", "5 mil", "5th", "max 5")
there is no number: a wrong number would be paid for, and one that is not read is only not paid for.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from itertools import takewhile

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

_CURRENCY = "$€£¥₹₩₽₺₫₱¢"
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMERAL = re.compile(
    rf"(?P<whole>{_WHOLE}) (?P<top>[0-9]+)/(?P<bottom>[0-9]+)"  # 3 1/2
    rf"|(?:(?P<factor>{_DECIMAL}) ?[×x*·] ?)?10\^(?P<power>[-+]?[0-9]{{1,3}})"  # 5 × 10^-3
    rf"|(?P<mantissa>{_DECIMAL})[eE](?P<exponent>[-+]?[0-9]{{1,3}})"  # 5e-03
    rf"|(?P<decimal>{_DECIMAL})(?: ?/ ?(?P<divisor>[0-9]+))?"  # 1,000.5 or 3/4
)
_BEFORE = re.compile(
    r"(?P<words>(?:[^\W\d_]|[ ,'])*)(?P<mark>[=:])?"  # The answer is, x =
    rf" ?[{_CURRENCY}]? ?(?P<sign>[-+])? ?[{_CURRENCY}]? ?"
)
_AFTER = re.compile(
    rf" ?[{_CURRENCY}]?(?P<words>(?:[^\W\d_]|[ .'/·%°]|(?<=[^\W\d_])\^-?[0-9])*)(?:(?<=[^\W\d_])!)?"
)


def number_in(answer: str) -> Fraction | None:
    """The one number that an answer states, exactly; None where it states none, several, a sum or a
    bound.

    >>> answers = ("1,000.5 dollars", "So she has 5 apples left.", "minus 5", "3 + 4", "5 million")
    >>> tuple(map(number_in, answers))
    (Fraction(2001, 2), Fraction(5, 1), Fraction(-5, 1), None, None)
    """
    if len(answer) > LONGEST:
        return None
    plain = _plain(answer)
    numeral = _NUMERAL.search(plain)
    if numeral is None:
        return None
    before = _BEFORE.fullmatch(plain[: numeral.start()])
    after = _AFTER.fullmatch(plain[numeral.end() :])
    value = _value(numeral)
    if before is None or after is None or value is None:
        return None
    is_money = not set(_CURRENCY).isdisjoint(before[0] + after[0])
    is_counted = is_money or bool(_WORD.search(after["words"]))
    if not _leads_to_a_number(before, numeral[0], is_counted=is_counted):
        return None
    if not _follows_a_number(after, is_money=is_money, is_one=value <= 1):
        return None
    return -value if before["sign"] == "-" else value


def _value(numeral: re.Match[str]) -> Fraction | None:
    """What the digits say; None of a fraction that is none."""
    if numeral["power"]:
        return _decimal(numeral["factor"] or "1") * Fraction(10) ** int(numeral["power"])
    if numeral["exponent"]:
        return _decimal(numeral["mantissa"]) * Fraction(10) ** int(numeral["exponent"])
    if numeral["whole"]:
        top, bottom = int(numeral["top"]), int(numeral["bottom"])
        if top >= bottom:
            return None
        return _decimal(numeral["whole"]) + Fraction(top, bottom)
    divisor = int(numeral["divisor"] or 1)
    if divisor == 0:
        return None
    return _decimal(numeral["decimal"]) / divisor


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip("."))


# -- LaTeX, Markdown and the digits of other scripts as plain text

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
_CONTENT = re.compile(
    r"\\(?:boxed|text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname)"
    r"\{([^{}]*)\}"
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
_SIGNS = str.maketrans("‐‑‒–−﹣٫٬٪⁄’", "------.,%/'")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SIGN_WORD = re.compile(
    rf"\b(?:(?P<minus>minus|negative)|plus|positive) (?=[{_CURRENCY}]? ?[0-9.])", re.IGNORECASE
)


def _plain(answer: str) -> str:
    answer = _SUPERSCRIPT.sub(lambda found: "^" + found[0].translate(_SUPERSCRIPTS), answer)
    answer = "".join(map(_ascii, answer)).translate(_SIGNS)
    plain = _unquoted(_DECORATION.sub("", answer))
    plain = _SPACES.sub(lambda space: _GLUED.get(space[0], " "), plain)
    plain = _FRACTION.sub(_fraction, _EXPONENT.sub(r"^\1 ", plain))
    while _CONTENT.search(plain):
        plain = _CONTENT.sub(r" \1 ", plain)
    plain = _SYMBOL.sub(lambda symbol: _SYMBOLS[symbol[0]], plain)
    # Runs of spaces become one: on fifty of them a pattern would try for seconds.
    plain = " ".join(plain.split()).replace(" ^", "^").replace(" .", ".") if plain else plain
    return _SIGN_WORD.sub(lambda word: "-" if word["minus"] else "+", plain)


def _ascii(character: str) -> str:
    """A digit of any script as 0 to 9, ½ as a fraction behind a space, a wide character as the
    usual one.
    """
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    decomposition = unicodedata.decomposition(character)
    if decomposition.startswith("<fraction>"):
        return f" {unicodedata.normalize('NFKC', character)} "
    if decomposition.startswith("<wide>"):
        return unicodedata.normalize("NFKC", character)
    return character


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


# -- what may stand around a number


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _forms(verbs: str) -> frozenset[str]:
    """Regular verbs with their forms: need, needs, needed."""
    past = (verb + "d" if verb.endswith("e") else verb + "ed" for verb in verbs.split())
    present = (verb + "s" for verb in verbs.split())
    return frozenset((*verbs.split(), *present, *past))


_COPULAS = _words("is are be was were equals equal gives makes to of it's that's there's")
"""Words after which "-" is a sign; after another, it subtracts."""

_LEADING = (
    _COPULAS
    | _words("answer result solution total so thus therefore hence then finally altogether")
    | _words(
        "has have had having in into for at with after worth makes make made making gave give given"
    )
    | _words("get gets got takes take took costs cost spends spend spent pays pay paid sells sell")
    | _words("sold buys buy bought eats eat ate eaten drives drive drove runs run ran reads read")
    | _words("leaves leave left leaving loses lose lost wins win won drinks drink drank brings")
    | _words("bring brought keeps keep kept sees see saw writes write wrote written becomes become")
    | _words("became finds find found swims swim swam grows grow grew holds hold held flies flew")
    | _words("carries carry carried feeds feed fed studies studied catches caught does did goes")
    | _words("sleeps sleep slept gains gain gained teaches taught builds build built equalled")
    | _forms("need use save receive owe walk travel earn contain weigh last score pick plant bake")
    | _forms("collect charge produce add remain require donate work cook visit serve total play")
    | _forms(
        "complete deliver pour cover share count return print want watch invest burn order fill"
    )
)
"""What may stand directly before a number."""

_BEFORE_VERBS = _words("to can could will would must should may might")
_NO_VERBS = _words("""
    perhaps besides times about around over under below above almost near up down exceed exceeds
    exceeded lack lacks lacked miss misses missed squared doubled halved tripled tops divides
    multiplies doubles triples halves squares negated
""")
"""What looks like a verb that leads to a number, and does not."""

_TAKES_A_NAME = _words("take takes took cost costs give gives gave leave leaves left pay pays paid")

_PASSED_OVER = _words("the a an only just exactly him her them me you his their each")
"""What may stand between one of these and the number."""

_LABELS = _words("""
    answer result solution total sum number amount value count cost price profit left remaining
    difference product quotient average mean area perimeter volume distance time length width
    height speed age change x y z n
""")
"""One of these makes a colon lead to a number."""

_AMOUNT_OF = re.compile(
    r"\b(?:total|sum|amount|value|average|mean|cost|price|profit|score|distance|length|width"
    r"|height|area|perimeter|volume|weight|speed|probability|rate|change|discount|answer) of$"
)
_COMES_TO = re.compile(
    r"\b(?:comes|came|amounts|adds? up|sums?(?: up)?|equals?|rounds|simplifies|evaluates) to$"
)

_CURRENCY_CODES = _words("usd eur gbp rs us")
_UNIT_SYMBOLS = _words("""
    m g s h l p c d t L J N W V A C F µ μ Ω km cm mm dm nm µm μm kg mg µg μg ml mL cl cL dl dL min
    hr hrs sec ms mph kph fps rpm ft in lb lbs oz yd mi gal pt qt ha Hz kHz MHz GHz kW MW kWh Wh
    KB kB MB GB TB Pa kPa MPa kJ MJ kcal cal eV mol rad deg dB mA mV kV kN sq cu am pm AM PM
""")
_UNITS = _words("""
    percent dollar euro euros pound penny pence cent yen rupee peso yuan meter metre kilometer
    kilometre centimeter centimetre millimeter millimetre mile foot feet inch yard gram kilogram
    ounce ton tonne liter litre milliliter gallon quart pint cup acre hectare second minute hour day
    week month year degree celsius fahrenheit kelvin square cubic calorie watt volt joule newton
    byte bit o'clock
""")
_LONGEST_NOUN = 4
"""Words, as in "5 small chocolate chip cookies"."""

_PLURALS = _words("people children men women teeth mice geese fish sheep deer dice cattle")
_FOLLOWING = _words("""
    left remaining remain each every per total altogether together in of a an at on for with are is
    was were will away old long tall high wide deep now today profit change extra daily weekly
    monthly yearly overall combined apiece worth back before after during
    this last to
""")
"""What may stand directly behind a number, other than units and nouns."""

_NEGATIONS = _words("""
    not no never neither nor none cannot without except excluding wrong incorrect false
""")
_CHANGES_BEFORE = _NEGATIONS | _words("half twice thrice double triple quadruple")
_CHANGES_AFTER = (
    _NEGATIONS
    | _words("or than less plus minus negative squared cubed factorial divided multiplied mod")
    | _words("modulo choose over above below under up max maximum minimum equals too")
    | _words("zero one two three four five six seven eight nine ten eleven twelve thirteen")
    | _words("fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty")
    | _words("seventy eighty ninety half halves quarters thirds fourths fifths sixths sevenths")
    | _words("eighths ninths tenths hundredths thousandths millionths")
    | _words("kilo mega giga tera bil thou trios quads halfs twos threes fours fives sixes")
    | _words("pair pairs couple couples gross tens grand lakh lakhs crore crores")
    | _words("mil mille mila mln mio mia mrd mld tsd tys bn bln tn bin mie mii ezer cento tuhat")
    | _words("par pares paar paire paires paio paia cien cientos")
)
"""Words that make a number another one from wherever they stand."""

_SCALES = _words("""
    million milion milió miljo milijo milyo milhã milhõ millón millon millió milliar miliar miljar
    milijar milyar millier billion bilion biljo bilijo bilhã bilhõ billón billon trillion trilion
    triljo trilhã trilhõ trillón trillon trylion quadrill quintill hundred hundert hundra hundre
    honderd centen centain centin thousand tausend tusen tusin duizend tysi tisíc tisic tūkst
    dozen dutzend douzain docen dúzi duzi dozzin dussin dusin dozij dizain decen
    zillion gazillion myriad
""")
"""How million, thousand, dozen and their like begin in the languages of Europe."""

_PHRASE_AFTER = re.compile(r"\b(?:at (?:least|most)|and (?:an?|more|some|change))\b")
_VARIABLE = re.compile(r"[xyz]+|[nike]|pi")
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")


def _leads_to_a_number(before: re.Match[str], numeral: str, *, is_counted: bool) -> bool:
    """Whether what stands before the digits says that they are the answer.

    Args:
        is_counted: the number is one of money, of a unit or of things, which any verb may have.
    """
    said = _WORD.findall(before["words"])
    words = [word.lower() for word in said]
    if _is_changed(words, _CHANGES_BEFORE):
        return False
    if before["mark"] == "=":
        return True
    if before["mark"] == ":":
        return not _LABELS.isdisjoint(words)
    if words and words[-1] in _CURRENCY_CODES and not numeral.startswith("."):
        words.pop()
    elif before[0][-1:].isalpha():
        return False
    if words and before["sign"] and words[-1] not in _COPULAS:
        return False
    # "It takes Sarah 5 minutes": a name.
    if is_counted and len(words) > 1 and said[-1].istitle() and words[-2] in _TAKES_A_NAME:
        words.pop()
    while words and words[-1] in _PASSED_OVER:
        words.pop()
    phrase = " ".join(words)
    if phrase.endswith(" of"):
        return _AMOUNT_OF.search(phrase) is not None
    if phrase.endswith(" to"):
        return _COMES_TO.search(phrase) is not None
    return not words or words[-1] in _LEADING or (is_counted and _ends_in_a_verb(words))


def _follows_a_number(after: re.Match[str], *, is_money: bool, is_one: bool) -> bool:
    """Whether what stands behind the digits leaves them the number that is stated.

    Args:
        is_one: the number is 1 or a part of it, so that a noun may be in the singular.
    """
    said = after["words"]
    words = _WORD.findall(said)
    lower = [word.lower() for word in words]
    # "18 eggs left over": without anything behind it, it relates the number to nothing.
    related = lower[:-1] if len(lower) > 1 and lower[-1] in ("over", "up", "above") else lower
    if _is_changed(related, _CHANGES_AFTER) or _PHRASE_AFTER.search(said.lower()):
        return False
    if any(map(_VARIABLE.fullmatch, words)):
        return False
    first_mark = said.strip(" .'")[:1]
    if first_mark in "%°/":
        return True
    if not first_mark.isalpha():
        return False
    if lower[0] in _UNITS or lower[0] in _CURRENCY_CODES:
        return True
    if words[0] in _UNIT_SYMBOLS and not is_money:
        return True
    if after[0][0].isalpha():
        return False
    noun = list(takewhile(lambda word: word not in _FOLLOWING, lower[:_LONGEST_NOUN]))
    if not noun:
        return True
    return len(noun[0]) > 2 and (is_one or any(map(_is_plural, noun)))


def _is_changed(words: Sequence[str], changes: frozenset[str]) -> bool:
    return any(
        word in changes or word.endswith("n't") or word.startswith(tuple(_SCALES)) for word in words
    )


def _ends_in_a_verb(words: Sequence[str]) -> bool:
    """Whether the last word looks like one: it hikes, hiked, or can hike."""
    last = words[-1]
    if last in _NO_VERBS or last.endswith("ly"):
        return False
    is_infinitive = len(words) > 1 and words[-2] in _BEFORE_VERBS
    return is_infinitive or last.endswith("ed") or _is_plural(last)


def _is_plural(word: str) -> bool:
    is_regular = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return is_regular or word in _PLURALS
