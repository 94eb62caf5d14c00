"""Batches that follow the environments' weights, exactly as full as any other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halteres.trajectories.batch_selection import Queue, Shares, can_add_up, choose
from halteres.trajectories.environments import LEAST_WEIGHT, MOST_WEIGHT, Environments
from halteres.trajectories.records import (
    EnvRecord,
)
from halteres.trajectories.schema import EnvRegistration

from .queues import Queued, filled, minima, queues, record

Weights = Mapping[int | None, float]
Sizes = Mapping[int | None, int]


def served(
    weights: Weights, sizes: Sizes, batch_size: int, num_batches: int, needs: dict[int, int]
) -> Counter[int | None]:
    """Sequences that each was given while everybody's queue was full."""
    queue, position, order = Queue(), itertools.count(), Shares(weights.__getitem__)
    given_out: Counter[int | None] = Counter()
    for _ in range(num_batches):
        for env_id, size in sizes.items():
            while queue.groups_of_env[env_id] * size < batch_size:
                queue.add(record(next(position), size, env_id))
        taken = choose(queue, batch_size, minima(needs), order.copy())
        assert taken is not None and sum(group.size for group in taken) == batch_size
        order.formed((group.env_id, group.size) for group in taken)
        for group in taken:
            queue.remove(group)
            given_out[group.env_id] += group.size
    return given_out


def check_shares(
    weights: Weights, sizes: Sizes, given_out: Counter[int | None], num_groups: float = 1
) -> None:
    """What two environments were given, each in its own weight, differs by no more than so many
    groups of each.
    """
    for one, other in itertools.combinations(weights, 2):
        apart = abs(given_out[one] / weights[one] - given_out[other] / weights[other])
        assert (
            apart <= num_groups * (sizes[one] / weights[one] + sizes[other] / weights[other]) + 1e-6
        )


weights = st.dictionaries(
    st.sampled_from([None, 0, 1, 2]), st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(weights, st.sampled_from([1, 2, 4]), st.integers(2, 6))
def test_shares_follow_the_weights_while_everybody_has_groups(
    weights: Weights, size: int, per_batch: int
) -> None:
    sizes = dict.fromkeys(weights, size)
    check_shares(weights, sizes, served(weights, sizes, size * per_batch, 40, {}))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(queues, st.integers(1, 18))
def test_the_least_served_environment_comes_first_with_its_oldest_group_that_fits(
    groups: Queued, batch_size: int
) -> None:
    order = Shares(lambda env_id: 1.0 if env_id is None else env_id + 0.5)
    order.formed([(0, 3), (1, 8)])
    taken, trial = choose(filled(groups), batch_size, by_weight=order.copy()), order.copy()
    left, expected = dict(enumerate(groups)), list[int]()
    for _ in taken or ():
        missing = batch_size - sum(groups[at][1] for at in expected)
        fitting = [at for at, (_, size) in left.items() if _completes(left, at, missing - size)]
        expected.append(min(fitting, key=lambda at: (trial.rank(groups[at][0]), at)))
        trial.took(*left.pop(expected[-1]))
    assert [group.position for group in taken or ()] == sorted(expected)


def _completes(left: Mapping[int, tuple[int | None, int]], at: int, missing: int) -> bool:
    return can_add_up(Counter(size for other, (_, size) in left.items() if other != at), missing)


def test_one_to_three() -> None:
    given_out = served({0: 1.0, 1: 3.0}, {0: 16, 1: 16}, 128, 50, {})
    assert given_out == {0: 1600, 1: 4800}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    weights,
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=4, max_size=4),
    st.sampled_from([16, 24, 32]),
)
def test_shares_follow_the_weights_whatever_the_sizes(
    weights: Weights, drawn: list[int], batch_size: int
) -> None:
    """The end of a batch may take a group before its turn, to be exact; the next batch makes up for
    it.
    """
    sizes = dict(zip(weights, drawn, strict=False))
    check_shares(weights, sizes, served(weights, sizes, batch_size, 40, {}), num_groups=3)


def test_a_minimum_goes_before_the_weights() -> None:
    given_out = served({0: 1.0, 1: 9.0}, {0: 2, 1: 2}, 20, 30, {0: 10})
    assert given_out == {0: 300, 1: 300}


def test_whoever_was_idle_has_a_credit_of_one_batch_at_most() -> None:
    order, queue, given_out = (
        Shares(lambda env_id: 1.0),
        filled([(0, 4), (1, 4)] * 200),
        Counter[int | None](),
    )
    for _ in range(50):
        order.formed([(0, 4)] * 4)
    for _ in range(20):
        taken = choose(queue, 16, by_weight=order.copy()) or []
        order.formed((group.env_id, group.size) for group in taken)
        for group in taken:
            queue.remove(group)
            given_out[group.env_id] += group.size
    assert given_out.total() == 320
    assert 0 <= given_out[1] - given_out[0] <= 16


def test_whoever_waits_while_others_are_served_keeps_its_turn() -> None:
    """Eight and eight, or sixteen of one: what is served alone for a batch must not cost the others
    their place.
    """
    given_out = served({0: 2.0, 1: 2.0, 2: 3.0}, {0: 8, 1: 8, 2: 1}, 16, 70, {})
    assert (
        abs(given_out[0] - 320) <= 16
        and abs(given_out[1] - 320) <= 16
        and abs(given_out[2] - 480) <= 16
    )


def test_an_environment_without_groups_holds_nobody_back() -> None:
    weights: Weights = {0: 1.0, 1: 1e6}
    order = Shares(weights.__getitem__)
    taken = choose(filled([(0, 4)] * 4), 16, by_weight=order)
    assert taken is not None and len(taken) == 4


def test_trying_a_batch_out_counts_nothing() -> None:
    order = Shares(lambda env_id: 1.0)
    queue = filled([(0, 4), (1, 4)] * 4)
    first = choose(queue, 8, by_weight=order.copy())
    assert first == choose(queue, 8, by_weight=order.copy())
    assert order.rank(0) == order.rank(1) == 0.0


@pytest.mark.parametrize(
    ("weight", "counts_as"),
    [(2.5, 2.5), (0.0, 1.0), (-1.0, 1.0), (1e-320, LEAST_WEIGHT), (1e12, MOST_WEIGHT)],
)
def test_weights_that_count(weight: float, counts_as: float) -> None:
    """0 and below mean: ignore. What is too small or too large to be counted by is brought into
    bounds.
    """
    envs = Environments()
    registration = EnvRegistration(max_token_length=8, weight=weight, group_size=4)
    envs.save(EnvRecord(id=3, name="e_0", desired_name="e", registration=registration), now=0.0)
    envs.save(
        EnvRecord(id=4, name="adopted_4", desired_name="adopted_4", registration=None), now=0.0
    )
    assert envs.weight(3) == counts_as
    assert envs.weight(4) == envs.weight(None) == envs.weight(99) == 1.0
