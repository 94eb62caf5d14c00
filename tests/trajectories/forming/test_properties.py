"""Batch forming against trying everything: small queues, every environment, every minimum."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from halteres.trajectories.forming.composition import Shares
from halteres.trajectories.forming.lanes import Queue
from halteres.trajectories.forming.packing import Minimum, can_ever_add_up, choose, unmet
from halteres.trajectories.records import GroupRecord

from .test_packing import record

Queued = list[tuple[int | None, int]]  # environment and size, in order

queues = st.lists(st.tuples(st.sampled_from([None, 0, 1, 2]), st.sampled_from([1, 2, 3, 4, 6, 8])), max_size=10)
shares = st.dictionaries(st.sampled_from([0, 1, 2]), st.integers(1, 12), max_size=3)
batch_sizes = st.integers(1, 18)


def filled(groups: Queued) -> Queue:
    queue = Queue()
    for position, (env_id, size) in enumerate(groups):
        queue.add(record(position, size, env_id))
    return queue


def exact(groups: Queued, batch_size: int) -> list[tuple[int, ...]]:
    """Every choice of positions that makes the batch."""
    return [
        positions
        for length in range(1, len(groups) + 1)
        for positions in itertools.combinations(range(len(groups)), length)
        if sum(groups[position][1] for position in positions) == batch_size
    ]


def is_in_order(groups: Queued, taken: list[GroupRecord]) -> bool:
    """Of an environment and a size, nothing older was passed over."""
    positions = {group.position for group in taken}
    passed = {(env_id, size) for at, (env_id, size) in enumerate(groups) if at not in positions}
    return (
        all(not any(other not in positions and groups[other] == groups[at] for other in range(at)) for at in positions)
        or not passed
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(queues, batch_sizes, shares)
def test_a_batch_is_exact_in_order_and_found_where_one_exists(
    groups: Queued, batch_size: int, needs: dict[int, int]
) -> None:
    minima = [Minimum(env_id=env_id, need=need) for env_id, need in needs.items()]
    queue, choices = filled(groups), exact(groups, batch_size)
    taken = choose(queue, batch_size, minima)
    if unmet(queue, batch_size, minima) is not None or not choices:
        assert taken is None
        return
    assert taken is not None
    assert sum(group.size for group in taken) == batch_size
    assert len({group.id for group in taken}) == len(taken)
    assert is_in_order(groups, taken)
    if not minima:
        assert min(group.position for group in taken) == min(min(choice) for choice in choices)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(queues, batch_sizes, shares)
def test_every_environment_with_a_minimum_gives_a_group_where_that_is_possible(
    groups: Queued, batch_size: int, needs: dict[int, int]
) -> None:
    minima = [Minimum(env_id=env_id, need=need) for env_id, need in needs.items()]
    taken = choose(filled(groups), batch_size, minima)
    if taken is None:
        return
    everybody = [choice for choice in exact(groups, batch_size) if set(needs) <= {groups[at][0] for at in choice}]
    if everybody:
        assert set(needs) <= {group.env_id for group in taken}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(queues, batch_sizes, st.sampled_from([0, 1, 2]))
def test_a_minimum_holds_batches_back_only_while_it_may_still_be_met(
    groups: Queued, batch_size: int, env_id: int
) -> None:
    own = {size for owner, size in groups if owner == env_id}
    fits_now = any(groups[at][0] == env_id for choice in exact(groups, batch_size) for at in choice)
    known = {size for _, size in groups}
    fits_ever = any(can_ever_add_up(known, batch_size - size) or size == batch_size for size in own)
    held = unmet(filled(groups), batch_size, [Minimum(env_id=env_id, need=1)]) is not None
    assert held == (not own or (not fits_now and fits_ever))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(queues, st.data())
def test_groups_that_come_back_stand_where_they_stood(groups: Queued, data: st.DataObject) -> None:
    queue = filled(groups)
    out = data.draw(st.lists(st.sampled_from(range(len(groups))), unique=True)) if groups else []
    records = [queue.groups[position] for position in out]
    for each in records:
        queue.remove(each)
    for each in records:
        queue.put_back(each)
    untouched = filled(groups)
    for env_id in (None, 0, 1, 2):
        assert list(queue.of_env(env_id)) == list(untouched.of_env(env_id))
    for size in (1, 2, 3, 4, 6, 8):
        assert list(queue.of_size(size)) == list(untouched.of_size(size))
    assert queue.num_sequences == untouched.num_sequences
    assert queue.outside(-1, -1) == untouched.outside(-1, -1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.sampled_from([None, 0, 1, 2]), st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2),
    st.sampled_from([1, 2, 4]),
    st.integers(2, 6),
)
def test_shares_follow_the_weights_while_everybody_has_groups(
    weights: dict[int | None, float], size: int, per_batch: int
) -> None:
    """What two environments were given, each in its own weight, differs by no more than one group of each."""
    queue, position, order = Queue(), itertools.count(), Shares(weights.__getitem__)
    given_out: Counter[int | None] = Counter()
    for _ in range(40):
        for env_id in weights:
            while queue.num_groups_of(env_id) < per_batch:
                queue.add(record(next(position), size, env_id))
        taken = choose(queue, size * per_batch, order=order.copy())
        assert taken is not None and sum(group.size for group in taken) == size * per_batch
        order.formed((group.env_id, group.size) for group in taken)
        for group in taken:
            queue.remove(group)
            given_out[group.env_id] += group.size
    for one, other in itertools.combinations(weights, 2):
        apart = abs(given_out[one] / weights[one] - given_out[other] / weights[other])
        assert apart <= size / weights[one] + size / weights[other] + 1e-6


def test_whoever_was_idle_gets_no_credit_for_it() -> None:
    order = Shares(lambda env_id: 1.0)
    for _ in range(50):
        order.formed([(0, 4), (0, 4)])
    queue = filled([(0, 4), (1, 4)] * 8)
    taken = choose(queue, 16, order=order.copy())
    assert taken is not None
    assert Counter(group.env_id for group in taken) == {0: 2, 1: 2}
