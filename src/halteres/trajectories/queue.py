"""The queue of groups that wait for a batch, in fifos per environment and size, and who was given how much of it.

Weighted fair queueing (Demers, Keshav and Shenker, 1989) over sequences: a group of n sequences moves its environment's
tag on by n / weight, and the smallest tag is served next. Whoever had nothing queued, or nothing that fitted, goes on
from where the last batch began: its credit is one batch at most. Exactness goes first: the end of a batch may take a
group before its turn, and the next one makes up for it. Tags are made of the batches that were formed, so that all
servers on a queue have the same; no store keeps them, and a restart begins from equal ones.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from halteres.trajectories.records import GroupRecord, Versions

EnvId = int | None
Fifo = OrderedDict[int, GroupRecord]
"""Groups of one environment and one size by id, oldest first; unlike a dict's, its front stays cheap when emptied."""


class Queue:
    """Queued groups. Adding, removing, putting back and every counter cost O(1); groups are added in the order of their
    positions. Those that were put back are sorted in when somebody next reads an order: once, however many they are."""

    def __init__(self) -> None:
        self.groups: dict[int, GroupRecord] = {}
        self.num_by_size: Counter[int] = Counter()
        self.num_sequences = 0
        self._fifos: defaultdict[EnvId, dict[int, Fifo]] = defaultdict(dict)
        self._by_versions: defaultdict[Versions, Fifo] = defaultdict(OrderedDict)
        self._groups_of_env: Counter[EnvId] = Counter()
        self._sequences_of_env: Counter[EnvId] = Counter()
        self._unsorted: set[tuple[EnvId, int]] = set()  # fifos with groups at their end that were put back

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
        """Tagged groups whose versions reach below `oldest` or above `newest`; costs O(distinct versions + result)."""
        spans = [span for span in self._by_versions if span[0] < oldest or span[1] > newest]
        return [group for span in spans for group in self._by_versions[span].values()]

    def sequences_by_env(self) -> Counter[EnvId]:
        """Sequences queued, per environment."""
        return +self._sequences_of_env

    def num_groups_of(self, env_id: EnvId) -> int:
        """Groups queued by an environment."""
        return self._groups_of_env[env_id]

    def largest(self) -> int:
        """Sequences of the largest group; 0 when empty."""
        return max(self.num_by_size, default=0)

    def largest_of(self, env_id: EnvId) -> int:
        """Sequences of the environment's largest group; 0 if it has none."""
        return max(self.sizes_of(env_id), default=0)

    def _sort_in(self) -> None:
        """Groups that were put back move to where they stood."""
        for env_id, size in self._unsorted:
            if fifo := self._fifos.get(env_id, {}).get(size):
                by_position = sorted(fifo.values(), key=lambda group: group.position)
                self._fifos[env_id][size] = OrderedDict((group.id, group) for group in by_position)
        self._unsorted.clear()

    def _count(self, group: GroupRecord, change: int) -> None:
        self.num_sequences += change * group.size
        self._sequences_of_env[group.env_id] += change * group.size
        self._groups_of_env[group.env_id] += change
        self.num_by_size[group.size] += change
        if not self.num_by_size[group.size]:
            del self.num_by_size[group.size]


Weight = Callable[[EnvId], float]  # the weight of an environment, above 0; groups without one share the weight of None


class Shares:
    """What everybody was given."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._tags: dict[EnvId, float] = {}
        self._floor = 0.0  # whoever was idle goes on from here

    def rank(self, env_id: EnvId) -> float:
        """Virtual time at which this environment's next group begins: the lowest goes first."""
        return max(self._tags.get(env_id, 0.0), self._floor)

    def took(self, env_id: EnvId, size: int) -> None:
        """Count so many sequences of an environment: the larger its weight, the less they move it back."""
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
