"""Datums: golden cases of the shift, the mask, and of what is left out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from halteres.errors import InvalidData
from halteres.losses import LOSSES
from halteres.training.datums import Examples, spread, to_examples, to_sequences
from halteres.training.turns import Turns, turns_of
from halteres.types import Batch, Group, Span

from .fakes import example

C = 1.0  # the sentinel of a context token


def group(
    *, logprobs: list[list[float]], overrides: list[dict[str, bool]] | None = None, version: int = 3
) -> Group:
    tokens = tuple(tuple(range(10, 10 + len(row))) for row in logprobs)
    pairs = [list(zip(ids, row, strict=True)) for ids, row in zip(tokens, logprobs, strict=True)]
    return Group(
        tokens=tokens,
        masks=tuple(
            tuple(-100 if logprob == C else token for token, logprob in row) for row in pairs
        ),
        scores=tuple(float(i) for i in range(len(logprobs))),
        logprobs=tuple(map(tuple, logprobs)),
        versions=((version, version),) * len(logprobs),
        overrides=tuple(overrides or ()),
    )


def examples_of(
    batch: Batch, advantages: list[float], max_length: int = 100, loss: str = "ppo"
) -> Examples:
    """The examples of a batch whose turns, one per sequence, have these advantages."""
    kind, turns = LOSSES[loss], turns_of(batch)
    sequences = to_sequences(batch, needs_logprobs="logprobs" in kind.inputs)
    advantages_K = np.where(turns.masked_K, 0.0, advantages)
    return to_examples(sequences, spread(turns, advantages_K, sequences), max_length, kind, {})


def test_a_sequence_is_shifted_by_one_and_masked_by_the_sentinel() -> None:
    made = example([5, 6, 7, 8, 9], [C, C, -0.5, -0.25, -2.0], 1.5, (2, 3))
    assert made.tokens_N.tolist() == [5, 6, 7, 8]
    assert made.targets_N.tolist() == [6, 7, 8, 9]
    assert made.logprobs_N.tolist() == [0.0, -0.5, -0.25, -2.0]
    assert made.advantages_N.tolist() == [0.0, 1.5, 1.5, 1.5]
    assert made.actions_N.tolist() == [False, True, True, True]
    assert made.versions == (2, 3)
    assert made.targets_N.dtype == np.int64
    assert made.advantages_N.dtype == made.logprobs_N.dtype == np.float32


def test_only_action_tokens_of_several_turns_are_trained() -> None:
    """Context, action, context (the environment's answer), action."""
    made = example([1, 2, 3, 4, 5, 6, 7], [C, -0.1, -0.2, C, C, -0.3, -0.4], -2.0)
    assert made.advantages_N.tolist() == [-2.0, -2.0, 0.0, 0.0, -2.0, -2.0]
    assert made.logprobs_N.tolist() == pytest.approx([-0.1, -0.2, 0.0, 0.0, -0.3, -0.4])


def test_an_action_of_log_probability_zero_is_not_context() -> None:
    assert example([1, 2, 3], [C, 0.0, -0.0], 1.0).advantages_N.tolist() == [1.0, 1.0]


def test_a_sampled_first_token_has_nothing_before_it_and_is_no_target() -> None:
    assert example([1, 2], [-0.5, -0.25], 1.0).targets_N.tolist() == [2]


def test_set_advantage_to_zero_masks_one_sequence() -> None:
    batch = Batch(
        groups=(
            group(logprobs=[[C, -1.0]] * 3, overrides=[{}, {"set_advantage_to_zero": True}, {}]),
        )
    )
    examples = examples_of(batch, [-1.0, 0.5, 0.5], 100)
    assert [example.advantages_N.tolist() for example in examples.useful] == [[-1.0], [0.5]]
    assert examples.without_signal == 1


def test_sequences_that_are_too_long_are_left_out_and_counted() -> None:
    batch = Batch(groups=(group(logprobs=[[C, -1.0], [C, -1.0, -1.0]]),))
    examples = examples_of(batch, [1.0, -1.0], 2)
    assert len(examples.useful) == 1
    assert (examples.too_long, examples.without_signal) == (1, 0)


def test_sequences_that_cannot_move_a_weight_are_left_out_and_counted() -> None:
    """Equal scores, no action at all, or a single token."""
    batch = Batch(groups=(group(logprobs=[[C, -1.0], [C, C, C], [C], [C, -1.0]]),))
    examples = examples_of(batch, [0.0, 1.0, 1.0, 1.0], 100)
    assert len(examples.useful) == 1
    assert examples.without_signal == 3


def test_a_batch_of_equal_scores_leaves_nothing_to_train_on() -> None:
    batch = Batch(groups=(group(logprobs=[[C, -1.0]] * 2), group(logprobs=[[C, -1.0]] * 2)))
    assert examples_of(batch, [0.0] * 4).useful == ()


def test_versions_travel_with_their_sequence_and_may_be_missing() -> None:
    tagged = group(logprobs=[[C, -1.0]], version=7)
    untagged = Group(
        tokens=((1, 2),), masks=((-100, 2),), scores=(1.0,), logprobs=((C, -1.0),), versions=()
    )
    kept = examples_of(Batch(groups=(tagged, untagged)), [1.0, 1.0]).useful
    assert [example.versions for example in kept] == [(7, 7), None]


def test_a_group_without_log_probabilities_is_refused_with_the_remedy() -> None:
    bare = Group(tokens=((1, 2),), masks=((1, 2),), scores=(1.0,), logprobs=(), versions=())
    with pytest.raises(InvalidData, match="inference_logprobs"):
        to_sequences(Batch(groups=(bare,)), needs_logprobs=True)


@pytest.mark.parametrize("logprobs", [(C,), (C, math.nan), (C, -math.inf)])
def test_log_probabilities_that_are_misaligned_or_not_finite_are_refused(
    logprobs: tuple[float, ...],
) -> None:
    bad = Group(tokens=((1, 2),), masks=((1, 2),), scores=(1.0,), logprobs=(logprobs,), versions=())
    with pytest.raises(InvalidData, match="Sequence 0 of group 0"):
        to_sequences(Batch(groups=(bad,)), needs_logprobs=True)


@pytest.mark.parametrize(
    ("masks", "logprobs", "told"),
    [
        ((-100, -100, 7), (C, 0.0, -0.5), "mask -100 and log-probability 0 at token 1"),
        ((-100, 6, 7), (C, C, -0.5), "mask 6 and log-probability 1 at token 1"),
        ((-100, 7), (C, C, -0.5), "3 tokens and 2 masks"),
    ],
)
def test_a_mask_that_contradicts_the_log_probabilities_is_refused(
    masks: tuple[int, ...], logprobs: tuple[float, ...], told: str
) -> None:
    """An environment that writes 0.0 on its context would have its prompts trained on."""
    bad = Group(
        tokens=((5, 6, 7),), masks=(masks,), scores=(1.0,), logprobs=(logprobs,), versions=()
    )
    with pytest.raises(
        InvalidData, match=f"Sequence 0 of group 0 has {told}.* Mend the environment"
    ):
        to_sequences(Batch(groups=(bad,)), needs_logprobs=True)


def test_a_loss_that_reads_no_log_probabilities_trains_groups_without_them_by_their_masks() -> None:
    bare = Group(
        tokens=((5, 6, 7),), masks=((-100, 6, -100),), scores=(1.0,), logprobs=(), versions=()
    )
    (kept,) = examples_of(Batch(groups=(bare,)), [2.0], loss="cross_entropy").useful
    assert kept.inputs(LOSSES["cross_entropy"])["weights"].tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    "masks",
    [
        *((0, 1, 1), (1, 0, 0), (1, 1, 1), (0, 0, 0), (-100, 0, 1), (-1, 6, 7), (0, 6, 7)),
        *((-100, 6), ()),
    ],
)
def test_masks_that_are_not_minus_100_and_token_ids_are_refused_where_they_alone_say_what_was_sampled(
    masks: tuple[int, ...],
) -> None:
    """Masks of 0 and 1 would have the prompt trained on as if the policy had written it."""
    bare = Group(tokens=((5, 6, 7),), masks=(masks,), scores=(1.0,), logprobs=(), versions=())
    with pytest.raises(InvalidData, match=r"Sequence 0 of group 0 has .*-100"):
        to_sequences(Batch(groups=(bare,)), needs_logprobs=False)
    with pytest.raises(InvalidData, match=r"Sequence 0 of group 0 has .*-100"):
        turns_of(Batch(groups=(bare,)))


