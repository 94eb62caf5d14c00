"""The queue of groups that wait for a batch.

Owns: their order per size and per environment, and counters that answer without walking.
Never: chooses (`packing` does), remembers what has left.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator

from halteres.trajectories.records import GroupRecord, Versions

Lane = OrderedDict[int, GroupRecord]
"""Groups by id, oldest first; unlike a dict's, its front stays cheap when it is emptied from there."""


class Queue:
    """Queued groups. Adding, removing and every counter cost O(1); groups are added in the order of their positions."""

    def __init__(self) -> None:
        self.groups: dict[int, GroupRecord] = {}
        self.num_by_size: Counter[int] = Counter()
        self.num_sequences = 0
        self._by_size: defaultdict[int, Lane] = defaultdict(OrderedDict)
        self._by_env: defaultdict[int | None, Lane] = defaultdict(OrderedDict)
        self._by_versions: defaultdict[Versions, Lane] = defaultdict(OrderedDict)
        self._sizes_of_env: defaultdict[int | None, Counter[int]] = defaultdict(Counter)
        self._sequences_of_env: Counter[int | None] = Counter()

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: GroupRecord) -> None:
        """Put a group at the end."""
        self.groups[group.id] = group
        self._by_size[group.size][group.id] = group
        self._by_env[group.env_id][group.id] = group
        if group.versions:
            self._by_versions[group.versions][group.id] = group
        self._count(group, 1)

    def remove(self, group: GroupRecord) -> None:
        """Take a group out, wherever it stands."""
        del self.groups[group.id]
        del self._by_size[group.size][group.id]
        del self._by_env[group.env_id][group.id]
        if group.versions:
            del self._by_versions[group.versions][group.id]
            if not self._by_versions[group.versions]:
                del self._by_versions[group.versions]
        self._count(group, -1)

    def of_size(self, size: int) -> Iterator[GroupRecord]:
        """Groups of a size, oldest first."""
        return iter(self._by_size[size].values())

    def of_env(self, env_id: int | None) -> Iterator[GroupRecord]:
        """Groups of an environment, oldest first."""
        return iter(self._by_env[env_id].values())

    def outside(self, oldest: int, newest: int) -> list[GroupRecord]:
        """Tagged groups whose versions reach below `oldest` or above `newest`; costs O(distinct versions + result)."""
        spans = [span for span in self._by_versions if span[0] < oldest or span[1] > newest]
        return [group for span in spans for group in self._by_versions[span].values()]

    def sequences_of(self, env_id: int | None) -> int:
        """Sequences queued by an environment."""
        return self._sequences_of_env[env_id]

    def sequences_by_env(self) -> dict[int | None, int]:
        """Sequences queued, per environment that has any."""
        return {env_id: num for env_id, num in self._sequences_of_env.items() if num}

    def num_groups_of(self, env_id: int | None) -> int:
        """Groups queued by an environment."""
        return len(self._by_env[env_id])

    def largest(self) -> int:
        """Sequences of the largest group; 0 when empty."""
        return max(self.num_by_size, default=0)

    def largest_of(self, env_id: int) -> int:
        """Sequences of the environment's largest group; 0 if it has none."""
        return max(self._sizes_of_env[env_id], default=0)

    def _count(self, group: GroupRecord, change: int) -> None:
        self.num_sequences += change * group.size
        self._sequences_of_env[group.env_id] += change * group.size
        for counter in (self.num_by_size, self._sizes_of_env[group.env_id]):
            counter[group.size] += change
            if not counter[group.size]:
                del counter[group.size]
