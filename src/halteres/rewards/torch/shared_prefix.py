"""Texts that begin alike, as one row: what they share is computed once.

Owns: a row of tokens, positions and branches; which tokens see each other; where each text is read out; whether
sharing is less work.
Never: runs a model.

The longest text is the trunk, branch 0; where another text leaves it, the rest of that text stands in a branch of its
own, before the trunk goes on: texts that grow, each out of the one before, are hardly longer than the last of them. A
token sees the tokens before it in branch 0 and in its own branch, at the positions that they have in the text alone,
so that the text's hidden states are those of a row of its own. Shape suffixes: B rows, L tokens of the longest row,
K texts of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

PADDING = -1
"""The branch of padding. It sees tokens, so that no softmax is over nothing; no token sees it, for it comes last."""


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
    rows_T: Tensor  # of each text, all rows' texts end to end: its row
    ends_T: Tensor  # ... and the place of its last token there


def shared_row(texts: Sequence[Sequence[int]]) -> SharedRow:
    """The longest text, and of every other what it does not begin with."""
    trunk = max(texts, key=len)
    shared = [shared_length(text, trunk) for text in texts]
    tokens, positions, branches, places = list[int](), list[int](), list[int](), list[int]()  # places: of the trunk
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
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def sharing_pays(lengths: Sequence[int], together: int, width: int) -> bool:
    """Whether one row of so many tokens is less work than K rows of these lengths.

    A token costs about 24 * width² operations in a layer's matrices, and 4 * width for each token of its row in
    attention, where a mask spares nothing: a short shared prefix before long texts is computed faster apart.
    """
    return 6 * width * (sum(lengths) - together) + sum(length**2 for length in lengths) > together**2


def batch_of(rows: Sequence[SharedRow], padding: int, device: torch.device, multiple_of: int = 1) -> SharedBatch:
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
        mask_B1LL=_mask(torch.from_numpy(branches_BL).to(device)) if branching else None,
        rows_T=rows_T,
        ends_T=ends_T,
    )


def _mask(branches_BL: Tensor) -> Tensor:
    """0 where a token sees another, else the lowest number of its type."""
    keys_B1L, queries_BL1 = branches_BL.unsqueeze(1), branches_BL.unsqueeze(2)
    seen_BLL = (keys_B1L == 0) | (keys_B1L == queries_BL1) | (queries_BL1 == PADDING)
    seen_BLL = seen_BLL.tril()
    mask_BLL = torch.zeros(seen_BLL.shape, device=branches_BL.device)
    return mask_BLL.masked_fill_(~seen_BLL, torch.finfo(torch.float32).min).unsqueeze(1)