def test_a_group_without_log_probabilities_and_masks_is_refused() -> None:
    bare = Group(tokens=((5, 6, 7),), masks=(), scores=(1.0,), logprobs=(), versions=())
    for read in (turns_of, lambda batch: to_sequences(batch, needs_logprobs=False)):
        with pytest.raises(InvalidData, match="1 sequences and masks for 0"):
            read(Batch(groups=(bare,)))


@pytest.mark.parametrize(
    "masks", [(5, 6, 7), (-100, 6, 7), (-100, 1, 1), (-100, -100, -100), (5, -100, 7)]
)
def test_masks_of_minus_100_and_sampled_tokens_say_what_was_sampled(masks: tuple[int, ...]) -> None:
    bare = Group(tokens=((5, 6, 7),), masks=(masks,), scores=(1.0,), logprobs=(), versions=())
    (sequence,) = to_sequences(Batch(groups=(bare,)), needs_logprobs=False)
    assert sequence.actions_N.tolist() == [mask != -100 for mask in masks[1:]]


def test_token_ids_0_and_1_are_no_masks_of_0_and_1() -> None:
    bare = Group(tokens=((0, 1, 1),), masks=((0, 1, 1),), scores=(1.0,), logprobs=(), versions=())
    (sequence,) = to_sequences(Batch(groups=(bare,)), needs_logprobs=False)
    assert sequence.actions_N.all()


