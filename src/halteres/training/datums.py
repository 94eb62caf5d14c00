"""Datums: sequences and their advantages as training examples.

A sequence of T tokens becomes N = T - 1 rows: row i predicts token i + 1. A context token is known
by its log-probability, which is the sentinel 1.0 (where there are none, by its mask); its advantage
is 0, and so it moves nothing. The group's masks must agree. S sequences of a batch, K turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from halteres.config.settings import Weighting
from halteres.errors import InvalidData
from halteres.losses import SEQUENCE_RATIO_MASK, LossKind
from halteres.training.turns import FloatArray, Turns, action_mask, check_masks
from halteres.types import CONTEXT_LOGPROB, MASKED, Batch, Group

FIX = "Mend the environment, then resume from the last checkpoint."

Row = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One sequence of N rows, as a loss reads it."""

    tokens_N: NDArray[np.int64]  # model input: the sequence without its last token
    targets_N: NDArray[np.int64]  # the sequence without its first
    # of the targets, as the loss reads them: the sampler's, or corrected ones; 0 on context
    logprobs_N: Row
    sampled_N: Row  # ... as the sampler gave them
    advantages_N: Row  # 0 on context
    actions_N: NDArray[np.bool_]  # the target was sampled by the policy
    # smallest and largest policy version that wrote it; None if untagged
    versions: tuple[int, int] | None

    def moves(self, loss: LossKind, config: Mapping[str, float]) -> bool:
        """True where it can move a weight: it has an advantage, or the loss pulls sampled tokens
        without one.
        """
        pulled = (
            bool(loss.kl_setting) and config.get(loss.kl_setting, loss.config[loss.kl_setting]) > 0
        )
        return bool(self.advantages_N.any()) or (pulled and bool(self.actions_N.any()))

    def masked(self) -> Example:
        """The same sequence with nothing to train on."""
        return replace(self, actions_N=np.zeros_like(self.actions_N))

    def inputs(self, loss: LossKind) -> dict[str, Row]:
        """What the loss reads beside the targets, N of each, by the names that the Tinker API gives
        them.
        """
        known = {
            "logprobs": self.logprobs_N,
            "advantages": self.advantages_N,
            "weights": self.advantages_N,
            SEQUENCE_RATIO_MASK: self.actions_N.astype(np.float32),
        }
        return {name: known[name] for name in loss.inputs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """A batch ready for training, and what was left out of it."""

    useful: tuple[Example, ...]
    too_long: int  # sequences longer than the trainer takes
    without_signal: int  # sequences that can move no weight


def to_sequences(batch: Batch, *, needs_logprobs: bool) -> tuple[Example, ...]:
    """The sequences of a batch, shifted and masked, S of them, without advantages.

    Raises:
        InvalidData: a group has no log-probabilities and they are needed, lengths differ, or masks
            and log-probabilities disagree.
    """
    for index, group in enumerate(batch.groups):
        _check(group, index, needs_logprobs=needs_logprobs)
    return tuple(
        to_sequence(
            tokens,
            group.logprobs[i] if group.logprobs else np.zeros(len(tokens)),
            action_mask(group, i),
            group.versions[i] if group.versions else None,
        )
        for group in batch.groups
        for i, tokens in enumerate(group.tokens)
    )


def to_examples(
    sequences: Sequence[Example],
    advantages_S: Sequence[FloatArray],
    max_length: int,
    loss: LossKind,
    config: Mapping[str, float],
) -> Examples:
    """The examples of a batch that can move weights.

    Args:
        sequences: of the batch, in order.
        advantages_S: of each sequence's tokens, shape (T,); what they say of context is not looked
            at.
        max_length: longest sequence in tokens; longer ones are left out and counted.
        loss: what reads them, with its settings.
    """
    examples = [
        replace(
            sequence,
            advantages_N=np.where(sequence.actions_N, advantages_T[1:], 0.0).astype(np.float32),
        )
        for sequence, advantages_T in zip(sequences, advantages_S, strict=True)
        if len(sequence.tokens_N) < max_length
    ]
    useful = tuple(example for example in examples if example.moves(loss, config))
    too_long, without_signal = len(sequences) - len(examples), len(examples) - len(useful)
    return Examples(useful=useful, too_long=too_long, without_signal=without_signal)


def spread(
    turns: Turns,
    advantages_K: FloatArray,
    sequences: Sequence[Example],
    weighting: Weighting = "token",
) -> tuple[FloatArray, ...]:
    """Advantages of turns as advantages of tokens, S arrays of shape (T,).

    Args:
        turns: of the batch.
        advantages_K: one per turn.
        sequences: of the batch, in order.
        weighting: what counts the same in the loss, which sums over tokens. "token": every token of
            an action has its turn's advantage. "turn", "episode": the tokens of a turn or an
            episode share what one token of average length would have, so that long ones weigh no
            more than short ones (GRPO's 1/|o| is "episode").
    """
    # Token i is the target of row i - 1.
    rows_K = [
        (sequences[s.sequence].actions_N, max(0, s.start - 1), max(0, s.stop - 1))
        for s in turns.spans_K
    ]
    lengths_K = np.array([int(actions_N[start:stop].sum()) for actions_N, start, stop in rows_K])
    shared_K = advantages_K * _weights(turns, lengths_K, weighting)
    advantages_S = tuple(np.zeros(len(sequence.tokens_N) + 1) for sequence in sequences)
    for span, advantage in zip(turns.spans_K, shared_K, strict=True):
        advantages_S[span.sequence][span.start : span.stop] = advantage
    return advantages_S


def _weights(turns: Turns, lengths_K: NDArray[np.int64], weighting: Weighting) -> FloatArray:
    if weighting == "token" or not lengths_K.size:
        return np.ones(len(lengths_K))
    part_K = np.arange(len(lengths_K)) if weighting == "turn" else turns.episode_K
    length_P = np.bincount(part_K, lengths_K)
    used_P = length_P[length_P > 0]
    return (
        used_P.mean() / np.maximum(1, length_P[part_K]) if used_P.size else np.ones(len(lengths_K))
    )


def to_sequence(
    tokens: Sequence[int] | NDArray[np.int64],
    logprobs: Sequence[float] | FloatArray,
    actions_T: NDArray[np.bool_],
    versions: tuple[int, int] | None = None,
) -> Example:
    """One sequence, shifted and masked, without advantages. Source: tinker-atropos.

    >>> example = to_sequence([5, 6, 7], [1.0, -0.5, -0.25], np.array([False, True, True]))
    >>> example.tokens_N.tolist(), example.targets_N.tolist(), example.logprobs_N.tolist()
    ([5, 6], [6, 7], [-0.5, -0.25])
    """
    tokens_T = np.asarray(tokens, dtype=np.int64)
    logprobs_N = np.asarray(logprobs, dtype=np.float64)[1:]
    actions_N = actions_T[1:]
    sampled_N = np.where(actions_N, logprobs_N, 0.0).astype(np.float32)
    return Example(
        tokens_N=tokens_T[:-1],
        targets_N=tokens_T[1:],
        logprobs_N=sampled_N,
        sampled_N=sampled_N,
        advantages_N=np.zeros(len(actions_N), dtype=np.float32),
        actions_N=actions_N,
        versions=versions,
    )


def _check(group: Group, index: int, *, needs_logprobs: bool) -> None:
    """An environment of anybody's may have made the group; the trainer says what it lacks."""
    if not group.logprobs and not needs_logprobs:
        check_masks(group, index)
        return
    if len(group.logprobs) != len(group.tokens):
        raise InvalidData(
            f"Group {index} of the batch has {len(group.tokens)} sequences and log-probabilities "
            "for "
            f"{len(group.logprobs)}.",
            "The loss, the KL penalty or the correction needs the sampler's log-probability of "
            "every token.",
            "Let the environment send inference_logprobs (with atroposlib: server_type sglang and "
            "a managed server), "
            "or train with trainer.loss cross_entropy, which needs none.",
        )
    for i, (tokens, logprobs) in enumerate(zip(group.tokens, group.logprobs, strict=True)):
        which = f"Sequence {i} of group {index}"
        if len(tokens) != len(logprobs) or not np.isfinite(logprobs).all():
            raise InvalidData(
                f"{which} has {len(tokens)} tokens and {len(logprobs)} log-probabilities, or one "
                "is not finite.",
                "They must be aligned, one finite number per token (1.0 on context).",
                FIX,
            )
        if not group.masks:
            continue
        masks = group.masks[i]
        if len(masks) != len(tokens):
            what = f"{which} has {len(tokens)} tokens and {len(masks)} masks."
            raise InvalidData(what, "They must be aligned, one per token.", FIX)
        # The mask is told twice; where the two differ, prompts might be trained on.
        differ_T = (np.asarray(masks) == MASKED) != (np.asarray(logprobs) == CONTEXT_LOGPROB)
        if differ_T.any():
            at = int(np.flatnonzero(differ_T)[0])
            raise InvalidData(
                f"{which} has mask {masks[at]} and log-probability {logprobs[at]:g} at token {at}.",
                f"A context token has mask {MASKED} and log-probability {CONTEXT_LOGPROB}, a "
                "sampled token neither.",
                FIX,
            )
