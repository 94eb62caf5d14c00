"""Which groups make a batch: exact sums, older groups first, nobody blocked (spec §2 and §5.6)."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from halteres.trajectories.forming.lanes import Lane, Queue
from halteres.trajectories.forming.packing import Minimum, choose, unmet
from halteres.trajectories.records import GroupRecord, Place


def record(position: int, size: int, env_id: int | None = None) -> GroupRecord:
    return GroupRecord(
        id=position, env_id=env_id, size=size, num_bytes=1, received_at=0.0, place=Place.QUEUED, position=position
    )


def queue(*sizes: int) -> Queue:
    filled = Queue()
    for position, size in enumerate(sizes):
        filled.add(record(position, size))
    return filled


def chosen(sizes: tuple[int, ...], batch_size: int) -> list[int] | None:
    groups = choose(queue(*sizes), batch_size)
    return None if groups is None else [group.position for group in groups]


@pytest.mark.parametrize(
    ("sizes", "batch_size", "positions"),
    [
        ((4, 4, 8), 12, [0, 2]),  # the original: null for ever
        ((8, 4, 4), 12, [0, 1]),
        ((6, 6, 6, 6), 24, [0, 1, 2, 3]),
        ((6, 8, 8, 8), 24, [1, 2, 3]),  # the 6 waits for its like and blocks nobody
        ((6, 8, 8, 8, 6, 6, 6), 24, [0, 4, 5, 6]),  # the original never serves the 6s
        ((16, 16, 16), 24, None),
        ((16, 16, 8), 24, [0, 2]),
        ((256, 16, 16), 32, [1, 2]),  # one too large blocks nobody
        ((2, 2, 2, 2), 4, [0, 1]),
        ((3,), 3, [0]),
        ((), 4, None),
        ((5, 3, 2), 5, [0]),
        ((3, 5, 2), 5, [0, 2]),
    ],
)
def test_the_oldest_groups_that_add_up_are_chosen(
    sizes: tuple[int, ...], batch_size: int, positions: list[int] | None
) -> None:
    assert chosen(sizes, batch_size) == positions


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_the_first_in_queue_order_of_all_exact_ones(seed: int) -> None:
    draw = random.Random(seed)
    sizes = tuple(draw.choice((1, 2, 3, 4, 6, 8)) for _ in range(draw.randrange(11)))
    batch_size = draw.randrange(1, 20)
    exact = [
        list(positions)
        for length in range(len(sizes) + 1)
        for positions in itertools.combinations(range(len(sizes)), length)
        if sum(sizes[position] for position in positions) == batch_size
    ]
    assert chosen(sizes, batch_size) == (min(exact) if exact else None)


def test_a_minimum_share_is_filled_first_and_is_soft() -> None:
    filled = Queue()
    for position, env_id in enumerate((0, 0, 0, 0, 1)):
        filled.add(record(position, 2, env_id))
    taken = choose(filled, 4, [Minimum(env_id=1, need=4)])
    assert taken is not None
    assert [group.env_id for group in taken] == [0, 1]  # one group of it suffices, others fill the rest


def test_a_minimum_share_with_nothing_queued_holds_every_batch_back() -> None:
    filled = queue(2, 2, 2)
    assert choose(filled, 4, [Minimum(env_id=1, need=2)]) is None


def test_groups_without_an_environment_fill_what_no_share_claims() -> None:
    filled = Queue()
    filled.add(record(0, 2, None))
    filled.add(record(1, 2, 0))
    taken = choose(filled, 4, [Minimum(env_id=0, need=2)])
    assert taken is not None and [group.position for group in taken] == [0, 1]


def test_the_cost_of_a_batch_does_not_grow_with_the_queue() -> None:
    """Counted in looks at groups, not in seconds."""

    looks = 0

    class Looked(Lane):
        def values(self) -> Any:
            nonlocal looks
            for group in super().values():
                looks += 1
                yield group

    class Counting(Queue):
        def lanes(self) -> Iterator[tuple[int | None, int, Lane]]:
            for env_id, size, lane in super().lanes():
                yield env_id, size, Looked(lane)

    filled = Counting()
    for position in range(5000):
        filled.add(record(position, (6, 8, 7)[position % 3]))
    assert choose(filled, 24) is not None
    assert 0 < looks < 20


def test_removing_from_the_front_stays_cheap() -> None:
    """Emptying a plain dict from its front takes quadratic time: 50,000 groups, minutes."""
    filled = queue(*[4] * 50_000)
    started = time.process_time()
    while len(filled):
        groups = choose(filled, 64)
        assert groups
        for group in groups:
            filled.remove(group)
    assert time.process_time() - started < 20


def shared(*groups: tuple[int | None, int]) -> Queue:
    """A queue of groups of these environments and sizes."""
    filled = Queue()
    for position, (env_id, size) in enumerate(groups):
        filled.add(record(position, size, env_id))
    return filled


def positions(groups: list[GroupRecord] | None) -> list[int] | None:
    return None if groups is None else [group.position for group in groups]


@pytest.mark.parametrize(
    ("groups", "batch_size", "needs", "taken"),
    [
        ([(0, 6), (0, 6), (0, 6), (1, 8), (1, 8), (1, 8)], 24, {0: 6}, [0, 1, 2]),  # refused: 18 is no batch
        ([(0, 6)] * 4 + [(1, 8)] * 3, 24, {0: 6, 1: 8}, [0, 1, 2, 3]),  # never together: the older ones first
        ([(1, 8)] * 3 + [(0, 6)] * 4, 24, {0: 6, 1: 8}, [0, 1, 2]),
        ([(0, 6), (0, 2), (1, 8)], 10, {0: 6, 1: 8}, [1, 2]),  # its oldest group would shut the other one out
        ([(0, 16), (0, 4), (1, 4)], 8, {0: 4, 1: 4}, [1, 2]),  # a group larger than the batch
        ([(0, 4), (0, 4), (0, 4), (1, 12), (1, 12)], 24, {0: 12}, [0, 1, 2, 3]),
        ([(2, 4), (2, 4), (0, 4), (1, 4)], 12, {0: 4, 1: 4}, [0, 2, 3]),  # the oldest fills what is left
        ([(None, 4), (2, 4), (0, 4), (1, 4)], 8, {0: 4, 1: 4}, [2, 3]),  # nothing is left
    ],
)
def test_minimum_shares_with_awkward_sizes(
    groups: list[tuple[int | None, int]], batch_size: int, needs: dict[int, int], taken: list[int]
) -> None:
    minima = [Minimum(env_id=env_id, need=need) for env_id, need in needs.items()]
    queue = shared(*groups)
    if sum(size for env_id, size in groups if env_id == 0) == 18:
        assert unmet(queue, batch_size, minima) == minima[0]
        assert choose(queue, batch_size, minima) is None
        return
    assert positions(choose(queue, batch_size, minima)) == taken
