"""Datums on their way into a pass: checked, then planned into micro-batches.

B datums, T tokens of each, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halteres.engine.checks import TARGETS, array, check_pass, inputs_of, tokens_of
from halteres.engine.protocol import Datum, LossSpec, ModelInfo
from halteres.engine.torch.projections import round_up
from halteres.engine.torch.trie import Trie, axis_length, shared_length

# sequences that share fewer tokens stay in the order of their lengths, which wastes less
LEAST_SHARED = 8
LEAST_SAVING = 0.9  # a trie is computed if it has at most this part of the padded rows' tokens


@dataclass(frozen=True, slots=True)
class Example:
    """A checked datum of N tokens."""

    tokens: np.ndarray  # N, int64
    targets: np.ndarray  # N or N x K, int64
    inputs: dict[str, np.ndarray]  # shaped as the targets
    index: int = 0  # in its request

    def __len__(self) -> int:
        return len(self.tokens)


def read_examples(data: tuple[Datum, ...], loss: LossSpec, model: ModelInfo) -> list[Example]:
    """Check every datum before anything is computed.

    Raises:
        InvalidData: there is no such loss; or names the datum's index and the input.
    """
    config = check_pass(data, loss, model)
    return [
        Example(
            tokens=tokens_of(datum.tokens).astype(np.int64),
            targets=array(datum.inputs[TARGETS]),
            inputs=inputs_of(datum, loss, config),
            index=index,
        )
        for index, datum in enumerate(data)
    ]


def padded_length(longest: int) -> int:
    """Positions of every row of a micro-batch: steps of 8 from 16, so that no matmul is so small
    that its kernel changes.
    """
    return max(16, round_up(longest, 8))


def plan(sequences: Sequence[np.ndarray], tokens: int, share: bool = True) -> list[tuple[int, ...]]:
    """Micro-batches as indices into `sequences`, of at most `tokens` computed tokens.

    Sequences that begin alike come together, in lexicographic order; such families, and those
    without one, by their longest, longest first. A single sequence longer than the bound is a
    micro-batch of its own; a family larger than it is split, and its prefix computed once in each
    part.

    >>> plan([np.arange(3), np.arange(9), np.arange(4), np.arange(8)], tokens=32, share=False)
    [(1, 3), (2, 0)]
    """
    batches: list[list[int]] = []
    # Of the newest batch; the size is that of its trie.
    rows = longest = size = 0
    for family in _families(sequences, share):
        for index in family:
            length, shared = len(sequences[index]), 0
            if batches and share:
                shared = shared_length(sequences[batches[-1][-1]], sequences[index])
            rows += 1
            longest = max(longest, length)
            size += length - shared
            if not batches or _computed(rows, longest, size) > tokens:
                batches.append([])
                rows, longest, size = 1, length, length
            batches[-1].append(index)
    return [tuple(batch) for batch in batches]


def _families(sequences: Sequence[np.ndarray], share: bool) -> list[list[int]]:
    """Indices of sequences that share at least `LEAST_SHARED` tokens with their neighbours; longest
    first.
    """
    by_length = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
    if not share:
        return [[index] for index in by_length]
    rank = {index: place for place, index in enumerate(by_length)}
    families: list[list[int]] = []
    for index in sorted(by_length, key=lambda i: sequences[i].astype(">i4").tobytes()):
        shared = 0
        if families:
            shared = shared_length(sequences[families[-1][-1]], sequences[index])
        if shared >= LEAST_SHARED:
            families[-1].append(index)
        else:
            families.append([index])
    return sorted(families, key=lambda family: min(rank[index] for index in family))


def _computed(rows: int, longest: int, size: int) -> int:
    """Tokens, padding among them: of the trie where it is less work than rows, which need no
    gathering of keys.
    """
    of_rows, of_trie = rows * padded_length(longest), axis_length(size)
    if of_trie <= LEAST_SAVING * of_rows:
        return of_trie
    return of_rows


def planned(
    examples: Sequence[Example], tokens: int, share: bool = True
) -> list[tuple[Example, ...]]:
    """The examples of each micro-batch; those side by side have equally many targets per token."""
    alike: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        alike.setdefault(example.targets.shape[1:], []).append(example)
    return [
        tuple(group[i] for i in batch)
        for group in alike.values()
        for batch in plan([example.tokens for example in group], tokens, share)
    ]


def trie_of(sequences: Sequence[np.ndarray]) -> Trie | None:
    """What these sequences share as a trie, in their order; None where rows, padded to one length,
    are hardly more work.
    """
    trie = Trie.of(sequences)
    padded = len(sequences) * padded_length(max(map(len, sequences)))
    if len(trie.tokens_N) <= LEAST_SAVING * padded:
        return trie
    return None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Examples side by side, padded at the end with token 0; N = B * T."""

    examples: tuple[Example, ...]
    length: int
    tokens_N: Tensor
    targets: Tensor  # B x T or B x T x K
    trie: Trie | None = None  # where computing shared tokens once is less work

    @classmethod
    def of(
        cls, examples: Sequence[Example], device: torch.device, share: bool = True
    ) -> MicroBatch:
        """Pad all to the length that the longest needs."""
        length = padded_length(max(map(len, examples)))
        trie = None
        if share:
            trie = trie_of([example.tokens for example in examples])
        return cls(
            examples=tuple(examples),
            length=length,
            tokens_N=_padded([e.tokens for e in examples], length, device).view(-1),
            targets=_padded([e.targets for e in examples], length, device),
            trie=trie,
        )

    @property
    def rows(self) -> int:
        """B."""
        return len(self.examples)

    @property
    def size(self) -> int:
        """Tokens to be computed, padding among them."""
        if self.trie is None:
            return self.rows * self.length
        return len(self.trie.tokens_N)

    def weighted(self) -> Tensor:
        """B x T: tokens that a weight or an advantage gives a loss; some losses have others,
        too.
        """
        found: list[np.ndarray] = []
        for example in self.examples:
            scale = example.inputs.get("advantages", example.inputs.get("weights"))
            if scale is None:
                scale = np.ones(len(example))
            found.append(scale != 0)
        return _padded(found, self.length, self.tokens_N.device)

    def inputs(self) -> dict[str, Tensor]:
        """The loss's inputs, padded like the targets with zeros, so that the padding has no
        loss.
        """
        device = self.tokens_N.device
        names = self.examples[0].inputs
        return {
            name: _padded([e.inputs[name] for e in self.examples], self.length, device)
            for name in names
        }


def _padded(arrays: Sequence[np.ndarray], length: int, device: torch.device) -> Tensor:
    padded = np.zeros((len(arrays), length, *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    for row, values in zip(padded, arrays, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded).to(device)
