"""Groups smaller than their environment's: some of them make a whole one, the others wait and cost
nothing.
"""

from __future__ import annotations

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from halteres.trajectories.environments import Buffer
from halteres.trajectories.records import (
    GroupRecord,
)

from .queues import record


def buffer(*sizes: int) -> Buffer:
    waiting = Buffer()
    for position, size in enumerate(sizes):
        waiting.append(record(position, size))
    return waiting


def ids(groups: list[GroupRecord]) -> list[int]:
    return [group.id for group in groups]


def test_a_group_is_completed_from_the_oldest_parts() -> None:
    assert ids(buffer(5, 2, 2).completed_by(record(3, 3), 8)) == [0, 3]
    assert ids(buffer(3, 2, 6).completed_by(record(3, 3), 8)) == [0, 1, 3]
    # whatever is older, should it wait already
    assert ids(buffer(3, 5).completed_by(record(2, 5), 8)) == [0, 1]
    assert ids(buffer(5, 5).completed_by(record(2, 4), 8)) == []
    assert ids(Buffer().completed_by(record(0, 4), 4)) == [0]


def test_a_buffer_keeps_order_and_count() -> None:
    waiting = buffer(5, 3, 5)
    assert waiting.num_sequences == 13
    assert ids(list(waiting.groups.values())) == [0, 1, 2]
    for group in list(waiting.groups.values()):
        waiting.remove(group)
    assert not waiting.groups and waiting.num_sequences == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 7), max_size=12))
def test_parts_that_make_a_whole_group_never_wait(sizes: list[int]) -> None:
    waiting = Buffer()
    for position, size in enumerate(sizes):
        before = list(waiting.groups.values())
        group = record(position, size)
        parts = waiting.completed_by(group, 8)
        assert list(waiting.groups.values()) == before
        exact = [
            ids([*some, group])
            for num in range(len(before) + 1)
            for some in itertools.combinations(before, num)
            if sum(part.size for part in some) + size == 8
        ]
        assert ids(parts) == (min(exact) if exact else [])
        waiting.append(group)
        for part in parts:
            waiting.remove(part)


def test_a_post_finds_its_parts_among_what_is_stuck() -> None:
    """The original's search took 1.4 ms with a thousand stuck groups."""
    waiting = buffer(*[7, 5] * 500)
    began = time.process_time()
    for _ in range(1000):
        assert ids(waiting.completed_by(record(1000, 4), 16)) == [0, 1, 1000]
        assert waiting.num_sequences == 6000
    assert time.process_time() - began < 1
