"""Which texts are computed together: those that others begin with are read out of these, rows come
in passes, comparisons in batches.

Shape suffixes: B rows, L tokens of the longest, T texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from halteres.engine.torch.trie import shared_length

Tokens = np.ndarray  # of one text: int64

# batches that are sorted by length together: rows of one length meet, and still differ from epoch
# to epoch
WINDOW = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """Texts as rows, out of which they are read."""

    tokens: tuple[Tokens, ...]
    places_T: tuple[tuple[int, int], ...]  # of each text its row, and its last token there

    @classmethod
    def apart(cls, texts: Sequence[Tokens]) -> Self:
        """A row for each text."""
        return cls(tuple(texts), tuple((row, len(text) - 1) for row, text in enumerate(texts)))

    @classmethod
    def joined(cls, texts: Sequence[Tokens]) -> Self:
        """A row for each text that no other begins with; rows that begin alike are neighbours."""
        order = sorted(range(len(texts)), key=lambda i: texts[i].astype(">i4").tobytes())
        rows, places = list[Tokens](), [(0, 0)] * len(texts)
        # A text stands right before those that begin with it, so that they are seen first.
        for i in reversed(order):
            text = texts[i]
            if not rows or shared_length(text, rows[-1]) < len(text):
                rows.append(text)
            places[i] = len(rows) - 1, len(text) - 1
        return cls(tuple(rows), tuple(places))

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return sum(map(len, self.tokens))

    @property
    def num_shared(self) -> int:
        """Of those, tokens that a row begins with as its neighbour does."""
        return sum(map(shared_length, self.tokens, self.tokens[1:]))


def padded_parts(lengths: Sequence[int], max_padding: int) -> list[list[int]]:
    """Cut rows, the longest first, into parts with so many tokens of padding at most."""
    parts: list[list[int]] = []
    longest = padding = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        padding += longest - lengths[row]
        if parts and padding <= max_padding:
            parts[-1].append(row)
        else:
            parts.append([row])
            longest, padding = lengths[row], 0
    return parts


def epoch_batches(
    lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int, by_length: bool = True
) -> list[list[int]]:
    """Every row once, in batches: shuffled, sorted by length within large windows, cut, and the
    batches shuffled.

    A pure function of lengths, seed and epoch, so that training resumes by its step number.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    if not by_length:
        return [
            order[start : start + batch_size].tolist() for start in range(0, len(order), batch_size)
        ]
    batches: list[list[int]] = []
    for start in range(0, len(order), WINDOW * batch_size):
        window = order[start : start + WINDOW * batch_size]
        falling = window[np.argsort([-lengths[row] for row in window], kind="stable")]
        batches += [
            falling[first : first + batch_size].tolist()
            for first in range(0, len(window), batch_size)
        ]
    return [batches[place] for place in random.permutation(len(batches))]


def padded(
    rows: Sequence[Tokens], padding: int, device: torch.device, multiple_of: int = 1
) -> Tensor:
    """Rows side by side, padded on the right; their length a multiple. Shape (B, L)."""
    longest = -(-max(map(len, rows)) // multiple_of) * multiple_of
    tokens_BL = np.full((len(rows), longest), padding, np.int64)
    for row_L, tokens in zip(tokens_BL, rows, strict=True):
        row_L[: len(tokens)] = tokens
    return torch.from_numpy(tokens_BL).to(device)
