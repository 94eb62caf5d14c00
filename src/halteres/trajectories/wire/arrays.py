"""Arrays of numbers as they stand in JSON: how long each row is, without an object per number.

Owns: what can be said of `[[1,2],[3]]` by looking at its bytes.
Never: reads a number. Whoever calls has had the JSON grammar checked (`msgspec.Raw`), which takes a third of the time
that objects would.

A text of digits, signs, commas and one bracket pair per row is numbers in rows, because the grammar allows nothing else
with these characters. Whatever looks otherwise is not refused here: None says "read it the long way".
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Marks = NDArray[np.bool_]
Lengths = NDArray[np.intp]

QUOTE, COMMA, MINUS, POINT, NINE, OPEN, CLOSE, BRACKET, EXPONENT = b'",-.9[]_e'

_EITHER_BRACKET = 0x06
"""Of all that stands outside strings, `[` and `]` alone become BRACKET by these bits."""

MOST_ROWS = 4096
"""Rows of more are counted the long way: here each costs a call."""


def row_lengths(raw: msgspec.Raw, *, integers: bool) -> Lengths | None:
    """How many numbers each row of a nested array holds; None where it is anything but non-empty rows of numbers.

    Args:
        raw: valid JSON.
        integers: only integers of ordinary length; otherwise finite numbers.
    """
    text_N = np.frombuffer(memoryview(raw), np.uint8)
    commas_N, marks_B = text_N == COMMA, np.flatnonzero((text_N | _EITHER_BRACKET) == BRACKET)
    num_others = np.count_nonzero(text_N > NINE) - len(marks_B)  # letters, braces
    if (text_N == QUOTE).any():
        return None
    if integers:
        if num_others or (text_N == POINT).any() or _has_long_number(commas_N | (text_N > NINE), 1):
            return None
    elif num_others != _num_small_exponents(text_N) or _has_long_number(commas_N, 16):
        return None
    return _lengths(text_N, commas_N, marks_B)


def _num_small_exponents(text_N: Bytes) -> int:
    """Those like `e-07`; any other may be infinite."""
    return int(np.count_nonzero((text_N[:-1] == EXPONENT) & (text_N[1:] == MINUS)))


def _has_long_number(marks_N: Marks, num_words: int) -> bool:
    """Whether a stretch of 8 `num_words` bytes, counted from the start, holds no mark.

    True for every number twice as long. Integers of 15 digits may be beyond what a machine counts, and numbers of 255
    beyond what a float holds; no token id has 7 digits.
    """
    stretch = 8 * num_words
    words = marks_N[: len(marks_N) // stretch * stretch].view(np.uint64)
    return not (words != 0).reshape(-1, num_words).any(axis=1).all()


def _lengths(text_N: Bytes, commas_N: Marks, marks_B: Lengths) -> Lengths | None:
    """Of the brackets in order: one that opens, then pairs with a comma between two of them, one that closes."""
    opens_R, closes_R = marks_B[1:-1:2], marks_B[2:-1:2]
    if not 0 < len(opens_R) == len(closes_R) <= MOST_ROWS:
        return None
    if (text_N[opens_R] != OPEN).any() or (text_N[closes_R] != CLOSE).any():
        return None  # deeper
    rows = list(zip(opens_R.tolist(), closes_R.tolist(), strict=True))
    lengths = np.array([np.count_nonzero(commas_N[start:end]) + 1 for start, end in rows])
    if np.count_nonzero(commas_N) != lengths.sum() - 1:
        return None  # numbers between the rows
    if any(not text_N[rows[row][0] + 1 : rows[row][1]].tobytes().strip() for row in np.flatnonzero(lengths == 1)):
        return None  # an empty row
    return lengths
