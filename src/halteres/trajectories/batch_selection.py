"""The queue of groups that wait, and batch forming: which of them make a batch of exactly so many
sequences.

Rule: every environment with a minimum share gives one group, then as many more as its share asks
for; the rest is taken oldest first, or by the environments' weights. A group is taken if the rest
can still be completed exactly from what is queued, so no choice leads into a dead end, and the
oldest group that fits beside the shares is in the next batch. Within an environment and a size the
order is that of arrival. No group is split, and none blocks the others.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from halteres.trajectories.records import GroupRecord, Versions

EnvId = int | None
ALL = -1  # environments; their ids are from 0
Fifo = OrderedDict[int, GroupRecord]
"""Groups of one environment and one size by id, oldest first; unlike a dict's, its front stays
cheap when emptied.
"""


class Queue:
    """Queued groups. Adding, removing, putting back and every counter cost O(1); groups are added
    in the order of their positions. Those that were put back are sorted in when somebody next reads
    an order: once, however many they are.
    """

    def __init__(self) -> None:
        self.groups: dict[int, GroupRecord] = {}
        self.num_by_size: Counter[int] = Counter()
        self.num_sequences = 0
        self.groups_of_env: Counter[EnvId] = Counter()
        self.sequences_of_env: Counter[EnvId] = Counter()
        self._fifos: defaultdict[EnvId, dict[int, Fifo]] = defaultdict(dict)
        self._by_versions: defaultdict[Versions, Fifo] = defaultdict(OrderedDict)
        # fifos with groups at their end that were put back
        self._unsorted: set[tuple[EnvId, int]] = set()

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: GroupRecord) -> None:
        """Put a group at the end."""
        self.groups[group.id] = group
        self._fifos[group.env_id].setdefault(group.size, OrderedDict())[group.id] = group
        if group.versions:
            self._by_versions[group.versions][group.id] = group
        self._count(group, 1)

    def remove(self, group: GroupRecord) -> None:
        """Take a group out, wherever it stands."""
        del self.groups[group.id]
        fifos = self._fifos[group.env_id]
        del fifos[group.size][group.id]
        if not fifos[group.size]:
            del fifos[group.size]
        if not fifos:
            del self._fifos[group.env_id]
        if group.versions:
            del self._by_versions[group.versions][group.id]
            if not self._by_versions[group.versions]:
                del self._by_versions[group.versions]
        self._count(group, -1)

    def put_back(self, group: GroupRecord) -> None:
        """Let a group queue again at the position it once had."""
        self.add(group)
        self._unsorted.add((group.env_id, group.size))

    def fifos(self) -> Iterator[tuple[EnvId, int, Fifo]]:
        """Every fifo that holds a group: whose, of which size."""
        self._sort_in()
        for env_id, fifos in self._fifos.items():
            for size, fifo in fifos.items():
                yield env_id, size, fifo

    def sizes_of(self, env_id: EnvId) -> Mapping[int, Fifo]:
        """The fifos of an environment by size."""
        self._sort_in()
        return self._fifos.get(env_id, {})

    def head(self, env_id: EnvId, size: int) -> GroupRecord:
        """The oldest group of a fifo that holds one."""
        self._sort_in()
        return next(iter(self._fifos[env_id][size].values()))

    def outside(self, oldest: int, newest: int) -> list[GroupRecord]:
        """Tagged groups whose versions reach below `oldest` or above `newest`; costs O(distinct
        versions + result).
        """
        spans = [span for span in self._by_versions if span[0] < oldest or span[1] > newest]
        return [group for span in spans for group in self._by_versions[span].values()]

    def largest(self, env_id: EnvId = ALL) -> int:
        """Sequences of the largest group of an environment, or of all; 0 where there is none."""
        return max(self.num_by_size if env_id == ALL else self.sizes_of(env_id), default=0)

    def _sort_in(self) -> None:
        """Groups that were put back move to where they stood."""
        for env_id, size in self._unsorted:
            if fifo := self._fifos.get(env_id, {}).get(size):
                by_position = sorted(fifo.values(), key=lambda group: group.position)
                self._fifos[env_id][size] = OrderedDict((group.id, group) for group in by_position)
        self._unsorted.clear()

    def _count(self, group: GroupRecord, change: int) -> None:
        self.num_sequences += change * group.size
        self.sequences_of_env[group.env_id] += change * group.size
        self.groups_of_env[group.env_id] += change
        self.num_by_size[group.size] += change
        if not self.num_by_size[group.size]:
            del self.num_by_size[group.size]


# the weight of an environment, above 0; groups without one share the weight of None
Weight = Callable[[EnvId], float]


class Shares:
    """What everybody was given, by weighted fair queueing (Demers, Keshav and Shenker, 1989) over
    sequences.

    A group of n sequences moves its environment's tag on by n / weight, and the smallest tag is
    served next. Whoever had nothing queued, or nothing that fitted, goes on from where the last
    batch began: its credit is one batch at most. Exactness goes first: the end of a batch may take
    a group before its turn, and the next one makes up for it. Tags are made of the batches that
    were formed, so that all servers on a queue have the same; no store keeps them, and a restart
    begins from equal ones.
    """

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._tags: dict[EnvId, float] = {}
        self._floor = 0.0  # whoever was idle goes on from here

    def rank(self, env_id: EnvId) -> float:
        """Virtual time at which this environment's next group begins: the lowest goes first."""
        return max(self._tags.get(env_id, 0.0), self._floor)

    def took(self, env_id: EnvId, size: int) -> None:
        """Count so many sequences of an environment: the larger its weight, the less they move it
        back.
        """
        self._tags[env_id] = self.rank(env_id) + size / self._weight(env_id)

    def formed(self, groups: Iterable[tuple[EnvId, int]]) -> None:
        """A batch was formed of groups of these environments and sizes."""
        starts: dict[EnvId, float] = {}
        for env_id, size in groups:
            starts.setdefault(env_id, self.rank(env_id))
            self.took(env_id, size)
        self._floor = max(self._floor, min(starts.values(), default=0.0))

    def copy(self) -> Shares:
        """The same, to try a batch out."""
        other = Shares(self._weight)
        other._tags, other._floor = dict(self._tags), self._floor
        return other


