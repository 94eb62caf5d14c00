"""Generalised advantage estimation: what a critic's values make of the rewards of sampled tokens.

    δ_m = r_m + γ_m V_{m+1} − V_m        A_m = δ_m + γ_m λ A_{m+1}        R_m = A_m + V_m

The sampled tokens of an episode are one sequence in order of time, over all of its turns; what the
environment wrote between them is skipped. V_m is the value of what stands before token m, and 0
after an episode's last token. γ_m is 1 within a turn and the discount from one turn to the next; λ
counts tokens. Source: arXiv 1506.02438; for language models, arXiv 2203.02155.

Shapes: M sampled tokens of a batch, K turns, S sequences of N rows (row i predicts token i + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halteres.training.advantages import is_degenerate
from halteres.training.datums import Example
from halteres.training.turns import FloatArray, IntArray, Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The sampled tokens of a batch, those of an episode in order of time."""

    inputs_S: tuple[IntArray, ...]  # of each sequence its tokens but the last, N
    sequence_M: IntArray
    row_M: IntArray  # of its sequence: the one that predicts it
    turn_M: IntArray  # rising
    episode_M: IntArray  # rising

    def __len__(self) -> int:
        """M."""
        return len(self.turn_M)

    def by_sequence(self) -> list[IntArray]:
        """Which of the M each sequence has, in order of time."""
        order_M = np.argsort(self.sequence_M, kind="stable")
        count_S = np.bincount(self.sequence_M, minlength=len(self.inputs_S))
        return np.split(order_M, np.cumsum(count_S)[:-1])

    def at_tokens(self, rows_S: Sequence[FloatArray]) -> FloatArray:
        """What each sequence has for its tokens, of shape (N + 1,), at the sampled ones: shape
        (M,).
        """
        found_M = np.zeros(len(self))
        for row_T, places in zip(rows_S, self.by_sequence(), strict=True):
            found_M[places] = row_T[self.row_M[places] + 1]
        return found_M

    def spread(self, values_M: FloatArray) -> tuple[FloatArray, ...]:
        """Numbers of sampled tokens as numbers of all tokens, S arrays of shape (N + 1,); 0 on
        context.
        """
        found = tuple(np.zeros(len(inputs_N) + 1) for inputs_N in self.inputs_S)
        for row_T, places in zip(found, self.by_sequence(), strict=True):
            row_T[self.row_M[places] + 1] = values_M[places]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What a critic said of a batch, and what came of it."""

    tokens: SampledTokens
    values_M: FloatArray  # when the batch was sampled, in the environment's own units
    advantages_M: FloatArray  # A, not whitened
    returns_M: FloatArray  # R, which the critic learns

    @property
    def explained_variance(self) -> float | None:
        """1 − Var(R − V) / Var(R): 1 of a critic that knows every return, 0 of a constant one. None
        where all returns are equal.
        """
        if is_degenerate(self.returns_M):
            return None
        return 1.0 - float(np.var(self.returns_M - self.values_M) / np.var(self.returns_M))


def sampled_tokens(turns: Turns, sequences: Sequence[Example], max_length: int) -> SampledTokens:
    """The tokens of a batch that the policy sampled.

    Args:
        turns: of the batch.
        sequences: of the batch, in order; masked ones have no sampled tokens.
        max_length: longest sequence in tokens that is trained on; the tokens of longer ones are
            skipped as context is.
    """
    found: list[tuple[int, int, int, int]] = []
    for turn, span in enumerate(turns.spans_K):
        actions_N = sequences[span.sequence].actions_N
        if len(actions_N) >= max_length:
            continue
        first = max(0, span.start - 1)
        rows = first + np.flatnonzero(actions_N[first : max(0, span.stop - 1)])
        episode = int(turns.episode_K[turn])
        found += [(span.sequence, row, turn, episode) for row in rows.tolist()]
    columns = np.array(found, dtype=np.int64).reshape(-1, 4)
    return SampledTokens(
        inputs_S=tuple(sequence.tokens_N for sequence in sequences),
        sequence_M=columns[:, 0],
        row_M=columns[:, 1],
        turn_M=columns[:, 2],
        episode_M=columns[:, 3],
    )


def token_rewards(tokens: SampledTokens, turns: Turns, discount: float) -> FloatArray:
    """What each sampled token earns, shape (M,): the last one of a turn earns the turn's reward.

    A turn without sampled tokens is paid at the last token before it, discounted, or, where there
    is none, at the episode's first.
    """
    rewards_M = np.zeros(len(tokens))
    before_K = np.searchsorted(tokens.turn_M, np.arange(len(turns.rewards_K)), side="right") - 1
    for turn, reward in enumerate(turns.rewards_K):
        episode, at = turns.episode_K[turn], int(before_K[turn])
        if at < 0 or tokens.episode_M[at] != episode:
            at += 1
        if at < len(tokens) and tokens.episode_M[at] == episode:
            turns_later = max(0, turn - int(tokens.turn_M[at]))
            rewards_M[at] += reward * discount**turns_later
    return rewards_M


def estimate_tokens(
    tokens: SampledTokens,
    rewards_M: FloatArray,
    values_M: FloatArray,
    *,
    discount: float,
    decay: float,
) -> TokenValues:
    """Advantages and returns of the sampled tokens.

    Args:
        tokens: of the batch.
        rewards_M: what each token earned.
        values_M: the critic's, of what stands before each token.
        discount: γ, what a reward one turn later is worth.
        decay: λ, per token: 1: returns less the value, 0: one token ahead.
    """
    advantages_M = np.zeros(len(tokens))
    # to the next token: γ per turn that lies between; 0 at an episode's end, after which nothing is
    # expected
    goes_on_M = np.append(np.diff(tokens.episode_M) == 0, False)[: len(tokens)]
    turns_on_M = np.append(np.diff(tokens.turn_M), 0)[: len(tokens)]
    discount_M = np.where(goes_on_M, discount**turns_on_M, 0.0)
    next_value = next_advantage = 0.0
    for m in range(len(tokens) - 1, -1, -1):
        delta = rewards_M[m] + discount_M[m] * next_value - values_M[m]
        next_advantage = delta + discount_M[m] * decay * next_advantage
        advantages_M[m], next_value = next_advantage, values_M[m]
    return TokenValues(
        tokens=tokens,
        values_M=values_M,
        advantages_M=advantages_M,
        returns_M=advantages_M + values_M,
    )


def turn_means(tokens: SampledTokens, advantages_M: FloatArray, num_turns: int) -> FloatArray:
    """The mean advantage of each turn's tokens, shape (K,); 0 of a turn without."""
    count_K = np.bincount(tokens.turn_M, minlength=num_turns)
    return np.bincount(tokens.turn_M, advantages_M, num_turns) / np.maximum(1, count_K)
