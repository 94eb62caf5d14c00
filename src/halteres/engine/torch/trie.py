"""The sequences of a micro-batch as a prefix trie on one flat axis: what they share is computed once.

Owns: where every token of every sequence lies, and which log-probabilities are asked of which token.
Never: runs a model; chooses what comes together (`data` does).

A sequence shares its longest common prefix with the one before it, which shares with its own predecessor; in
lexicographic order that is the whole trie. What is left of it, its run, is appended to the flat axis.

N tokens of the axis, L tokens of a sequence, P asked log-probabilities (of K targets each), B sequences, T of the
longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halteres.engine.torch.cache import round_up

AXIS_STEP = 8
"""Rows of every matmul are a multiple of this: with fewer than 4 rows kernels change, and with them bits."""


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence: where its tokens lie, and which of them are its own."""

    path_L: np.ndarray
    start: int  # position of its first own token

    def __len__(self) -> int:
        return len(self.path_L)


@dataclass(frozen=True, slots=True)
class Trie:
    """Runs end to end; the axis ends with at least one token of padding."""

    tokens_N: np.ndarray
    positions_N: np.ndarray
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> Trie:
        """Every sequence after its common prefix with the one before it."""
        runs: list[Run] = []
        size, before = 0, np.empty(0, np.int64)
        for tokens in sequences:
            start = shared_length(before, tokens)
            path_L = np.arange(size - start, size - start + len(tokens))
            if start:
                path_L[:start] = runs[-1].path_L[:start]
            runs.append(Run(path_L, start))
            size, before = size + len(tokens) - start, tokens
        tokens_N, positions_N = np.zeros((2, axis_length(size)), np.int64)
        for run, tokens in zip(runs, sequences, strict=True):
            own = run.path_L[run.start :]
            tokens_N[own], positions_N[own] = tokens[run.start :], np.arange(run.start, len(run))
        return cls(tokens_N, positions_N, tuple(runs))


@dataclass(frozen=True, slots=True)
class Asked:
    """Which log-probabilities are computed, and which of them each target of each sequence reads.

    Sequences that share a token share its log-probability where they share the target, too.
    """

    rows_P: np.ndarray  # where on the flat axis
    targets_P: np.ndarray  # or P x K
    cells_BT: np.ndarray  # which of them; padding reads the first

    @classmethod
    def of(cls, trie: Trie, targets: Sequence[np.ndarray], length: int) -> Asked:
        """Targets per sequence, L or L x K; `length` is T."""
        rows: list[np.ndarray] = []
        wanted: list[np.ndarray] = []
        cells_BT = np.zeros((len(targets), length), np.int64)
        size = 0
        for i, (run, own) in enumerate(zip(trie.runs, targets, strict=True)):
            new = np.ones(len(run), np.bool_)
            if run.start:
                alike = own[: run.start] == targets[i - 1][: run.start]
                new[: run.start] = ~(alike.all(1) if alike.ndim > 1 else alike)
                cells_BT[i, : run.start] = cells_BT[i - 1, : run.start]
            count = int(new.sum())
            cells_BT[i, : len(run)][new] = np.arange(size, size + count)
            rows.append(run.path_L[new])
            wanted.append(own[new])
            size += count
        padding = axis_length(size) - size
        rows.append(np.full(padding, len(trie.tokens_N) - 1))
        wanted.append(np.zeros((padding, *targets[0].shape[1:]), np.int64))
        return cls(np.concatenate(rows), np.concatenate(wanted), cells_BT)


def shared_length(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens of the longest common prefix."""
    length = min(len(one), len(other))
    apart = np.flatnonzero(one[:length] != other[:length])
    return int(apart[0]) if len(apart) else length


def axis_length(size: int) -> int:
    """With padding, of which there is at least one: queries and keys that are none are read there."""
    return max(2 * AXIS_STEP, round_up(size + 1, AXIS_STEP))
