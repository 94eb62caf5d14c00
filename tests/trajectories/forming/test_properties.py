"""Batch forming against trying everything: small queues, every environment, every minimum."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from halteres.trajectories.batch_selection import can_ever_add_up, choose, unmet

from .queues import Queued, filled, minima, queues

Choice = frozenset[int]  # positions

shares = st.dictionaries(st.sampled_from([0, 1, 2]), st.integers(1, 12), max_size=3)
batch_sizes = st.integers(1, 18)


def exact(groups: Queued, batch_size: int) -> list[Choice]:
    """Every choice of positions that makes the batch."""
    return [
        frozenset(positions)
        for length in range(1, len(groups) + 1)
        for positions in itertools.combinations(range(len(groups)), length)
        if sum(groups[position][1] for position in positions) == batch_size
    ]


class Expected:
    """The rule, word for word: of all exact batches, those are kept that have each group that comes
    first.
    """

    def __init__(self, groups: Queued, batch_size: int, needs: dict[int, int]) -> None:
        self.groups, self.choices = groups, exact(groups, batch_size)
        self.taken = list[int]()
        waiting = {
            env_id: min(fitting) for env_id in needs if (fitting := self.of(env_id) & self.some())
        }
        by_age = sorted(waiting, key=waiting.__getitem__)
        together = [
            choice for choice in self.choices if all(choice & self.of(env_id) for env_id in by_age)
        ]
        self.choices = together or self.choices
        given = [env_id for env_id in by_age if self.take_one(self.of(env_id))]
        for env_id in given:
            while self.given(env_id) < needs[env_id] and self.take_one(self.of(env_id)):
                pass
        while self.take_one(range(len(groups))):
            pass

    def of(self, env_id: int) -> Choice:
        return frozenset(at for at, (owner, _) in enumerate(self.groups) if owner == env_id)

    def some(self) -> Choice:
        return frozenset().union(*self.choices)

    def given(self, env_id: int) -> int:
        return sum(
            size
            for at, (owner, size) in enumerate(self.groups)
            if owner == env_id and at in self.taken
        )

    def take_one(self, positions: Iterable[int]) -> bool:
        """Take the oldest of these that is in one of the batches left, and leave the batches
        without it.
        """
        for position in sorted(set(positions) - set(self.taken)):
            if left := [choice for choice in self.choices if position in choice]:
                self.taken.append(position)
                self.choices = left
                return True
        return False


@settings(max_examples=250, deadline=None, derandomize=True)
@given(queues, batch_sizes, shares)
def test_a_batch_is_exact_and_the_one_that_the_rule_prefers(
    groups: Queued, batch_size: int, needs: dict[int, int]
) -> None:
    queue, shared = filled(groups), minima(needs)
    taken = choose(queue, batch_size, shared)
    held = unmet(queue, batch_size, shared)
    if held is not None or not exact(groups, batch_size):
        assert taken is None
        return
    assert taken is not None
    assert sum(group.size for group in taken) == batch_size
    assert [group.position for group in taken] == sorted(Expected(groups, batch_size, needs).taken)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(queues, batch_sizes, shares)
def test_a_lane_is_first_in_first_out_and_the_oldest_group_that_fits_is_in(
    groups: Queued, batch_size: int, needs: dict[int, int]
) -> None:
    taken = choose(filled(groups), batch_size, minima(needs))
    if taken is None:
        return
    positions = [group.position for group in taken]
    for fifo in set(groups):
        own = [at for at, group in enumerate(groups) if group == fifo]
        assert [at for at in own if at in positions] == own[: len(set(own) & set(positions))]
    if not needs:
        assert positions[0] == min(min(choice) for choice in exact(groups, batch_size))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(queues, batch_sizes, shares)
def test_every_environment_with_a_minimum_gives_a_group_where_that_is_possible(
    groups: Queued, batch_size: int, needs: dict[int, int]
) -> None:
    taken = choose(filled(groups), batch_size, minima(needs))
    if taken is None:
        return
    everybody = [
        choice
        for choice in exact(groups, batch_size)
        if set(needs) <= {groups[at][0] for at in choice}
    ]
    if everybody:
        assert set(needs) <= {group.env_id for group in taken}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(queues, batch_sizes, st.sampled_from([0, 1, 2]))
def test_a_minimum_holds_batches_back_only_while_it_may_still_be_met(
    groups: Queued, batch_size: int, env_id: int
) -> None:
    own = {size for owner, size in groups if owner == env_id}
    fits_now = any(groups[at][0] == env_id for choice in exact(groups, batch_size) for at in choice)
    known = {size for _, size in groups}
    fits_ever = any(can_ever_add_up(known, batch_size - size) or size == batch_size for size in own)
    held = unmet(filled(groups), batch_size, minima({env_id: 1})) is not None
    assert held == (not own or (not fits_now and fits_ever))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(queues, batch_sizes)
def test_whatever_can_be_served_is_served_while_nothing_new_comes(
    groups: Queued, batch_size: int
) -> None:
    """No group waits for ever that fits into some batch: batches go on until nothing adds up any
    more.
    """
    queue = filled(groups)
    while taken := choose(queue, batch_size):
        for group in taken:
            queue.remove(group)
    left = [(group.env_id, group.size) for group in queue.groups.values()]
    assert not exact(left, batch_size)
    assert Counter(groups) >= Counter(left)
