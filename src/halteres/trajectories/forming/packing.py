"""Batch forming: which queued groups make a batch of exactly so many sequences.

Owns: the order of groups, exactness, each environment's soft minimum.
Never: splits a group, reads tokens, lets one group block the others.

Rule: among all sets of queued groups whose sizes add up exactly, the one that prefers older groups wins: walking from
the oldest, a group is taken if the rest can still be completed from what is queued. Minima come first in that walk.
Once one group of a size cannot be taken, none of that size can any more (what is missing only shrinks), so a walk looks
at no more groups than the batch holds, plus one per size: its cost does not grow with the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from halteres.trajectories.records import GroupRecord


class Supply(Protocol):
    """What is queued, seen by size and by environment, each oldest first."""

    @property
    def num_by_size(self) -> Mapping[int, int]:
        """Groups queued per size."""
        ...

    def of_size(self, size: int) -> Iterator[GroupRecord]:
        """Groups of a size."""
        ...

    def of_env(self, env_id: int | None) -> Iterator[GroupRecord]:
        """Groups of an environment."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """Sequences of every batch that an environment asked for. Soft: one group suffices, others may fill the rest."""

    env_id: int
    need: int


def can_add_up(num_by_size: Mapping[int, int], total: int) -> bool:
    """Whether some of these groups have exactly `total` sequences together.

    Where there are too few, that is all there is to say. Otherwise bit i of `reach` says that i sequences can be made;
    n groups of a size are log2(n) shifts.
    """
    if sum(size * num for size, num in num_by_size.items()) < total:
        return False
    reach, mask = 1, (1 << total + 1) - 1
    for size, num in num_by_size.items():
        left, step = min(num, total // size), 1
        while left > 0:
            part = min(step, left)
            reach |= reach << part * size & mask
            left, step = left - part, step * 2
    return bool(reach >> total & 1)


def can_ever_add_up(sizes: Iterable[int], total: int) -> bool:
    """Whether groups of these sizes, as many as one likes, can make `total` sequences."""
    return can_add_up({size: total // size for size in sizes if 0 < size <= total}, total)


def unmet(supply: Supply, minima: Iterable[Minimum]) -> Minimum | None:
    """The first minimum whose environment has nothing queued; it holds every batch back."""
    return next((minimum for minimum in minima if next(supply.of_env(minimum.env_id), None) is None), None)


def choose(supply: Supply, batch_size: int, minima: Iterable[Minimum] = ()) -> list[GroupRecord] | None:
    """The groups of the next batch in queue order, or None if none can be formed."""
    minima = tuple(minima)
    if unmet(supply, minima) or not can_add_up(supply.num_by_size, batch_size):
        return None
    walk = _Walk(supply, batch_size)
    for minimum in minima:
        walk.take_minimum(minimum)
    walk.take_rest()
    return sorted(walk.taken.values(), key=lambda group: group.position)


class _Walk:
    """One walk over the queue; `open` holds, per size, how many groups may still be taken."""

    def __init__(self, supply: Supply, batch_size: int) -> None:
        self.supply, self.missing = supply, batch_size
        self.open = dict(supply.num_by_size)
        self.taken: dict[int, GroupRecord] = {}

    def take(self, group: GroupRecord) -> bool:
        """Take a group if the rest can still be completed; otherwise close its size."""
        size = group.size
        if self.open.get(size, 0) == 0 or size > self.missing:
            return False
        self.open[size] -= 1
        if not can_add_up(self.open, self.missing - size):
            del self.open[size]
            return False
        self.missing -= size
        self.taken[group.id] = group
        return True

    def take_minimum(self, minimum: Minimum) -> None:
        """The environment's oldest groups until its need is filled."""
        need = minimum.need
        for group in self.supply.of_env(minimum.env_id):
            if need <= 0 or self.missing == 0:
                return
            if self.take(group):
                need -= group.size
            elif not self.open:
                return

    def take_rest(self) -> None:
        """Oldest first, until the batch is full."""
        lanes = {size: self._untaken(size) for size in self.open}
        heads = {size: head for size, lane in lanes.items() if (head := next(lane, None))}
        while self.missing and heads:
            oldest = min(heads.values(), key=lambda group: group.position)
            follower = next(lanes[oldest.size], None) if self.take(oldest) else None
            if follower is None:
                del heads[oldest.size]
            else:
                heads[oldest.size] = follower

    def _untaken(self, size: int) -> Iterator[GroupRecord]:
        return (group for group in self.supply.of_size(size) if group.id not in self.taken)
