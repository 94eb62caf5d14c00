"""Batches by length: every row once an epoch, in an order that seed and epoch alone decide."""

from __future__ import annotations

import random

import pytest

from halteres.rewards.torch.batches import epoch_batches, forward_parts

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
    assert padding(bucketed) < 0.1 < 0.3 < padding(epoch_batches(LENGTHS, 8, seed=0, epoch=0, by_length=False))


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
