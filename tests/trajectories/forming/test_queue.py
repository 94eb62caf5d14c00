"""The queue counts what it holds and keeps its order, whatever leaves it and comes back."""

from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from halteres.trajectories.batch_selection import Queue
from halteres.trajectories.records import (
    GroupRecord,
)

from .queues import Queued, filled, queues, record


def of_env(waiting: Queue, env_id: int | None) -> list[GroupRecord]:
    """Groups of an environment, oldest first."""
    fifos = waiting.sizes_of(env_id).values()
    return sorted(
        (group for fifo in fifos for group in fifo.values()), key=lambda group: group.position
    )


def test_a_queue_counts_what_it_holds() -> None:
    waiting, draw = Queue(), random.Random(1)
    for position in range(200):
        waiting.add(record(position, draw.choice((2, 4, 7)), draw.choice((None, 0, 1))))
    for position in draw.sample(range(200), 150):
        waiting.remove(waiting.groups[position])
    held = list(waiting.groups.values())
    assert (len(waiting), waiting.num_sequences) == (50, sum(group.size for group in held))
    assert waiting.num_by_size == {
        size: sum(group.size == size for group in held) for size in (2, 4, 7)
    }
    for env_id in (None, 0, 1):
        own = [group for group in held if group.env_id == env_id]
        assert of_env(waiting, env_id) == own
        assert (waiting.sequences_of_env[env_id], waiting.groups_of_env[env_id]) == (
            sum(group.size for group in own),
            len(own),
        )
    assert waiting.largest() == max(group.size for group in held)
    assert waiting.largest(0) == max(group.size for group in held if group.env_id == 0)


def test_an_emptied_queue_holds_nothing_of_whoever_was_in_it() -> None:
    waiting = Queue()
    for position in range(300):
        waiting.add(record(position, 4, env_id=position, versions=(position, position)))
    for group in list(waiting.groups.values()):
        waiting.remove(group)
    assert (list(waiting.fifos()), +waiting.sequences_of_env, waiting.largest()) == ([], {}, 0)
    assert waiting.outside(-1, -1) == []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(queues, st.data())
def test_groups_that_come_back_stand_where_they_stood(groups: Queued, data: st.DataObject) -> None:
    waiting, untouched = filled(groups), filled(groups)
    out = data.draw(st.lists(st.sampled_from(range(len(groups))), unique=True)) if groups else []
    records = [waiting.groups[position] for position in out]
    for each in records:
        waiting.remove(each)
    for each in records:
        waiting.put_back(each)
    for env_id in (None, 0, 1, 2):
        assert of_env(waiting, env_id) == of_env(untouched, env_id)
        for size in waiting.sizes_of(env_id):
            assert waiting.head(env_id, size) == untouched.head(env_id, size)
    assert waiting.num_sequences == untouched.num_sequences
    assert waiting.outside(-1, -1) == untouched.outside(-1, -1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(queues, st.data())
def test_whoever_comes_goes_and_is_looked_at_meanwhile_the_order_is_that_of_positions(
    groups: Queued, data: st.DataObject
) -> None:
    waiting, away, following = filled(groups), dict[int, GroupRecord](), len(groups)
    for _ in range(data.draw(st.integers(1, 25))):
        choice = data.draw(st.sampled_from(["add", "remove", "put back", "look"]))
        if choice == "add":
            waiting.add(
                record(
                    following,
                    data.draw(st.sampled_from([1, 2])),
                    data.draw(st.sampled_from([None, 0])),
                )
            )
            following += 1
        elif choice == "remove" and waiting.groups:
            position = data.draw(st.sampled_from(sorted(waiting.groups)))
            away[position] = waiting.groups[position]
            waiting.remove(away[position])
        elif choice == "put back" and away:
            waiting.put_back(away.pop(data.draw(st.sampled_from(sorted(away)))))
        elif choice == "look":
            check_order(waiting)
    check_order(waiting)


def check_order(waiting: Queue) -> None:
    found = {(env_id, size): list(fifo) for env_id, size, fifo in waiting.fifos()}
    expected: dict[tuple[int | None, int], list[int]] = {}
    for position in sorted(waiting.groups):
        each = waiting.groups[position]
        expected.setdefault((each.env_id, each.size), []).append(position)
    assert found == expected


def test_a_large_batch_that_is_dissolved_over_a_long_queue_costs_one_walk() -> None:
    """The youngest groups come back, one by one: each stands behind all the others, then before
    those that followed.
    """
    waiting = filled([(0, 1)] * 40_000)
    batch = [waiting.groups[position] for position in range(37_000, 39_000)]
    for group in batch:
        waiting.remove(group)
    began = time.process_time()
    for group in batch:
        waiting.put_back(group)
    assert next(iter(of_env(waiting, 0))).position == 0
    # 0.03 on the machine it was written on; 9 in a walk for each
    assert time.process_time() - began < 0.5
    assert [group.position for group in of_env(waiting, 0)] == list(range(40_000))


def test_a_batch_that_comes_back_costs_no_walk_through_the_queue() -> None:
    waiting = filled([(0, 4)] * 30_000)
    batch = list(waiting.groups.values())[:500]
    for group in batch:
        waiting.remove(group)
    began = time.process_time()
    for group in batch:
        waiting.put_back(group)
    # 0.02 on the machine it was written on; 1.5 in a walk for each
    assert time.process_time() - began < 0.5
    assert next(iter(of_env(waiting, 0))) is batch[0]
