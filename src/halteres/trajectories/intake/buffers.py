"""Groups smaller than their environment's, which wait until some of them make a whole one.

Owns: one environment's buffer, and which of it makes exactly one group.
Never: splits a group; makes a poster wait for all that is stuck in a buffer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain

from halteres.trajectories.forming.sums import Room, can_add_up
from halteres.trajectories.records import GroupRecord


class Buffer:
    """Groups in order of arrival. Everything but walking through it costs O(distinct sizes), however many are stuck."""

    def __init__(self) -> None:
        self.num_sequences = 0
        self._by_size: dict[int, OrderedDict[int, GroupRecord]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_size)

    def __iter__(self) -> Iterator[GroupRecord]:
        groups = chain.from_iterable(lane.values() for lane in self._by_size.values())
        return iter(sorted(groups, key=lambda group: group.id))

    def append(self, group: GroupRecord) -> None:
        """Let a group wait; they come in the order of their ids."""
        self._by_size.setdefault(group.size, OrderedDict())[group.id] = group
        self.num_sequences += group.size

    def remove(self, group: GroupRecord) -> None:
        """A group waits no longer."""
        lane = self._by_size[group.size]
        del lane[group.id]
        if not lane:
            del self._by_size[group.size]
        self.num_sequences -= group.size

    def completed_by(self, group: GroupRecord, group_size: int) -> list[GroupRecord]:
        """Groups of exactly `group_size` sequences, in order of arrival, where this new one makes that possible.

        Older ones are preferred: each is taken if the rest can still be completed. None where it does not add up.
        """
        num_by_size = Counter({size: len(lane) for size, lane in self._by_size.items()})
        num_by_size[group.size] += 1
        if not can_add_up(num_by_size, group_size):
            return []
        lanes = {size: iter(lane.values()) for size, lane in self._by_size.items()}
        lanes[group.size] = chain(lanes.get(group.size, ()), (group,))
        return _oldest_first(lanes, Room(num_by_size, group_size))


def _oldest_first(lanes: Mapping[int, Iterator[GroupRecord]], room: Room) -> list[GroupRecord]:
    heads, taken = {size: next(lane) for size, lane in lanes.items()}, list[GroupRecord]()
    while room.missing:
        oldest = min(heads.values(), key=lambda head: head.id)
        del heads[oldest.size]
        if room.take(oldest.size):
            taken.append(oldest)
            if following := next(lanes[oldest.size], None):
                heads[oldest.size] = following
    return taken
