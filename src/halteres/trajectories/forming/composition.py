"""Batches that follow the environments' weights: whose group comes next.

Owns: what each environment was given, measured in its own weight.
Never: forms a batch; gives credit for time in which an environment had nothing to give.

Weighted fair queueing (Demers, Keshav and Shenker, 1989) over sequences: a group of n sequences moves its environment's
tag on by n / weight, and the smallest tag is served next. Whoever had nothing queued, or nothing that fitted, goes on
from where the last batch began: its credit is one batch at most. Exactness goes first: the end of a batch may take a
group before its turn, and the next one makes up for it. Tags are made of the batches that were formed, so that all
servers on a queue have the same; no store keeps them, and a restart begins from equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from halteres.trajectories.forming.lanes import EnvId

Weight = Callable[[EnvId], float]
"""The weight of an environment, above 0; groups without one share the weight of None."""


class Shares:
    """What everybody was given."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._tags: dict[EnvId, float] = {}
        self._floor = 0.0  # whoever was idle goes on from here

    def rank(self, env_id: EnvId) -> float:
        """See `walk.Order`."""
        return max(self._tags.get(env_id, 0.0), self._floor)

    def took(self, env_id: EnvId, size: int) -> None:
        """See `walk.Order`."""
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
