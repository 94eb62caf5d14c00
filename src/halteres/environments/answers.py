"""Questions whose answers are numbers: read from a file or the hub, and looked for in a model's text.

Text is never evaluated. A number may have thousands commas, a currency, units, decimals, or be a fraction.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from halteres.errors import InvalidConfig, InvalidData

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


HELD_OUT_SHARE = 0.1
"""Of a single file's questions, chosen by hash: a question keeps its side, whatever rows are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question."""

    question: str
    answer: str  # a number, e.g. "1,000"


def load_rows(source: str | Path) -> tuple[Sequence[Row], Sequence[Row]]:
    """The rows to train on and the held-out ones.

    Args:
        source: a `.jsonl` file, of whose questions a tenth is held out; a folder with `train.jsonl` and `test.jsonl`;
            or a data set on the hub with the splits `train` and `test` of its configuration `main`. A row is
            `{"question": "...", "answer": "..."}`; of an answer with `####` the number after it counts.

    Raises:
        InvalidConfig: no such file; the hub cannot be asked.
        InvalidData: a row that is none, with its place; no row to train on.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        train, held_out = _read(path / "train.jsonl"), _read(path / "test.jsonl")
    elif path.suffix == ".jsonl" or path.is_absolute():
        train, held_out = list[Row](), list[Row]()
        for row in _read(path):
            first_byte = hashlib.sha256(row.question.encode()).digest()[0]
            (held_out if first_byte < HELD_OUT_SHARE * 256 else train).append(row)
    else:
        train, held_out = _from_hub(str(source))
    if not train:
        raise InvalidData(f"{source} holds no question to train on.")
    return train, held_out


def _read(file: Path) -> list[Row]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines() also cuts within JSON texts
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"The questions in {file.absolute()} cannot be read.",
            f"{getattr(error, 'strerror', None) or error}.",
            "Give the whole path of a JSONL file, or of a folder with train.jsonl and test.jsonl.",
        ) from error
    return [_row(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _row(fields: Any, place: str) -> Row:
    """A row of a data set, or a line of JSON that holds one."""
    if isinstance(fields, str):
        with contextlib.suppress(ValueError):
            fields = json.loads(fields)
    found = fields if isinstance(fields, Mapping) else {}
    question, answer = found.get("question"), str(found.get("answer", "")).rpartition("####")[2].strip()
    if not isinstance(question, str) or number_in(answer) is None:
        raise InvalidData(
            f"{place} is no question with a number as its answer.",
            next='A row is {"question": "...", "answer": "7"}; the number may stand after "####".',
        )
    return Row(question=question, answer=answer)


def _from_hub(name: str) -> tuple[list[Row], list[Row]]:
    try:
        datasets = importlib.import_module("datasets")  # an extra
    except ImportError as error:
        raise InvalidConfig(
            f"The data set {name} on the Hugging Face hub needs the package `datasets`.",
            f"{error}.",
            "pip install 'halteres[hub]', or name a local JSONL file: --set env.dataset=/path/to/questions.jsonl",
        ) from error
    try:
        splits: Mapping[str, Iterable[Any]] = datasets.load_dataset(name, "main")
    except Exception as error:  # any of a library's: no network, no such name, another configuration
        raise InvalidConfig(
            f"The data set {name} could not be loaded from the Hugging Face hub.",
            f"{type(error).__name__}: {error}.",
            "See to the network, or name a local JSONL file: --set env.dataset=/path/to/questions.jsonl",
        ) from error
    train, held_out = (
        [_row(fields, f"{name} {split}, row {number}") for number, fields in enumerate(splits[split])]
        for split in ("train", "test")
    )
    return train, held_out
