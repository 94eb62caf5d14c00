"""The three batching functions of `atroposlib.api.utils`, over plain dicts, for code that calls
them itself.

A group is a mapping with "tokens", one entry for each sequence, and "env_id" where it matters.
Where all groups have the same size, what the original finds is found here, in the same order. Any
other queue that holds a batch of exactly the size asked for gives one: a group is taken if the rest
can still be completed, so sizes need not divide each other, and a group that is larger than the
batch stays where it is. A group without sequences is never taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from halteres.trajectories.batch_selection import RemainingCapacity, can_add_up

Group = TypeVar("Group", bound=Mapping[str, Any])


def find_groups_summing_to_target(
    buffer: Sequence[Mapping[str, Any]], target_size: int
) -> list[int]:
    """Indices, ascending, of groups with exactly `target_size` sequences together, older ones
    first; [] if none.
    """
    batch = _Batch(buffer, target_size)
    batch.fill(range(len(buffer)))
    return batch.taken if batch.is_full else []


def grab_exact_from_heterogeneous_queue(
    queue: list[Group], batch_size: int
) -> tuple[list[Group] | None, list[Group]]:
    """A batch of exactly `batch_size` sequences in queue order, and a queue without it; or None and
    `queue`.
    """
    taken = find_groups_summing_to_target(queue, batch_size)
    return _parted(queue, taken) if taken else (None, queue)


def grab_batch_with_minimum_allocations(
    queue: list[Group], batch_size: int, env_configs: Iterable[Mapping[str, Any]]
) -> tuple[list[Group] | None, list[Group]]:
    """As `grab_exact_from_heterogeneous_queue`, where connected environments may have a part of
    every batch.

    An environment with a part (`registered_id`, `connected`, `min_batch_allocation`: a fraction of
    the batch) that has nothing queued holds the batch back. Parts come first, in the order of
    `env_configs`, as far as the batch can still be completed; then what is oldest; then groups that
    name no environment, which the original never takes. Parts that exceed the batch together shrink
    in proportion, each to its environment's smallest group at least.
    """
    connected = [env for env in env_configs if env.get("connected", False)]
    parts = {
        env["registered_id"]: env["min_batch_allocation"]
        for env in connected
        if env.get("min_batch_allocation") is not None
    }
    if not queue or not parts:
        return grab_exact_from_heterogeneous_queue(queue, batch_size)
    needs = {env_id: need for env_id, part in parts.items() if (need := int(batch_size * part)) > 0}
    batch = _Batch(queue, batch_size)
    own = {
        env_id: [at for at in batch.sizes if queue[at].get("env_id") == env_id] for env_id in needs
    }
    if not all(own.values()):
        return None, queue
    total = sum(needs.values())
    if total > max(batch_size, 0):
        scale = batch_size / total
        least = {env_id: min(batch.sizes[at] for at in indices) for env_id, indices in own.items()}
        needs = {env_id: max(least[env_id], int(need * scale)) for env_id, need in needs.items()}
    for env_id, need in needs.items():
        batch.fill(own[env_id], need)
    batch.fill(sorted(batch.sizes, key=lambda at: queue[at].get("env_id") is None))
    return _parted(queue, batch.taken) if batch.is_full else (None, queue)


def _parted(queue: list[Group], taken: list[int]) -> tuple[list[Group], list[Group]]:
    gone = set(taken)
    return [queue[at] for at in taken], [group for at, group in enumerate(queue) if at not in gone]


class _Batch:
    """A batch on its way to being full."""

    def __init__(self, queue: Sequence[Mapping[str, Any]], batch_size: int) -> None:
        lengths = [len(group.get("tokens", ())) for group in queue]
        # sequences of the groups that hold any
        self.sizes = {at: size for at, size in enumerate(lengths) if size}
        num_by_size = Counter(self.sizes.values())
        self._room = RemainingCapacity(
            num_by_size if can_add_up(num_by_size, batch_size) else {}, batch_size
        )
        self.taken: list[int] = []  # indices in the order in which they were taken

    @property
    def is_full(self) -> bool:
        return self._room.missing == 0

    def fill(self, indices: Iterable[int], need: float = math.inf) -> None:
        """Take of these groups, in their order, until they gave so many sequences or it is full."""
        for at in indices:
            if need <= 0 or self.is_full:
                return
            size = self.sizes.get(at, 0)
            if size and at not in self.taken and self._room.take(size):
                self.taken.append(at)
                need -= size
