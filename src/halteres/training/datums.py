"""Datums: sequences and their advantages as training examples.

Owns: the shift by one token, the mask, which sequences are worth a pass.
Never: pads, truncates, tokenises; talks to a service.

A sequence of T tokens becomes N = T - 1 rows: row i predicts token i + 1. A context token is known by its
log-probability, which is the sentinel 1.0; its advantage is 0, and so it moves nothing. The group's masks must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halteres.errors import InvalidData
from halteres.training.advantages import FloatArray
from halteres.types import CONTEXT_LOGPROB, MASKED, Batch, Group

MEND = "Mend the environment, then resume from the last checkpoint."


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One training example of N rows."""

    tokens_N: NDArray[np.int64]  # model input: the sequence without its last token
    targets_N: NDArray[np.int64]  # the sequence without its first
    logprobs_N: NDArray[np.float32]  # of the targets, as the sampler gave them; 0 on context
    advantages_N: NDArray[np.float32]  # 0 on context
    actions_N: NDArray[np.bool_]  # the target was sampled by the policy
    versions: tuple[int, int] | None  # smallest and largest policy version that wrote it; None if untagged

    @property
    def moves(self) -> bool:
        """True where some advantage is not 0: only then can the example move a weight."""
        return bool(self.advantages_N.any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """A batch ready for training, and what was left out of it."""

    kept: tuple[Example, ...]
    too_long: int  # sequences longer than the trainer takes
    without_signal: int  # sequences whose every advantage is 0


def to_examples(batch: Batch, advantages: Sequence[FloatArray], max_length: int) -> Examples:
    """The examples of a batch that can move weights.

    Args:
        batch: groups in order.
        advantages: one array per group, one number per sequence.
        max_length: longest sequence in tokens; longer ones are left out and counted.

    Raises:
        InvalidData: a group has no log-probabilities, lengths differ, or masks and log-probabilities disagree.
    """
    kept: list[Example] = []
    too_long = without_signal = 0
    for tokens, logprobs, advantage, versions in _sequences(batch, advantages):
        if len(tokens) > max_length:
            too_long += 1
            continue
        example = to_example(tokens, logprobs, advantage, versions)
        if example.moves:
            kept.append(example)
        else:
            without_signal += 1
    return Examples(kept=tuple(kept), too_long=too_long, without_signal=without_signal)


def to_example(
    tokens: Sequence[int], logprobs: Sequence[float], advantage: float, versions: tuple[int, int] | None = None
) -> Example:
    """One sequence, shifted and masked. Source: tinker-atropos; the sentinel 1.0 is the mask.

    >>> example = to_example([5, 6, 7], [1.0, -0.5, -0.25], 2.0)
    >>> example.tokens_N.tolist(), example.targets_N.tolist(), example.advantages_N.tolist()
    ([5, 6], [6, 7], [2.0, 2.0])
    """
    tokens_T = np.asarray(tokens, dtype=np.int64)
    logprobs_N = np.asarray(logprobs, dtype=np.float64)[1:]
    actions_N = logprobs_N != CONTEXT_LOGPROB
    return Example(
        tokens_N=tokens_T[:-1],
        targets_N=tokens_T[1:],
        logprobs_N=np.where(actions_N, logprobs_N, 0.0).astype(np.float32),
        advantages_N=np.where(actions_N, advantage, 0.0).astype(np.float32),
        actions_N=actions_N,
        versions=versions,
    )


def _sequences(
    batch: Batch, advantages: Sequence[FloatArray]
) -> Iterator[tuple[Sequence[int], Sequence[float], float, tuple[int, int] | None]]:
    for index, (group, advantages_G) in enumerate(zip(batch.groups, advantages, strict=True)):
        _check(group, index)
        for i, tokens in enumerate(group.tokens):
            muted = bool(group.overrides) and bool(group.overrides[i].get("set_advantage_to_zero"))
            versions = group.versions[i] if group.versions else None
            yield tokens, group.logprobs[i], 0.0 if muted else float(advantages_G[i]), versions


def _check(group: Group, index: int) -> None:
    """An environment of anybody's may have made the group; the trainer says what it lacks."""
    if len(group.logprobs) != len(group.tokens):
        raise InvalidData(
            f"Group {index} of the batch has {len(group.tokens)} sequences and log-probabilities for "
            f"{len(group.logprobs)}.",
            "Importance sampling needs the sampler's log-probability of every token.",
            "Let the environment send inference_logprobs (with atroposlib: server_type sglang and a managed server).",
        )
    for i, (tokens, logprobs) in enumerate(zip(group.tokens, group.logprobs, strict=True)):
        if len(tokens) != len(logprobs) or not np.isfinite(logprobs).all():
            raise InvalidData(
                f"Sequence {i} of group {index} has {len(tokens)} tokens and {len(logprobs)} log-probabilities, "
                "or one of them is not finite.",
                "They must be aligned, one finite number per token (1.0 on context).",
                MEND,
            )
        if group.masks:
            _check_mask(tokens, group.masks[i], logprobs, f"Sequence {i} of group {index}")


def _check_mask(tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float], which: str) -> None:
    """The mask is told twice; where the two differ, prompts might be trained on."""
    if len(masks) != len(tokens):
        raise InvalidData(
            f"{which} has {len(tokens)} tokens and {len(masks)} masks.", "They must be aligned, one per token.", MEND
        )
    differ_T = (np.asarray(masks) == MASKED) != (np.asarray(logprobs) == CONTEXT_LOGPROB)
    if differ_T.any():
        at = int(np.flatnonzero(differ_T)[0])
        raise InvalidData(
            f"{which} has mask {masks[at]} and log-probability {logprobs[at]:g} at token {at}.",
            f"A context token has mask {MASKED} and log-probability {CONTEXT_LOGPROB}, a sampled token neither.",
            MEND,
        )
