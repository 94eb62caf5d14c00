"""Every row once an epoch, in an order that seed and epoch alone decide; texts that begin alike are
computed as one row, and score as if each were alone.
"""

from __future__ import annotations

import random

import pytest
import torch

from halteres.rewards.torch.batches import (
    epoch_batches,
    forward_parts,
    shared_length,
    shared_row,
    sharing_pays,
    single_row,
)
from halteres.rewards.torch.network import PART_TOKENS

from .torch_fixtures import random_network

_DRAWN = random.Random(0)
LENGTHS = [_DRAWN.randint(5, 300) for _ in range(203)]


def padding(batches: list[list[int]]) -> float:
    computed = sum(len(batch) * max(LENGTHS[row] for row in batch) for batch in batches)
    return 1 - sum(LENGTHS) / computed


@pytest.mark.parametrize("by_length", [True, False])
def test_an_epoch_has_every_row_once_and_is_another_each_time(by_length: bool) -> None:
    def epoch(number: int, seed: int = 7) -> list[list[int]]:
        return epoch_batches(LENGTHS, 8, seed=seed, epoch=number, by_length=by_length)

    first = epoch(0)
    assert sorted(row for batch in first for row in batch) == list(range(len(LENGTHS)))
    assert epoch(0) == first
    assert first not in (epoch(1), epoch(0, seed=8))


def test_rows_of_one_length_meet() -> None:
    bucketed = epoch_batches(LENGTHS, 8, seed=0, epoch=0)
    assert (
        padding(bucketed)
        < 0.1
        < 0.3
        < padding(epoch_batches(LENGTHS, 8, seed=0, epoch=0, by_length=False))
    )


def test_a_part_is_begun_where_padding_would_cost_more() -> None:
    sizes = [(1, length) for length in (100, 20, 95, 90, 18)]
    assert forward_parts(sizes, max_padding=40) == [[0, 2, 3], [1, 4]]
    assert forward_parts(sizes) == [[0, 2, 3, 1, 4]]


def test_parts_hold_no_more_tokens_than_allowed_but_for_an_item_that_is_larger_itself() -> None:
    sizes = [(2, 30), (1, 100), (2, 10), (1, 500), (3, 25)]
    parts = forward_parts(sizes, 200)
    assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
    for part in parts:
        tokens = sum(sizes[item][0] for item in part) * max(sizes[item][1] for item in part)
        assert tokens <= 200 or len(part) == 1


def texts(prefix: int, *own: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    beginning = [drawn.randint(1, 96) for _ in range(prefix)]
    return [beginning + [drawn.randint(1, 96) for _ in range(count)] for count in own]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_shared_rows_score_as_separate_rows(family: str) -> None:
    network = random_network(family)
    assert network.shares_prefixes
    groups = [texts(11, 3, 7), texts(5, 1, 2, 9, 4, seed=1), texts(0, 6, 3, seed=2)]
    with torch.inference_mode():
        together = network.scores([shared_row(group) for group in groups])
        apart = network.scores([single_row(text) for group in groups for text in group])
    assert len(set(apart.tolist())) == len(apart)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_rows_of_very_different_lengths_are_scored_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = random_network("llama")
    rows = [
        shared_row(texts(11, 3, 7)),
        single_row(texts(60, 0)[0]),
        single_row(texts(4, 0)[0], [1, 3]),
    ]
    with torch.inference_mode():
        together = network.scores(rows)
        monkeypatch.setitem(PART_TOKENS, "cpu", 10)
        torch.testing.assert_close(network.scores(rows), together, rtol=1e-5, atol=1e-5)


def test_their_gradients_are_those_of_separate_rows() -> None:
    network = random_network("qwen3")
    group = texts(20, 4, 9)
    gradients: list[list[torch.Tensor]] = []
    for rows in ([shared_row(group)], [single_row(text) for text in group]):
        network.model.zero_grad()
        scores = network.scores(rows)
        torch.nn.functional.logsigmoid(scores[0] - scores[1]).backward()
        gradients.append(
            [one.grad.clone() for one in network.trained().values() if one.grad is not None]
        )
    for shared, separate in zip(*gradients, strict=True):
        torch.testing.assert_close(shared, separate, rtol=1e-4, atol=1e-6)


def test_texts_that_grow_out_of_each_other_are_one_row_hardly_longer_than_the_last() -> None:
    """States of a text, in any order: such as end as the whole does, and such as have an end token
    of their own.
    """
    network = random_network("llama")
    whole = texts(24, 0)[0]
    group = [whole[:8], [*whole[:16], 96], whole, [*whole[:8], 95], [*whole[:4], 94, 93], whole]
    row = shared_row(group)
    assert [shared_length(text, whole) for text in group] == [8, 16, 24, 8, 4, 24]
    assert len(row.tokens_L) == 24 + 1 + 1 + 2
    with torch.inference_mode():
        together = network.scores([row])
        torch.testing.assert_close(
            together, network.scores([single_row(text) for text in group]), rtol=1e-5, atol=1e-5
        )
    # no branch: any model can compute it
    assert shared_row([whole[:8], whole]) == single_row(whole, [7, 23])


def test_several_places_of_one_text_are_read_out_of_one_row() -> None:
    network = random_network("qwen2")
    text = texts(15, 0)[0]
    with torch.inference_mode():
        states = network.scores([single_row(text, [4, 9, 14])])
        torch.testing.assert_close(
            states, network.scores([single_row(text[:end]) for end in (5, 10, 15)])
        )


def test_a_model_with_a_sliding_window_is_never_given_shared_rows() -> None:
    """Its window counts tokens of the row, between which another text may lie."""
    assert not random_network("mistral", sliding_window=8).shares_prefixes
    assert random_network("mistral", sliding_window=None).shares_prefixes
    assert not random_network(
        "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1
    ).shares_prefixes


def test_a_short_prefix_of_long_texts_is_not_worth_sharing() -> None:
    assert sharing_pays([120, 120], together=160, width=128)
    assert not sharing_pays([2000, 2000], together=3996, width=128)
