"""Datums: golden cases of the shift, the mask, and of what is left out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halteres.errors import InvalidData
from halteres.training.datums import to_example, to_examples
from halteres.types import Batch, Group

C = 1.0  # the sentinel of a context token


def group(*, logprobs: list[list[float]], overrides: list[dict[str, bool]] | None = None, version: int = 3) -> Group:
    tokens = tuple(tuple(range(10, 10 + len(row))) for row in logprobs)
    pairs = [list(zip(ids, row, strict=True)) for ids, row in zip(tokens, logprobs, strict=True)]
    return Group(
        tokens=tokens,
        masks=tuple(tuple(-100 if logprob == C else token for token, logprob in row) for row in pairs),
        scores=tuple(float(i) for i in range(len(logprobs))),
        logprobs=tuple(map(tuple, logprobs)),
        versions=((version, version),) * len(logprobs),
        overrides=tuple(overrides or ()),
    )


def test_a_sequence_is_shifted_by_one_and_masked_by_the_sentinel() -> None:
    example = to_example([5, 6, 7, 8, 9], [C, C, -0.5, -0.25, -2.0], 1.5, (2, 3))
    assert example.tokens_N.tolist() == [5, 6, 7, 8]
    assert example.targets_N.tolist() == [6, 7, 8, 9]
    assert example.logprobs_N.tolist() == [0.0, -0.5, -0.25, -2.0]
    assert example.advantages_N.tolist() == [0.0, 1.5, 1.5, 1.5]
    assert example.actions_N.tolist() == [False, True, True, True]
    assert example.versions == (2, 3)
    assert example.targets_N.dtype == np.int64
    assert example.advantages_N.dtype == example.logprobs_N.dtype == np.float32


def test_only_action_tokens_of_several_turns_are_trained() -> None:
    """Context, action, context (the environment's answer), action."""
    example = to_example([1, 2, 3, 4, 5, 6, 7], [C, -0.1, -0.2, C, C, -0.3, -0.4], -2.0)
    assert example.advantages_N.tolist() == [-2.0, -2.0, 0.0, 0.0, -2.0, -2.0]
    assert example.logprobs_N.tolist() == pytest.approx([-0.1, -0.2, 0.0, 0.0, -0.3, -0.4])


def test_an_action_of_log_probability_zero_is_not_context() -> None:
    assert to_example([1, 2, 3], [C, 0.0, -0.0], 1.0).advantages_N.tolist() == [1.0, 1.0]


def test_a_sampled_first_token_has_nothing_before_it_and_is_no_target() -> None:
    assert to_example([1, 2], [-0.5, -0.25], 1.0).targets_N.tolist() == [2]


def test_set_advantage_to_zero_mutes_one_sequence_and_leaves_it_in_its_groups_mean() -> None:
    batch = Batch(groups=(group(logprobs=[[C, -1.0]] * 3, overrides=[{}, {"set_advantage_to_zero": True}, {}]),))
    examples = to_examples(batch, [np.array([-1.0, 0.5, 0.5])], max_length=100)
    assert [example.advantages_N.tolist() for example in examples.kept] == [[-1.0], [0.5]]
    assert examples.without_signal == 1


def test_sequences_that_are_too_long_are_left_out_and_counted() -> None:
    batch = Batch(groups=(group(logprobs=[[C, -1.0], [C, -1.0, -1.0]]),))
    examples = to_examples(batch, [np.array([1.0, -1.0])], max_length=2)
    assert len(examples.kept) == 1
    assert (examples.too_long, examples.without_signal) == (1, 0)


def test_sequences_that_cannot_move_a_weight_are_left_out_and_counted() -> None:
    """Equal scores, no action at all, or a single token."""
    batch = Batch(groups=(group(logprobs=[[C, -1.0], [C, C, C], [C], [C, -1.0]]),))
    examples = to_examples(batch, [np.array([0.0, 1.0, 1.0, 1.0])], max_length=100)
    assert len(examples.kept) == 1
    assert examples.without_signal == 3


def test_a_batch_of_equal_scores_leaves_nothing_to_train_on() -> None:
    batch = Batch(groups=(group(logprobs=[[C, -1.0]] * 2), group(logprobs=[[C, -1.0]] * 2)))
    assert to_examples(batch, [np.zeros(2), np.zeros(2)], max_length=100).kept == ()


def test_versions_travel_with_their_sequence_and_may_be_missing() -> None:
    tagged = group(logprobs=[[C, -1.0]], version=7)
    untagged = Group(tokens=((1, 2),), masks=((-100, 2),), scores=(1.0,), logprobs=((C, -1.0),), versions=())
    kept = to_examples(Batch(groups=(tagged, untagged)), [np.ones(1), np.ones(1)], max_length=100).kept
    assert [example.versions for example in kept] == [(7, 7), None]


def test_a_group_without_log_probabilities_is_refused_with_the_remedy() -> None:
    bare = Group(tokens=((1, 2),), masks=((1, 2),), scores=(1.0,), logprobs=(), versions=())
    with pytest.raises(InvalidData, match="inference_logprobs"):
        to_examples(Batch(groups=(bare,)), [np.ones(1)], max_length=100)


@pytest.mark.parametrize("logprobs", [(C,), (C, math.nan), (C, -math.inf)])
def test_log_probabilities_that_are_misaligned_or_not_finite_are_refused(logprobs: tuple[float, ...]) -> None:
    bad = Group(tokens=((1, 2),), masks=((1, 2),), scores=(1.0,), logprobs=(logprobs,), versions=())
    with pytest.raises(InvalidData, match="Sequence 0 of group 0"):
        to_examples(Batch(groups=(bad,)), [np.ones(1)], max_length=100)


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
    bad = Group(tokens=((5, 6, 7),), masks=(masks,), scores=(1.0,), logprobs=(logprobs,), versions=())
    with pytest.raises(InvalidData, match=f"Sequence 0 of group 0 has {told}.* Mend the environment"):
        to_examples(Batch(groups=(bad,)), [np.ones(1)], max_length=100)
