"""What adds up to exactly so many sequences, against trying everything."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halteres.trajectories.batch_selection import (
    RemainingCapacity,
    can_add_up,
    can_add_up_with_each,
    can_ever_add_up,
)

sizes_of_groups = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16]), max_size=5)


@pytest.mark.parametrize("seed", range(20))
def test_adding_up_agrees_with_trying_everything(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randrange(1, 12) * draw.choice((1, 1, 4)) for _ in range(8)]
    sums = {sum(part) for length in range(9) for part in itertools.combinations(sizes, length)}
    assert [total for total in range(-2, 80) if can_add_up(Counter(sizes), total)] == sorted(
        total for total in sums if total < 80
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sizes_of_groups, st.lists(sizes_of_groups, max_size=2), st.integers(-1, 40))
def test_adding_up_with_a_group_of_each_agrees_with_trying_everything(
    others: list[int], givers: list[list[int]], total: int
) -> None:
    owners = [(size, None) for size in others] + [
        (size, at) for at, own in enumerate(givers) for size in own
    ]
    choices = itertools.chain.from_iterable(
        itertools.combinations(owners, num) for num in range(len(owners) + 1)
    )
    exists = any(
        sum(size for size, _ in choice) == total
        and {at for _, at in choice if at is not None} == set(range(len(givers)))
        for choice in choices
    )
    assert can_add_up_with_each(Counter(others), [Counter(own) for own in givers], total) == exists


def test_too_few_sequences_are_known_before_anything_is_computed() -> None:
    """A bit per sequence of the batch: this many would not fit into any memory."""
    assert not can_add_up({}, 2**62)
    assert not can_add_up({4: 1000}, 2**62)
    assert not can_add_up_with_each({4: 1000}, [{2: 1}], 2**62)
    assert not can_add_up_with_each({2**62: 1}, [{2**62: 1}], 8)


def test_a_group_without_sequences_adds_nothing() -> None:
    assert can_add_up({0: 3, 4: 2}, 8)
    assert not can_add_up({0: 3}, 8)


def test_sizes_that_can_never_add_up_are_known() -> None:
    assert can_ever_add_up([6, 8], 24)
    assert not can_ever_add_up([16], 24)
    assert not can_ever_add_up([6, 9], 20)
    assert not can_ever_add_up([], 4)


def test_room_closes_a_size_that_cannot_be_completed() -> None:
    room = RemainingCapacity({6: 3, 8: 3}, 24)
    assert not room.take(6)
    assert [room.take(8) for _ in range(4)] == [True, True, True, False]
    assert room.missing == 0


def test_a_very_large_batch_takes_no_arithmetic_on_as_large_numbers_for_each_of_its_groups() -> (
    None
):
    began = time.process_time()
    room = RemainingCapacity({16: 2**16, 48: 10, 2**21: 1}, 2**20)
    while room.missing:
        assert room.take(16)
    # 0.2 on the machine it was written on; a minute the other way
    assert time.process_time() - began < 5