def test_each_loss_is_given_what_it_reads() -> None:
    made = example([5, 6, 7], [C, C, -0.5], 1.5)
    found = {name: sorted(made.inputs(kind)) for name, kind in LOSSES.items()}
    assert found["ppo"] == ["advantages", "logprobs"] and found["cross_entropy"] == ["weights"]
    assert made.inputs(LOSSES["gspo"])["sequence_ratio_mask"].tolist() == [0.0, 1.0]


def test_a_sequence_without_advantage_is_kept_only_where_the_loss_pulls_it() -> None:
    silent = example([5, 6], [C, -0.5], 0.0)
    moved = {name: silent.moves(kind, {}) for name, kind in LOSSES.items()}
    assert [name for name, moves in moved.items() if moves] == ["dro"]
    assert silent.moves(LOSSES["stable_reinforce"], {"kl_coeff": 0.1}) and not silent.moves(
        LOSSES["dro"], {"beta": 0}
    )


def two_episodes() -> Batch:
    """One episode of two turns in two sequences (2 and 1 sampled tokens), one of a single turn
    (3).
    """
    group = Group(
        tokens=((1, 5, 5), (1, 1, 6), (1, 7, 7, 7)),
        masks=((-100, 5, 5), (-100, -100, 6), (-100, 7, 7, 7)),
        scores=(1.0, 1.0, 0.0),
        logprobs=((C, -1.0, -1.0), (C, C, -1.0), (C, -1.0, -1.0, -1.0)),
        versions=(),
        episodes=(0, 0, 1),
        spans=tuple(
            Span(sequence=s, start=a, stop=b, reward=0.0)
            for s, a, b in ((0, 1, 3), (1, 2, 3), (2, 1, 4))
        ),
    )
    return Batch(groups=(group,))


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("token", [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]),
        ("turn", [1.0, 1.0, 4.0, 2.0, 2.0, 2.0]),
        ("episode", [1, 1, 2, 3, 3, 3]),
    ],
)
def test_weighting_says_what_counts_the_same(weighting: str, expected: list[float]) -> None:
    """Turns of 2, 1 and 3 tokens are 2 on average; the episodes are 3 tokens each."""
    batch = two_episodes()
    turns: Turns = turns_of(batch)
    sequences = to_sequences(batch, needs_logprobs=True)
    found = spread(turns, np.array([1.0, 2.0, 3.0]), sequences, weighting)  # type: ignore[arg-type]
    flat = [
        value
        for sequence, row in zip(sequences, found, strict=True)
        for value in row[1:][sequence.actions_N]
    ]
    assert flat == expected


@pytest.mark.parametrize("weighting", ["token", "turn", "episode"])
def test_a_weighting_shares_the_average_length_between_the_tokens_of_a_turn_or_an_episode(
    weighting: Any,
) -> None:
    """By hand: advantage times (mean length of the parts) over (length of its part); the sum of
    weights stays.
    """
    random = np.random.default_rng(4)
    # of each episode's turns
    lengths = [random.integers(1, 7, random.integers(1, 5)).tolist() for _ in range(6)]
    tokens = [[1, *[5] * n] for turns in lengths for n in turns]
    episode = [e for e, turns in enumerate(lengths) for _ in turns]
    group = Group(
        tokens=tuple(map(tuple, tokens)),
        masks=tuple((-100, *row[1:]) for row in tokens),
        scores=tuple(float(e) for e in episode),
        logprobs=tuple((C, *[-1.0] * (len(row) - 1)) for row in tokens),
        versions=(),
        episodes=tuple(episode),
    )
    batch = Batch(groups=(group,))
    advantages = random.standard_normal(len(tokens))
    sequences = to_sequences(batch, needs_logprobs=True)
    found = spread(turns_of(batch), advantages, sequences, weighting)
    flat = [n for turns in lengths for n in turns]
    of_part = {
        "token": [1] * len(flat),
        "turn": flat,
        "episode": [sum(lengths[e]) for e in episode],
    }[weighting]
    mean = {
        "token": 1.0,
        "turn": np.mean(flat),
        "episode": np.mean([sum(turns) for turns in lengths]),
    }[weighting]
    for advantage, part, n, row in zip(advantages, of_part, flat, found, strict=True):
        assert row.tolist() == pytest.approx([0.0, *[advantage * mean / part] * n])
    ones = spread(turns_of(batch), np.ones(len(tokens)), sequences, weighting)
    assert sum(row.sum() for row in ones) == pytest.approx(sum(flat))


def test_every_sampled_token_is_trained_once_with_its_own_turns_advantage() -> None:
    batch = two_episodes()
    kept = examples_of(batch, [1.0, 2.0, 3.0]).useful
    assert [one.advantages_N.tolist() for one in kept] == [[1.0, 1.0], [0.0, 2.0], [3.0, 3.0, 3.0]]
