"""The batching functions under the original's names: its conventions, without its dead ends."""

from __future__ import annotations

import copy
import itertools
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halteres.trajectories.compat import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)

Group = dict[str, Any]

groups = st.lists(
    st.tuples(st.sampled_from([None, 0, 1, 2]), st.sampled_from([0, 1, 2, 3, 4, 6, 8])), max_size=8
)
parts = st.dictionaries(
    st.sampled_from([0, 1, 2]), st.sampled_from([None, 0.0, 0.2, 0.5, 1.0, 1.5]), max_size=3
)
batch_sizes = st.integers(-1, 20)


def queued(*named: tuple[int | None, int]) -> list[Group]:
    """Groups of these environments and sizes; without an environment the field is absent."""
    owners = [{} if env_id is None else {"env_id": env_id} for env_id, _ in named]
    return [
        {"tokens": [[at]] * size, **owner}
        for at, ((_, size), owner) in enumerate(zip(named, owners, strict=True))
    ]


def of_sizes(*sizes: int) -> list[Group]:
    return queued(*((None, size) for size in sizes))


def configs(asked: dict[int, float | None], connected: bool = True) -> list[Group]:
    return [
        {"registered_id": env, "connected": connected, "min_batch_allocation": part}
        for env, part in asked.items()
    ]


def places(queue: list[Group], batch: list[Group] | None) -> list[int] | None:
    """Where the elements of the batch, the same objects, stood in the queue."""
    at = {id(group): place for place, group in enumerate(queue)}
    return None if batch is None else [at[id(group)] for group in batch]


def can_add_up(sizes: list[int], total: int) -> bool:
    return any(
        sum(some) == total
        for num in range(1, len(sizes) + 1)
        for some in itertools.combinations(sizes, num)
    )


def check_parted(queue: list[Group], batch: list[Group] | None, rest: list[Group]) -> None:
    """Batch and new queue are the queue, the latter in order; without a batch it is the very list
    that came.
    """
    if batch is None:
        assert rest is queue
        return
    assert rest is not queue
    taken = places(queue, batch)
    assert taken is not None and len(set(taken)) == len(taken)
    assert places(queue, rest) == [at for at in range(len(queue)) if at not in taken]


@pytest.mark.parametrize(
    ("sizes", "batch_size", "taken"),
    [
        ((4, 4, 8), 12, [0, 2]),  # the original: None for ever
        ((8, 4, 4), 12, [0, 1]),
        ((6, 8, 8, 8), 24, [1, 2, 3]),  # 6 does not divide 8
        ((6, 8, 6, 6, 6), 24, [0, 2, 3, 4]),
        ((256, 16, 16), 32, [1, 2]),  # one too large blocks nobody
        ((4, 4, 4, 4), 8, [0, 1]),
        ((5, 3, 2), 5, [0]),
        ((3, 5, 2), 5, [0, 2]),
        ((0, 4, 0, 4), 8, [1, 3]),
        ((16, 16), 24, None),
        ((4,), 8, None),
        ((4, 4), 0, None),
        ((4, 4), -4, None),
        ((), 4, None),
    ],
)
def test_the_oldest_groups_that_add_up(
    sizes: tuple[int, ...], batch_size: int, taken: list[int] | None
) -> None:
    queue = of_sizes(*sizes)
    assert find_groups_summing_to_target(queue, batch_size) == (taken or [])
    batch, rest = grab_exact_from_heterogeneous_queue(queue, batch_size)
    assert places(queue, batch) == taken
    check_parted(queue, batch, rest)


A, B, C = 0, 1, 2


@pytest.mark.parametrize(
    ("named", "batch_size", "asked", "taken"),
    [
        # what is B's first, then the oldest
        ([(A, 4), (A, 4), (B, 4), (B, 4)], 8, {B: 0.5}, [2, 0]),
        ([(A, 4), (A, 4), (B, 4)], 8, {A: 0.5, B: 0.5}, [0, 2]),
        ([(A, 4), (A, 4), (B, 4)], 8, {B: 0.5, A: 0.5}, [2, 0]),  # in the order of the environments
        ([(A, 4), (A, 4)], 8, {B: 0.5}, None),  # B has nothing queued
        ([(A, 4), (A, 4)], 8, {B: 0.1}, [0, 1]),  # a part of less than a sequence asks for nothing
        ([(A, 4), (A, 4)], 8, {B: 0.0, C: None}, [0, 1]),
        # 8 + 12 of 8: 4 each, at least a group
        ([(A, 4), (A, 4), (B, 4)], 8, {A: 1.0, B: 1.5}, [0, 2]),
        ([(A, 4), (B, 4), (C, 4)], 8, {A: 0.9, B: 0.9, C: 0.9}, [0, 1]),  # no room for C
        # what A has cannot be completed: others fill the batch
        ([(A, 3), (B, 4), (B, 4)], 8, {A: 0.5}, [1, 2]),
        ([(A, 4), (B, 8)], 12, {A: 0.3}, [0, 1]),  # the original: nothing of A makes a pack of 8
        # the original: one too large, and nothing packs
        ([(A, 16), (B, 4), (B, 4)], 8, {A: 0.5}, [1, 2]),
        # the original never takes a group without an environment
        ([(None, 4), (A, 4)], 8, {A: 0.5}, [1, 0]),
        ([(None, 4), (A, 4), (A, 4)], 8, {A: 0.5}, [1, 2]),  # they come last, as nobody's
        ([(A, 0), (B, 4)], 4, {A: 0.5}, None),  # a group without sequences is as good as none
        ([(A, 4)], 0, {A: 0.5}, []),  # nothing was asked for, and that is found
        ([(A, 4)], -4, {A: 0.5}, None),
        ([], 4, {A: 0.5}, None),
    ],
)
def test_parts_come_first_where_they_can(
    named: list[tuple[int | None, int]],
    batch_size: int,
    asked: dict[int, float | None],
    taken: list[int] | None,
) -> None:
    queue = queued(*named)
    batch, rest = grab_batch_with_minimum_allocations(queue, batch_size, configs(asked))
    assert places(queue, batch) == taken
    check_parted(queue, batch, rest)


