"""One walk over the queue, along which the groups of a batch are taken.

Owns: in what order groups are looked at; that what was taken can be completed to exactly one batch.
Never: passes over a group that could be taken, changes the queue, knows why somebody comes first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Protocol

from halteres.trajectories.forming.lanes import EnvId, Lane, Queue
from halteres.trajectories.forming.sums import Room
from halteres.trajectories.records import GroupRecord


class Order(Protocol):
    """Whose group comes next, of those that could. See `composition`."""

    def rank(self, env_id: EnvId) -> float:
        """The smaller, the sooner; equal ranks are served oldest group first. It never sinks during a walk."""
        ...

    def took(self, env_id: EnvId, size: int) -> None:
        """A group of that environment was taken."""
        ...


class OldestFirst:
    """First in, first out, whoever sent it."""

    def rank(self, env_id: EnvId) -> float:
        """Everybody's is the same."""
        return 0.0

    def took(self, env_id: EnvId, size: int) -> None:
        """Does not matter."""


class Walk:
    """Looks at no more groups than the batch holds, plus one per lane: its cost does not grow with the queue."""

    def __init__(self, queue: Queue, batch_size: int, order: Order) -> None:
        self.taken: list[GroupRecord] = []
        self._room, self._order = Room(queue.num_by_size, batch_size), order
        self._lines = {(env_id, size): _Line(lane) for env_id, size, lane in queue.lanes()}
        self._given: Counter[EnvId] = Counter()  # sequences

    def take(self, env_id: EnvId, size: int) -> bool:
        """Take the oldest group of a lane, if there is one left and the rest can still be completed."""
        line = self._lines[env_id, size]
        if line.head is None or not self._room.take(size):
            return False
        self.taken.append(line.head)
        self._order.took(env_id, size)
        self._given[env_id] += size
        line.go_on()
        return True

    def take_until(self, env_id: int, need: int) -> None:
        """An environment's groups, oldest first, until it gave so many sequences."""
        own = [(line.position, size) for (owner, size), line in self._lines.items() if owner == env_id and line.head]
        heapq.heapify(own)
        while own and self._given[env_id] < need:
            _, size = heapq.heappop(own)
            if self.take(env_id, size) and (line := self._lines[env_id, size]).head:
                heapq.heappush(own, (line.position, size))

    def take_rest(self) -> None:
        """In order, until the batch is full."""
        rank = self._order.rank
        ahead = [
            (rank(env_id), line.position, size, env_id) for (env_id, size), line in self._lines.items() if line.head
        ]
        heapq.heapify(ahead)
        while ahead and self._room.missing:
            ranked, _, size, env_id = heapq.heappop(ahead)
            if ranked == rank(env_id) and not self.take(env_id, size):
                continue  # none of that size can be taken any more
            if (line := self._lines[env_id, size]).head:
                heapq.heappush(ahead, (rank(env_id), line.position, size, env_id))


class _Line:
    """A lane, as far as it was walked along."""

    __slots__ = ("_rest", "head")

    def __init__(self, lane: Lane) -> None:
        self._rest = iter(lane.values())
        self.head = next(self._rest, None)

    @property
    def position(self) -> int:
        return self.head.position if self.head else 0

    def go_on(self) -> None:
        self.head = next(self._rest, None)