# -- forming a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """Sequences of every batch that an environment asked for. Soft: one group suffices, others may
    fill the rest.
    """

    env_id: int
    need: int


def unmet(queue: Queue, batch_size: int, minima: Iterable[Minimum]) -> Minimum | None:
    """The first minimum that holds every batch back: its environment has nothing queued that fits
    one now.

    One whose groups can never fit, however many come, holds nobody back.
    """
    minima = tuple(minima)
    shares = MinimumShares(queue, batch_size, (minimum.env_id for minimum in minima))
    return next((minimum for minimum in minima if shares.holds_back(minimum.env_id)), None)


def choose(
    queue: Queue, batch_size: int, minima: Iterable[Minimum] = (), by_weight: Shares | None = None
) -> list[GroupRecord] | None:
    """The groups of the next batch in queue order, or None if none can be formed.

    There is one wherever groups add up exactly and no minimum is `unmet`. Every environment with a
    minimum is in it if any batch holds them all. Otherwise whose group has waited longest is, and
    who can be beside it: each has its turn. `by_weight`: what everybody was given, where batches
    follow weights; notes what is taken. None: oldest first.
    """
    if batch_size <= 0 or not can_add_up(queue.num_by_size, batch_size):
        return None
    needs = {minimum.env_id: minimum.need for minimum in minima}
    shares = MinimumShares(queue, batch_size, needs)
    if any(map(shares.holds_back, needs)):
        return None
    walk = _GreedyFill(queue, batch_size, by_weight)
    together = shares.together()
    for env_id, size in together.items():
        walk.take(env_id, size)
    for env_id in together:
        walk.take_until(env_id, needs[env_id])
    walk.take_rest()
    return sorted(walk.taken, key=lambda group: group.position)


class _GreedyFill:
    """Looks at no more groups than the batch holds, plus one per fifo: its cost does not grow with
    the queue.
    """

    def __init__(self, queue: Queue, batch_size: int, by_weight: Shares | None) -> None:
        self.taken: list[GroupRecord] = []
        self._room, self._by_weight = RemainingCapacity(queue.num_by_size, batch_size), by_weight
        self._fifos = {(env_id, size): iter(fifo.values()) for env_id, size, fifo in queue.fifos()}
        # the oldest of each that is not taken
        self._heads = {key: next(fifo) for key, fifo in self._fifos.items()}
        self._given: Counter[EnvId] = Counter()  # sequences

    def take(self, env_id: EnvId, size: int) -> bool:
        """Take the oldest group of a fifo, if there is one left and the rest can still be
        completed.
        """
        fifo = env_id, size
        if fifo not in self._heads or not self._room.take(size):
            return False
        self.taken.append(self._heads.pop(fifo))
        if (following := next(self._fifos[fifo], None)) is not None:
            self._heads[fifo] = following
        if self._by_weight is not None:
            self._by_weight.took(env_id, size)
        self._given[env_id] += size
        return True

    def take_until(self, env_id: int, need: int) -> None:
        """An environment's groups, oldest first, until it gave so many sequences."""
        own = [
            (head.position, size) for (owner, size), head in self._heads.items() if owner == env_id
        ]
        heapq.heapify(own)
        while own and self._given[env_id] < need:
            _, size = heapq.heappop(own)
            if self.take(env_id, size) and (head := self._heads.get((env_id, size))):
                heapq.heappush(own, (head.position, size))

    def take_rest(self) -> None:
        """The smallest rank first, of equal ones the oldest group, until the batch is full."""

        def rank(env_id: EnvId) -> float:
            return 0.0 if self._by_weight is None else self._by_weight.rank(env_id)

        ahead = [
            (rank(env_id), head.position, size, env_id)
            for (env_id, size), head in self._heads.items()
        ]
        heapq.heapify(ahead)
        while ahead and self._room.missing:
            ranked, _, size, env_id = heapq.heappop(ahead)
            if ranked == rank(env_id) and not self.take(env_id, size):
                continue  # none of that size can be taken any more
            if head := self._heads.get((env_id, size)):
                heapq.heappush(ahead, (rank(env_id), head.position, size, env_id))


