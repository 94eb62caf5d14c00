"""A batch as turns of episodes, with their rewards and returns: what advantages are made of.

K turns of E episodes of G groups, in the batch's order and, within an episode, in order of time. S
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from halteres.errors import InvalidData
from halteres.types import CONTEXT_LOGPROB, MASKED, Batch, Group, Span

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

UNKNOWN_ENVIRONMENT = -1

FIX_MASKS = (
    f"Let the environment send {MASKED} on context and token ids elsewhere, then resume "
    "from the last checkpoint."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of a batch, column by column."""

    rewards_K: FloatArray  # in the environment's own units
    episode_K: IntArray  # which episode a turn belongs to: 0 to E - 1, rising
    spans_K: tuple[Span, ...]  # `sequence` counts through the whole batch: 0 to S - 1
    scores_E: FloatArray  # the environment's judgement of the whole episode
    group_E: IntArray  # which group an episode belongs to: 0 to G - 1, rising
    environment_E: IntArray  # as the trajectory server numbers them, or UNKNOWN_ENVIRONMENT
    masked_E: BoolArray  # of no use: neither trained on nor part of any baseline

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.scores_E)

    @property
    def masked_K(self) -> BoolArray:
        """The turns of masked episodes."""
        return self.masked_E[self.episode_K]


def turns_of(batch: Batch) -> Turns:
    """The turns of a batch.

    A group without spans has one turn per sequence, which earns the score of the sequence's episode
    where it is the episode's last, and 0 before.

    Raises:
        InvalidData: a score or reward is NaN or infinite, or masks are not those of the tokens; the
            message names group and sequence.
    """
    rewards: list[float] = []
    spans: list[Span] = []
    episode: list[int] = []
    scores: list[float] = []
    groups: list[int] = []
    environments: list[int] = []
    masked: list[bool] = []
    sequences_before = 0
    for number, group in enumerate(batch.groups):
        check_masks(group, number)
        scored = [
            (f"Sequence {sequence}", "score", score) for sequence, score in enumerate(group.scores)
        ]
        paid = [
            (f"A turn of sequence {span.sequence}", "reward", span.reward) for span in group.spans
        ]
        for what, noun, value in scored + paid:
            if not np.isfinite(value):
                raise InvalidData(
                    f"{what} of group {number} has the {noun} {value}.",
                    "An advantage made of it would spoil the weights.",
                    "Mend the environment's score, then resume from the last checkpoint.",
                )
        episodes_S = group.episodes or tuple(range(len(group.tokens)))
        first_S = [episodes_S.index(one) for one in range(group.num_rollouts)]
        for span in sorted(
            group.spans or _one_turn_each(group), key=lambda span: episodes_S[span.sequence]
        ):
            rewards.append(span.reward)
            episode.append(len(scores) + episodes_S[span.sequence])
            spans.append(replace(span, sequence=sequences_before + span.sequence))
        scores += (group.scores[first] for first in first_S)
        overrides = group.overrides or ({},) * len(group.tokens)
        masked += (bool(overrides[first].get("set_advantage_to_zero")) for first in first_S)
        groups += [number] * group.num_rollouts
        environments += [
            UNKNOWN_ENVIRONMENT if group.env_id is None else group.env_id
        ] * group.num_rollouts
        sequences_before += len(group.tokens)
    return Turns(
        rewards_K=np.array(rewards, dtype=np.float64),
        episode_K=np.array(episode, dtype=np.int64),
        spans_K=tuple(spans),
        scores_E=np.array(scores, dtype=np.float64),
        group_E=np.array(groups, dtype=np.int64),
        environment_E=np.array(environments, dtype=np.int64),
        masked_E=np.array(masked, dtype=np.bool_),
    )


