"""Which groups make a batch: exact sums, older groups first, nobody blocked (spec §2 and §5.6)."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from halteres.trajectories.batch_selection import Fifo, Queue, choose, unmet
from halteres.trajectories.records import (
    GroupRecord,
)

from .queues import Queued, filled, minima, record


def queue(*sizes: int) -> Queue:
    return filled([(None, size) for size in sizes])


def positions(groups: list[GroupRecord] | None) -> list[int] | None:
    return None if groups is None else [group.position for group in groups]


def chosen(sizes: tuple[int, ...], batch_size: int) -> list[int] | None:
    return positions(choose(queue(*sizes), batch_size))


@pytest.mark.parametrize(
    ("sizes", "batch_size", "taken"),
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
    sizes: tuple[int, ...], batch_size: int, taken: list[int] | None
) -> None:
    assert chosen(sizes, batch_size) == taken


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


@pytest.mark.parametrize("batch_size", [0, -4, 2**62])
def test_no_batch_of_an_impossible_size(batch_size: int) -> None:
    assert choose(queue(4, 4), batch_size) is None


def test_a_minimum_share_is_filled_first_and_is_soft() -> None:
    taken = choose(filled([(0, 2), (0, 2), (0, 2), (0, 2), (1, 2)]), 4, minima({1: 4}))
    assert positions(taken) == [0, 4]  # one group of it suffices, others fill the rest


def test_a_minimum_share_with_nothing_queued_holds_every_batch_back() -> None:
    assert choose(queue(2, 2, 2), 4, minima({1: 2})) is None


def test_groups_without_an_environment_fill_what_no_share_claims() -> None:
    assert positions(choose(filled([(None, 2), (0, 2)]), 4, minima({0: 2}))) == [0, 1]


def test_the_cost_of_a_batch_does_not_grow_with_the_queue() -> None:
    """Counted in looks at groups, not in seconds."""

    looks = 0

    class Looked(Fifo):
        def values(self) -> Any:
            nonlocal looks
            for group in super().values():
                looks += 1
                yield group

    class Counting(Queue):
        def fifos(self) -> Iterator[tuple[int | None, int, Fifo]]:
            for env_id, size, fifo in super().fifos():
                yield env_id, size, Looked(fifo)

    waiting = Counting()
    for position in range(5000):
        waiting.add(record(position, (6, 8, 7)[position % 3]))
    assert choose(waiting, 24) is not None
    assert 0 < looks < 20


def test_emptying_a_queue_stays_cheap() -> None:
    """Emptying a plain dict from its front takes quadratic time: 50,000 groups, minutes."""
    waiting = queue(*[4] * 50_000)
    started = time.process_time()
    while len(waiting):
        for group in choose(waiting, 64) or []:
            waiting.remove(group)
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    ("groups", "batch_size", "needs", "taken"),
    [
        # never in one batch: who waits longest
        ([(0, 6)] * 4 + [(1, 8)] * 3, 24, {0: 6, 1: 8}, [0, 1, 2, 3]),
        ([(1, 8)] * 3 + [(0, 6)] * 4, 24, {0: 6, 1: 8}, [0, 1, 2]),
        ([(0, 16), (1, 16), (2, 16)], 16, {1: 8, 2: 8}, [1]),  # what is nobody's share comes after
        # with its oldest, the other could give nothing
        ([(0, 6), (0, 4), (0, 2), (1, 8)], 10, {0: 1, 1: 8}, [2, 3]),
        # a group larger than the batch blocks nobody
        ([(0, 16), (0, 4), (1, 4)], 8, {0: 4, 1: 4}, [1, 2]),
        ([(0, 4)] * 3 + [(1, 12)] * 2, 24, {0: 12}, [0, 1, 2, 3]),
        # no 12 fits beside 16 of 24
        ([(0, 4)] * 6 + [(1, 12)] * 2, 24, {0: 16}, [0, 1, 2, 3, 4, 5]),
        # the oldest has what shares leave
        ([(2, 4), (2, 4), (0, 4), (1, 4)], 12, {0: 4, 1: 4}, [0, 2, 3]),
        ([(None, 4), (2, 4), (0, 4), (1, 4)], 8, {0: 4, 1: 4}, [2, 3]),  # and they leave nothing
        # no batch ever holds a 3: it holds nobody back
        ([(0, 3), (1, 4), (1, 4)], 8, {0: 4}, [1, 2]),
    ],
)
def test_minimum_shares_with_awkward_sizes(
    groups: Queued, batch_size: int, needs: dict[int, int], taken: list[int]
) -> None:
    assert positions(choose(filled(groups), batch_size, minima(needs))) == taken


def test_a_minimum_share_whose_groups_do_not_fit_yet_holds_every_batch_back_and_is_named() -> None:
    waiting, (share,) = filled([(0, 6)] * 3 + [(1, 8)] * 3), minima({0: 6})
    assert unmet(waiting, 24, [share]) == share
    assert choose(waiting, 24, [share]) is None
    waiting.add(record(6, 6, 0))
    assert unmet(waiting, 24, [share]) is None
    assert positions(choose(waiting, 24, [share])) == [0, 1, 2, 6]


def test_environments_whose_shares_exclude_each_other_take_turns() -> None:
    waiting, served = (
        filled([(env_id, 16) for _ in range(6) for env_id in (0, 1)]),
        list[int | None](),
    )
    for position in range(12, 24):
        (group,) = choose(waiting, 16, minima({0: 8, 1: 8})) or []
        waiting.remove(group)
        served.append(group.env_id)
        waiting.add(record(position, 16, group.env_id))
    assert served == [0, 1] * 6


def test_many_shares_of_many_sizes_are_all_kept() -> None:
    """More combinations of sizes than could be tried: all but the last one of each environment lead
    nowhere.
    """
    groups = [(env_id, size) for env_id in range(12) for size in (17, 13, 11, 7, 2)]
    taken = choose(filled(groups), 24, minima(dict.fromkeys(range(12), 2)))
    assert taken is not None and [group.size for group in taken] == [2] * 12
