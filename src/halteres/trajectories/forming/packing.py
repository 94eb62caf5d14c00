"""Batch forming: which queued groups make a batch of exactly so many sequences.

Owns: the order of groups, exactness, each environment's soft minimum.
Never: splits a group, reads tokens, lets one group block the others.

Rule: every environment with a minimum share gives one group, then as many more as its share asks for; the rest is taken
oldest first, or by the environments' weights. A group is taken if the rest can still be completed exactly from what is
queued, so no choice leads into a dead end, and without shares the oldest group that fits any batch is in the next one.
Within an environment and a size the order is that of arrival.

Once one group of a size cannot be taken, none of that size can any more (what is missing only shrinks), so a walk looks
at no more groups than the batch holds, plus one per lane: its cost does not grow with the queue.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from halteres.trajectories.forming.lanes import EnvId, Queue
from halteres.trajectories.records import GroupRecord

MOST_CHOICES = 512
"""Combinations of sizes that are tried, so that every environment with a minimum gives a group. Past them, as many
environments as the first combination of the oldest groups allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """Sequences of every batch that an environment asked for. Soft: one group suffices, others may fill the rest."""

    env_id: int
    need: int


class Order(Protocol):
    """Whose group comes next, of those that could. See `composition`."""

    def rank(self, env_id: EnvId) -> float:
        """The smaller, the sooner; equal ranks are served oldest group first."""
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


def can_add_up(num_by_size: Mapping[int, int], total: int) -> bool:
    """Whether some of these groups have exactly `total` sequences together.

    Where there are too few, that is all there is to say. Otherwise bit i of `reach` says that i sequences can be made;
    n groups of a size are log2(n) shifts.
    """
    if total < 0 or sum(size * num for size, num in num_by_size.items()) < total:
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


def unmet(queue: Queue, batch_size: int, minima: Iterable[Minimum]) -> Minimum | None:
    """The first minimum that holds every batch back: its environment has nothing queued that fits one now.

    One whose groups can never fit, however many come, holds nobody back.
    """
    return next((each for each in minima if _is_missing(queue, batch_size, each.env_id)), None)


def _is_missing(queue: Queue, batch_size: int, env_id: int) -> bool:
    own = queue.sizes_of(env_id)
    if not own:
        return True
    if any(_fits(queue.num_by_size, size, batch_size) for size in own):
        return False
    known = {size for size in queue.num_by_size if size <= batch_size}
    return any(can_ever_add_up(known, batch_size - size) for size in own if size <= batch_size)


def _fits(num_by_size: Mapping[int, int], size: int, batch_size: int) -> bool:
    others = dict(num_by_size)
    others[size] -= 1
    return can_add_up(others, batch_size - size)


def choose(
    queue: Queue, batch_size: int, minima: Iterable[Minimum] = (), order: Order | None = None
) -> list[GroupRecord] | None:
    """The groups of the next batch in queue order, or None if none can be formed."""
    minima = tuple(minima)
    if not can_add_up(queue.num_by_size, batch_size) or unmet(queue, batch_size, minima):
        return None
    walk = _Walk(queue, batch_size, order or OldestFirst())
    for env_id, size in _representatives(queue, batch_size, [each.env_id for each in minima]):
        walk.take_from(env_id, size)
    for minimum in minima:
        walk.take_until(minimum)
    walk.take_rest()
    return sorted(walk.taken, key=lambda group: group.position)


def _representatives(queue: Queue, batch_size: int, env_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """One size of every environment with a minimum, so that the batch can still be completed; the oldest first."""
    sizes = [_sizes_oldest_first(queue, env_id) for env_id in env_ids]
    for choice in itertools.islice(itertools.product(*sizes), MOST_CHOICES):
        others = Counter(queue.num_by_size)
        others.subtract(choice)
        if min(others.values(), default=0) >= 0 and can_add_up(others, batch_size - sum(choice)):
            return zip(env_ids, choice, strict=True)
    return iter(())


def _sizes_oldest_first(queue: Queue, env_id: int) -> list[int]:
    heads = {size: next(iter(lane.values())) for size, lane in queue.sizes_of(env_id).items()}
    return sorted(heads, key=lambda size: heads[size].position)


class _Walk:
    """One walk over the queue; `open` holds, per size, how many groups may still be taken."""

    def __init__(self, queue: Queue, batch_size: int, order: Order) -> None:
        self.missing, self.order = batch_size, order
        self.open = dict(queue.num_by_size)
        self.taken: list[GroupRecord] = []
        self._rest = {(env_id, size): iter(lane.values()) for env_id, size, lane in queue.lanes()}
        self._heads = {lane: next(groups) for lane, groups in self._rest.items()}

    def take_from(self, env_id: EnvId, size: int) -> bool:
        """Take the oldest group of a lane if the rest can still be completed; otherwise close its size."""
        if self.open.get(size, 0) == 0:
            return False
        self.open[size] -= 1
        if not can_add_up(self.open, self.missing - size):
            del self.open[size]
            return False
        self.missing -= size
        self.taken.append(self._heads[env_id, size])
        self.order.took(env_id, size)
        self._advance(env_id, size)
        return True

    def take_until(self, minimum: Minimum) -> None:
        """The environment's oldest groups until its need is filled."""
        need = minimum.need - sum(group.size for group in self.taken if group.env_id == minimum.env_id)
        while need > 0 and self.missing:
            own = [lane for lane in self._lanes() if lane[0] == minimum.env_id]
            if not own:
                return
            oldest = min(own, key=self._position)
            need -= oldest[1] if self.take_from(*oldest) else 0

    def take_rest(self) -> None:
        """In order, until the batch is full."""
        while self.missing and (lanes := self._lanes()):
            self.take_from(*min(lanes, key=lambda lane: (self.order.rank(lane[0]), self._position(lane))))

    def _lanes(self) -> list[tuple[EnvId, int]]:
        return [lane for lane in self._heads if self.open.get(lane[1], 0)]

    def _position(self, lane: tuple[EnvId, int]) -> int:
        return self._heads[lane].position

    def _advance(self, env_id: EnvId, size: int) -> None:
        following = next(self._rest[env_id, size], None)
        if following is None:
            del self._heads[env_id, size]
        else:
            self._heads[env_id, size] = following
