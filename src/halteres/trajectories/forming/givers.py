"""Environments that owe every batch a group, because they asked for a minimum share.

Owns: which of them can be in one batch together, and with which of their groups.
Never: takes a group, knows how large a share is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from halteres.trajectories.forming.lanes import Queue
from halteres.trajectories.forming.sums import can_add_up, can_add_up_with_each


class Givers:
    """The environments, seen by one batch."""

    def __init__(self, queue: Queue, batch_size: int, env_ids: Iterable[int]) -> None:
        self._queue, self._batch_size = queue, batch_size
        self._fits: dict[int, bool] = {}  # per size: whether some batch can be made with such a group now
        self.fitting = {env_id: self._fitting(env_id) for env_id in env_ids}
        """The sizes of an environment's groups that fit a batch now; the oldest group's first."""

    def together(self) -> dict[int, int]:
        """The size of each environment's first group in one exact batch, who has waited longest first.

        All are in it if that can be. Otherwise the group that has waited longest is, and whoever can be beside those
        before: each environment has its turn.
        """
        by_age = sorted((env_id for env_id, sizes in self.fitting.items() if sizes), key=self._age)
        oldest = {env_id: self.fitting[env_id][0] for env_id in by_age}
        left = Counter(self._queue.num_by_size)
        left.subtract(oldest.values())
        if can_add_up(left, self._batch_size - sum(oldest.values())):
            return oldest
        all_can = self._can_all_give(self._queue.num_by_size, by_age, self._batch_size)
        return self._one_of_each(by_age, by_age if all_can else [])

    def _fitting(self, env_id: int) -> list[int]:
        sizes = [size for size in self._queue.sizes_of(env_id) if self._fits_now(size)]
        return sorted(sizes, key=lambda size: self._queue.head(env_id, size).position)

    def _fits_now(self, size: int) -> bool:
        if size not in self._fits:
            num = self._queue.num_by_size
            self._fits[size] = can_add_up({**num, size: num[size] - 1}, self._batch_size - size)
        return self._fits[size]

    def _age(self, env_id: int) -> int:
        return self._queue.head(env_id, self.fitting[env_id][0]).position

    def _one_of_each(self, by_age: Sequence[int], owing: Sequence[int]) -> dict[int, int]:
        """Each one's oldest group with which the batch is exact, and with which all that owe one can give theirs."""
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
        """Whether `missing` sequences can be made of what is left, with a group of each of these, untouched so far."""
        if sum(min(self.fitting[env_id]) for env_id in env_ids) > missing:
            return False
        if not env_ids:
            return can_add_up(left, missing)
        own = [{size: len(lane) for size, lane in self._queue.sizes_of(env_id).items()} for env_id in env_ids]
        others = Counter(left)
        for each in own:
            others.subtract(each)
        return can_add_up_with_each(others, own, missing)
