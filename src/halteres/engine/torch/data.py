"""Datums on their way into a pass: checked, then planned into padded micro-batches.

Owns: arrays of a checked request; the plan, a pure function of shapes and configuration.
Never: computes; keeps anything of a refused request.

B datums, T tokens of each, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halteres.engine.checks import array, tokens_of
from halteres.engine.datums import check_pass, inputs_of
from halteres.engine.losses import TARGETS
from halteres.engine.protocol import Datum, LossSpec, ModelInfo
from halteres.engine.torch.cache import round_up


@dataclass(frozen=True, slots=True)
class Example:
    """A checked datum of N tokens."""

    tokens: np.ndarray  # N, int64
    targets: np.ndarray  # N or N x K, int64
    inputs: dict[str, np.ndarray]  # shaped as the targets; of a custom loss anyhow
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
    """Positions of every row of a micro-batch: steps of 8 from 16, so that no matmul is so small that its kernel
    changes."""
    return max(16, round_up(longest, 8))


def plan(lengths: Sequence[int], tokens: int) -> list[tuple[int, ...]]:
    """Micro-batches as indices into `lengths`: longest first, padded like the first, at most `tokens` padded tokens.

    A single sequence longer than that is a micro-batch of its own.

    >>> plan([3, 9, 4, 8], tokens=32)
    [(1, 3), (2, 0)]
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if room < 1:
            batches.append([])
            room = max(1, tokens // padded_length(lengths[index]))
        batches[-1].append(index)
        room -= 1
    return [tuple(batch) for batch in batches]


def micro_batches(examples: Sequence[Example], tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """The plan carried out; those side by side have equally many targets per token."""
    alike: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        alike.setdefault(example.targets.shape[1:], []).append(example)
    for group in alike.values():
        for batch in plan([len(example) for example in group], tokens):
            yield MicroBatch.of([group[i] for i in batch], device)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Examples side by side, padded at the end with token 0; N = B * T."""

    examples: tuple[Example, ...]
    length: int
    tokens_N: Tensor
    targets: Tensor  # B x T or B x T x K

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> MicroBatch:
        """Pad all to the length that the longest needs."""
        length = padded_length(max(map(len, examples)))
        return cls(
            examples=tuple(examples),
            length=length,
            tokens_N=_padded([e.tokens for e in examples], length, device).view(-1),
            targets=_padded([e.targets for e in examples], length, device),
        )

    @property
    def rows(self) -> int:
        """B."""
        return len(self.examples)

    def inputs(self) -> dict[str, Tensor]:
        """The loss's inputs, padded like the targets with zeros, so that the padding has no loss."""
        device = self.tokens_N.device
        names = self.examples[0].inputs
        return {name: _padded([e.inputs[name] for e in self.examples], self.length, device) for name in names}


def _padded(arrays: Sequence[np.ndarray], length: int, device: torch.device) -> Tensor:
    padded = np.zeros((len(arrays), length, *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    for row, values in zip(padded, arrays, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded).to(device)