def returns(turns: Turns, discount: float) -> FloatArray:
    """Discounted sum of rewards from each turn to the end of its episode, shape (K,).

    >>> turns = turns_of(Batch(groups=()))
    >>> returns(turns, 0.9)
    array([], dtype=float64)
    """
    returns_K = turns.rewards_K.copy()
    for k in range(len(returns_K) - 2, -1, -1):
        if turns.episode_K[k] == turns.episode_K[k + 1]:
            returns_K[k] += discount * returns_K[k + 1]
    return returns_K


def with_scores_at_end(turns: Turns) -> Turns:
    """The same turns, whose rewards add up to their episode's score: the last one earns what is
    missing.

    A score may be more than the sum of rewards (`score_episode`), or all that an environment gives.
    """
    rest_E = turns.scores_E - np.bincount(turns.episode_K, turns.rewards_K, turns.num_episodes)
    last_K = np.diff(turns.episode_K, append=turns.num_episodes) != 0
    return replace(
        turns, rewards_K=turns.rewards_K + np.where(last_K, rest_E[turns.episode_K], 0.0)
    )


def state_differences(turns: Turns) -> Turns:
    """Each turn paid by how much it improved the state, where rewards are the values of the states
    that turns led to.

    The state before an episode's first turn is worth 0.
    """
    before_K = np.concatenate([np.zeros(1), turns.rewards_K[:-1]])[: len(turns.rewards_K)]
    first_K = np.diff(turns.episode_K, prepend=-1) != 0
    return replace(turns, rewards_K=turns.rewards_K - np.where(first_K, 0.0, before_K))


def action_mask(group: Group, sequence: int) -> BoolArray:
    """Which tokens of a sequence the policy sampled, shape (T,)."""
    if group.logprobs:
        return np.asarray(group.logprobs[sequence], dtype=np.float64) != CONTEXT_LOGPROB
    return np.asarray(group.masks[sequence], dtype=np.int64) != MASKED


def check_masks(group: Group, number: int) -> None:
    """Refuse a group without log-probabilities whose masks do not say which tokens were sampled.

    A mask is MASKED or its token's id. In a sequence with both, any other positive number marks a
    sampled token, too; masks of 0 and 1 would make a prompt one that was sampled.

    Args:
        number: of the group in its batch.

    Raises:
        InvalidData: it is such a group.
    """
    if group.logprobs:
        return
    if len(group.masks) != len(group.tokens):
        raise InvalidData(
            f"Group {number} of the batch has {len(group.tokens)} sequences and masks for "
            f"{len(group.masks)}.",
            "Without log-probabilities, its masks say which tokens were sampled.",
            FIX_MASKS,
        )
    for i, (tokens, masks) in enumerate(zip(group.tokens, group.masks, strict=True)):
        which = f"Sequence {i} of group {number}"
        if len(tokens) != len(masks):
            what = f"{which} has {len(tokens)} tokens and {len(masks)} masks."
            raise InvalidData(what, "They must be aligned, one per token.", FIX_MASKS)
        tokens_T, masks_T = np.asarray(tokens, dtype=np.int64), np.asarray(masks, dtype=np.int64)
        masked_T = masks_T == MASKED
        other_T = ~masked_T & (masks_T != tokens_T)
        if masked_T.any():
            other_T &= masks_T <= 0
        if other_T.any():
            at = int(np.flatnonzero(other_T)[0])
            raise InvalidData(
                f"{which} has the mask {masks[at]} at token {at}, whose id is {tokens[at]}.",
                f"A context token has the mask {MASKED}, a sampled token its own id; 0 and 1 "
                "would make every token a "
                "sampled one.",
                FIX_MASKS,
            )


def _one_turn_each(group: Group) -> Iterator[Span]:
    """One turn per sequence, from its first sampled token to its last."""
    for sequence, score in enumerate(group.scores):
        places = np.flatnonzero(action_mask(group, sequence))
        start, stop = (int(places[0]), int(places[-1]) + 1) if places.size else (0, 0)
        is_last = (
            not group.episodes or [*group.episodes, None][sequence + 1] != group.episodes[sequence]
        )
        yield Span(sequence=sequence, start=start, stop=stop, reward=score if is_last else 0.0)
