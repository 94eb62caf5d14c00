"""Which texts are computed together: those that begin alike as one row, rows in passes, comparisons
in batches.

The longest text is the trunk, branch 0; where another text leaves it, the rest of that text stands
in a branch of its own, before the trunk goes on: texts that grow, each out of the one before, are
hardly longer than the last of them. A token sees the tokens before it in branch 0 and in its own
branch, at the positions that they have in the text alone, so that the text's hidden states are
those of a row of its own. Shape suffixes: B rows, L tokens of the longest row, K texts of a row, T
texts of all rows end to end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

# batches that are sorted by length together: rows of one length meet, and still differ from epoch
# to epoch
WINDOW = 64
# the branch of padding: it sees tokens, for no softmax may be over nothing; none sees it, it comes
# last
PADDING = -1


@dataclass(frozen=True, slots=True)
class SharedRow:
    """K texts as one row."""

    tokens_L: tuple[int, ...]
    positions_L: tuple[int, ...]  # of each token in its text
    branches_L: tuple[int, ...]  # 0: the trunk; k: of text k - 1 alone
    ends_K: tuple[int, ...]  # where in the row each text's last token stands


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """Rows, padded on the right."""

    tokens_BL: Tensor
    positions_BL: Tensor | None  # None: as the tokens stand in their rows
    mask_B1LL: Tensor | None  # added to attention scores; None: a token sees all before it
    rows_T: Tensor  # of each text its row
    ends_T: Tensor  # ... and the place of its last token there


def shared_row(texts: Sequence[Sequence[int]]) -> SharedRow:
    """The longest text, and of every other what it does not begin with."""
    trunk = max(texts, key=len)
    shared = [shared_length(text, trunk) for text in texts]
    # places: of the trunk
    tokens, positions, branches, places = list[int](), list[int](), list[int](), list[int]()
    ends = [0] * len(texts)
    for k in sorted(range(len(texts)), key=shared.__getitem__):
        first, own = len(places), texts[k][shared[k] :]
        places += range(len(tokens), len(tokens) + shared[k] - first)
        tokens += [*trunk[first : shared[k]], *own]
        positions += range(first, len(texts[k]))
        branches += [0] * (shared[k] - first) + [k + 1] * len(own)
        ends[k] = len(tokens) - 1 if own else places[shared[k] - 1]
    return SharedRow(tuple(tokens), tuple(positions), tuple(branches), tuple(ends))


def single_row(text: Sequence[int], ends: Sequence[int] | None = None) -> SharedRow:
    """One text as a row, read out at its last token or at these places."""
    places = tuple(ends) if ends is not None else (len(text) - 1,)
    return SharedRow(tuple(text), tuple(range(len(text))), (0,) * len(text), places)


def shared_length(text: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    )


def sharing_pays(lengths: Sequence[int], together: int, width: int) -> bool:
    """Whether one row of so many tokens is less work than K rows of these lengths.

    A token costs about 24 * width² operations in a layer's matrices, and 4 * width for each token
    of its row in attention, where a mask spares nothing: a short shared prefix before long texts is
    computed faster apart.
    """
    return (
        6 * width * (sum(lengths) - together) + sum(length**2 for length in lengths) > together**2
    )


def forward_parts(
    sizes: Sequence[tuple[int, int]], max_tokens: float = math.inf, max_padding: float = math.inf
) -> list[list[int]]:
    """Cut items, the longest first, into parts; an item that is larger than allowed is a part by
    itself.

    Args:
        sizes: of each item, its number of rows and the tokens of its longest.
        max_tokens: rows times the longest row of a part.
        max_padding: of those, tokens that are padding.
    """
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item][1], item))
    parts: list[list[int]] = []
    rows = longest = padding = 0
    for item in order:
        count, length = sizes[item]
        padding += count * (longest - length)
        if parts and (rows + count) * longest <= max_tokens and padding <= max_padding:
            parts[-1].append(item)
            rows += count
        else:
            parts.append([item])
            rows, longest, padding = count, length, 0
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


def batch_of(
    rows: Sequence[SharedRow], padding: int, device: torch.device, multiple_of: int = 1
) -> SharedBatch:
    """Rows side by side; their length a multiple."""
    longest = -(-max(len(row.tokens_L) for row in rows) // multiple_of) * multiple_of
    shape = (len(rows), longest)
    tokens_BL, positions_BL = np.full(shape, padding, np.int64), np.zeros(shape, np.int64)
    branches_BL = np.full(shape, PADDING, np.int64)
    for b, row in enumerate(rows):
        length = len(row.tokens_L)
        tokens_BL[b, :length] = row.tokens_L
        positions_BL[b, :length] = row.positions_L
        branches_BL[b, :length] = row.branches_L
    places = [(b, end) for b, row in enumerate(rows) for end in row.ends_K]
    rows_T, ends_T = (torch.tensor(column, device=device) for column in zip(*places, strict=True))
    branching = bool((branches_BL > 0).any())
    return SharedBatch(
        tokens_BL=torch.from_numpy(tokens_BL).to(device),
        positions_BL=torch.from_numpy(positions_BL).to(device) if branching else None,
        mask_B1LL=branch_mask(torch.from_numpy(branches_BL).to(device)) if branching else None,
        rows_T=rows_T,
        ends_T=ends_T,
    )


def branch_mask(branches_BL: Tensor) -> Tensor:
    """Added to attention scores, shape (B, 1, L, L): 0 where a token sees another, else the lowest
    number.
    """
    keys_B1L, queries_BL1 = branches_BL.unsqueeze(1), branches_BL.unsqueeze(2)
    seen_BLL = ((keys_B1L == 0) | (keys_B1L == queries_BL1) | (queries_BL1 == PADDING)).tril()
    mask_BLL = torch.zeros(seen_BLL.shape, device=branches_BL.device)
    return mask_BLL.masked_fill_(~seen_BLL, torch.finfo(torch.float32).min).unsqueeze(1)
