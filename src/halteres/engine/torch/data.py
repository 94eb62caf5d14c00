"""Datums on their way into a pass: checked, then planned into padded micro-batches.

Owns: arrays of a checked request; the plan, a pure function of lengths and configuration.
Never: computes; keeps anything of a refused request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halteres.engine.checks import array, check_pass, tokens_of
from halteres.engine.protocol import Datum, ModelInfo
from halteres.engine.torch.cache import round_up
from halteres.engine.torch.losses import find_loss

TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True)
class Example:
    """A checked datum of N tokens."""

    tokens: np.ndarray  # N, int64
    targets: np.ndarray  # N, int64
    inputs: dict[str, np.ndarray]  # N each, float32

    def __len__(self) -> int:
        return len(self.tokens)


def read_examples(data: tuple[Datum, ...], loss: str, model: ModelInfo) -> list[Example]:
    """Check every datum before anything is computed.

    Raises:
        InvalidData: there is no such loss; or names the datum's index and the input.
    """
    names = find_loss(loss).inputs
    check_pass(data, loss, model)
    return [
        Example(
            tokens=tokens_of(datum.tokens).astype(np.int64),
            targets=array(datum.inputs[TARGETS]),
            inputs={name: array(datum.inputs[name]) for name in names},
        )
        for datum in data
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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Examples side by side, padded at the end with token 0; N = rows * length."""

    rows: int
    length: int
    tokens_N: Tensor
    targets_N: Tensor
    inputs: dict[str, Tensor]  # N each; zeros in the padding, so it has no loss

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> MicroBatch:
        """Pad all to the length that the longest needs."""
        length = padded_length(max(map(len, examples)))
        tokens = _padded([e.tokens for e in examples], length, device)
        return cls(
            rows=len(examples),
            length=length,
            tokens_N=tokens,
            targets_N=_padded([e.targets for e in examples], length, device),
            inputs={name: _padded([e.inputs[name] for e in examples], length, device) for name in examples[0].inputs},
        )


def _padded(arrays: Sequence[np.ndarray], length: int, device: torch.device) -> Tensor:
    padded = np.zeros((len(arrays), length), dtype=arrays[0].dtype)
    for row, values in zip(padded, arrays, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded.reshape(-1)).to(device)