class MinimumShares:
    """The environments with a minimum share, seen by one batch."""

    def __init__(self, queue: Queue, batch_size: int, env_ids: Iterable[int]) -> None:
        self._queue, self._batch_size = queue, batch_size
        # sizes of groups that fit a batch now; that of the oldest group first
        self.fitting: dict[int, list[int]] = {}
        fits: dict[int, bool] = {}  # per size: whether some batch can be made with such a group now
        num = queue.num_by_size
        for env_id in env_ids:
            heads = {size: queue.head(env_id, size).position for size in queue.sizes_of(env_id)}
            for size in heads.keys() - fits.keys():
                fits[size] = can_add_up({**num, size: num[size] - 1}, batch_size - size)
            self.fitting[env_id] = sorted(
                (size for size in heads if fits[size]), key=heads.__getitem__
            )

    def holds_back(self, env_id: int) -> bool:
        """Whether every batch waits for this environment, which has nothing that fits one now."""
        if self.fitting[env_id]:
            return False
        own = self._queue.sizes_of(env_id)
        known = {size for size in self._queue.num_by_size if size <= self._batch_size}
        return not own or any(
            can_ever_add_up(known, self._batch_size - size) for size in own if size in known
        )

    def together(self) -> dict[int, int]:
        """The size of each environment's first group in one exact batch, who has waited longest
        first.

        All are in it if that can be. Otherwise the group that has waited longest is, and whoever
        can be beside those before: each environment has its turn.
        """

        def age(env_id: int) -> int:
            return self._queue.head(env_id, self.fitting[env_id][0]).position

        by_age = sorted((env_id for env_id, sizes in self.fitting.items() if sizes), key=age)
        oldest = {env_id: self.fitting[env_id][0] for env_id in by_age}
        left = Counter(self._queue.num_by_size)
        left.subtract(oldest.values())
        if can_add_up(left, self._batch_size - sum(oldest.values())):
            return oldest
        all_can = self._can_all_give(self._queue.num_by_size, by_age, self._batch_size)
        return self._one_of_each(by_age, by_age if all_can else [])

    def _one_of_each(self, by_age: Sequence[int], owing: Sequence[int]) -> dict[int, int]:
        """Each one's oldest group with which the batch is exact, and with which all that owe one
        can give theirs.
        """
        left, missing = Counter(self._queue.num_by_size), self._batch_size
        given: dict[int, int] = {}
        for at, env_id in enumerate(by_age, 1):
            for size in self.fitting[env_id]:
                left[size] -= 1
                if self._can_all_give(left, owing[at:], missing - size):
                    given[env_id] = size
                    missing -= size
                    break
                left[size] += 1
        return given

    def _can_all_give(self, left: Mapping[int, int], env_ids: Sequence[int], missing: int) -> bool:
        """Whether `missing` sequences can be made of what is left, with a group of each of these,
        untouched so far.
        """
        if sum(min(self.fitting[env_id]) for env_id in env_ids) > missing:
            return False
        if not env_ids:
            return can_add_up(left, missing)
        own = [
            {size: len(fifo) for size, fifo in self._queue.sizes_of(env_id).items()}
            for env_id in env_ids
        ]
        others = Counter(left)
        for each in own:
            others.subtract(each)
        return can_add_up_with_each(others, own, missing)


