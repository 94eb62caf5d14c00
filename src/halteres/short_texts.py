"""Texts and figures as readers get them: short, without secrets, and, where a text comes in parts,
without half a word that is looked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from halteres.redaction import Redactor

_LONGEST_ESCAPE = 12  # characters that one of a text may take as JSON: two escapes


def size_of(value: Any) -> int:
    """Length of the value as compact JSON in ASCII. No transport sends a longer form."""
    return len(json.dumps(value, separators=(",", ":")))


def shortened(text: str, room: int) -> str:
    """The text if it fits, else its beginning and end around a mark that says how much was left
    out.

    Args:
        text: any; secrets are struck out of it first.
        room: characters that it may take as JSON, quotes aside.

    >>> shortened("abcdefgh" * 20, 60)
    'abcdefghabcd [... 136 characters left out ...] efghabcdefgh'
    """
    text = Redactor.of_this_process().text(text)
    if len(text) <= room and size_of(text) - 2 <= room:
        return text
    half = max(0, (room - len(_mark(len(text)))) // 2)
    head = text[: _num_within(text[:half], half)]
    tail = text[len(text) - _num_within(text[len(text) - half :][::-1], half) :]
    return f"{head}{_mark(len(text) - len(head) - len(tail))}{tail}"


def _mark(num: int) -> str:
    return f" [... {num} characters left out ...] "


def _num_within(text: str, room: int) -> int:
    """How many characters of the beginning of a text take at most `room` as JSON."""
    num = len(text)
    excess = size_of(text) - 2 - room
    while excess > 0:
        num -= max(1, excess // _LONGEST_ESCAPE)
        excess = size_of(text[:num]) - 2 - room
    return num


def clipped(text: str, length: int) -> str:
    """At most so many characters; dots stand for the rest. Secrets go first: half of one would not
    be known as one.
    """
    if len(text) <= length:
        return text
    text = Redactor.of_this_process().text(text)
    if len(text) <= length:
        return text
    return f"{text[: length - 3]}..."


def rounded(value: Any, digits: int = 4) -> Any:
    """A float with so many significant digits. Any other value, NaN and infinity stay as they are.

    >>> rounded(0.0123456, 3)
    0.0123
    """
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return value


def beginning(text: str, words: Sequence[str]) -> int:
    """Where the longest end of `text` begins that is a beginning of one of `words`; its length if
    there is none.
    """
    longest = max((len(word) for word in words), default=0) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(word.startswith(text[at:]) for word in words):
            return at
    return len(text)