@pytest.mark.parametrize("asked", [{}, {A: None}, {A: 0.0}])
def test_without_a_part_the_order_is_that_of_the_queue(asked: dict[int, float | None]) -> None:
    queue = queued((B, 4), (None, 2), (A, 2), (A, 4))
    batch, _ = grab_batch_with_minimum_allocations(queue, 8, configs(asked))
    assert sorted(places(queue, batch) or []) == [0, 1, 2]


def test_who_is_not_connected_has_no_part() -> None:
    queue = queued((A, 4), (A, 4))
    batch, _ = grab_batch_with_minimum_allocations(queue, 8, configs({B: 0.5}, connected=False))
    assert places(queue, batch) == [0, 1]
    batch, _ = grab_batch_with_minimum_allocations(
        queue, 8, [{"registered_id": B, "min_batch_allocation": 0.5}]
    )
    assert places(queue, batch) == [0, 1]


def test_groups_without_an_environment_keep_their_place_where_nobody_has_a_part() -> None:
    queue = queued((None, 4), (A, 4), (None, 4))
    batch, _ = grab_exact_from_heterogeneous_queue(queue, 8)
    assert places(queue, batch) == [0, 1]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(groups, batch_sizes)
def test_a_batch_is_exact_and_found_where_one_exists(
    named: list[tuple[int | None, int]], batch_size: int
) -> None:
    queue = queued(*named)
    before = copy.deepcopy(queue)
    batch, rest = grab_exact_from_heterogeneous_queue(queue, batch_size)
    check_parted(queue, batch, rest)
    sizes = [size for _, size in named if size]
    assert (batch is not None) == (batch_size > 0 and can_add_up(sizes, batch_size))
    if batch is not None:
        assert sum(len(group["tokens"]) for group in batch) == batch_size
        taken = places(queue, batch)
        assert taken == sorted(taken or []) == find_groups_summing_to_target(queue, batch_size)
    assert queue == before


@settings(max_examples=200, deadline=None, derandomize=True)
@given(groups, batch_sizes.filter(bool), parts)
def test_only_an_empty_environment_with_a_part_holds_an_exact_batch_back(
    named: list[tuple[int | None, int]], batch_size: int, asked: dict[int, float | None]
) -> None:
    queue, envs = queued(*named), configs(asked)
    before = copy.deepcopy((queue, envs))
    batch, rest = grab_batch_with_minimum_allocations(queue, batch_size, envs)
    check_parted(queue, batch, rest)
    needy = {env_id for env_id, part in asked.items() if int(batch_size * (part or 0)) > 0}
    held = not needy <= {env_id for env_id, size in named if size}
    exists = batch_size > 0 and can_add_up([size for _, size in named if size], batch_size)
    assert (batch is not None) == (exists and not held)
    if batch is not None:
        assert sum(len(group["tokens"]) for group in batch) == batch_size
    assert (queue, envs) == before


@settings(max_examples=200, deadline=None, derandomize=True)
@given(groups, batch_sizes)
def test_what_first_in_first_out_finds_is_what_is_found(
    named: list[tuple[int | None, int]], target: int
) -> None:
    """Taking whatever still fits, in order, where that ends exactly."""
    buffer = queued(*named)
    taken, total = list[int](), 0
    for at, (_, size) in enumerate(named):
        if size and total + size <= target:
            taken, total = [*taken, at], total + size
    if total == target:
        assert find_groups_summing_to_target(buffer, target) == taken


def test_a_long_queue_of_many_sizes_costs_milliseconds() -> None:
    """The original's table for this queue has ten million entries."""
    draw = random.Random(0)
    queue = of_sizes(*(draw.choice([3, 6, 12, 24, 48]) for _ in range(5000)))
    began = time.process_time()
    assert grab_exact_from_heterogeneous_queue(queue, 2047) == (None, queue)
    batch, _ = grab_exact_from_heterogeneous_queue(queue, 2046)
    assert batch is not None and sum(len(group["tokens"]) for group in batch) == 2046
    assert time.process_time() - began < 1.0