# -- exact sums
#
# A set of totals is an integer: bit i says that i sequences can be made. Adding groups of a size
# shifts it; n groups cost log2(n) shifts, an answer O(distinct sizes * total) bits, however many
# groups there are.


def can_add_up(num_by_size: Mapping[int, int], total: int) -> bool:
    """Whether some of these groups have exactly `total` sequences together."""
    useful = {size: num for size, num in num_by_size.items() if num > 0 and 0 < size <= total}
    if total <= 0 or sum(size * num for size, num in useful.items()) < total:
        return total == 0
    unit = math.gcd(*useful)
    if total % unit:
        return False
    rest = total
    # the simplest choice: it nearly always is exact, without long integers
    for size in sorted(useful, reverse=True):
        rest -= min(useful[size], rest // size) * size
    if rest == 0:
        return True
    total //= unit
    reach, mask = 1, (1 << total + 1) - 1
    for size, num in useful.items():
        reach = _with(reach, size // unit, num, mask)
    return bool(reach >> total & 1)


def can_ever_add_up(sizes: Iterable[int], total: int) -> bool:
    """Whether groups of these sizes, as many as one likes, can make `total` sequences."""
    return can_add_up({size: total // size for size in sizes if 0 < size <= total}, total)


def can_add_up_with_each(
    num_by_size: Mapping[int, int], owners: Sequence[Mapping[int, int]], total: int
) -> bool:
    """Whether some of these groups (per size) have exactly `total` sequences with one of each
    owner's own or more.
    """
    owned = sum(size * num for own in owners for size, num in own.items())
    if total < 0 or sum(size * num for size, num in num_by_size.items()) + owned < total:
        return False
    reach, mask = 1, (1 << total + 1) - 1
    for size, num in num_by_size.items():
        reach = _with(reach, size, num, mask)
    for own in owners:  # the totals that can be made with one group of its own or more
        given = 0
        for size, num in own.items():
            first = reach << size & mask if num > 0 and size < mask.bit_length() else 0
            given = _with(given, size, num, mask) | _with(first, size, num - 1, mask)
        reach = given
    return bool(reach >> total & 1)


class RemainingCapacity:
    """What a batch still lacks, and how many groups per size may still be taken.

    Once a group of a size cannot be taken, none of that size can any more, because what is missing
    only shrinks.
    """

    def __init__(self, num_by_size: Mapping[int, int], total: int) -> None:
        self.missing = total  # sequences
        self.open = dict(num_by_size)

    def take(self, size: int) -> bool:
        """Take a group if the rest can still be completed exactly; otherwise close its size."""
        if self.open.get(size, 0) == 0:
            return False
        self.open[size] -= 1
        if not can_add_up(self.open, self.missing - size):
            del self.open[size]
            return False
        self.missing -= size
        return True


def _with(reach: int, size: int, num: int, mask: int) -> int:
    """The totals that can be made with up to `num` groups of a size more."""
    left, step = min(num, mask.bit_length() // size), 1
    while left > 0:
        part = min(step, left)
        reach |= reach << part * size & mask
        left, step = left - part, step * 2
    return reach
