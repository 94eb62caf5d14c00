"""The three batching functions of `atroposlib.api.utils`, over plain dicts, for code that calls them itself.

A group is a mapping with "tokens", one entry for each sequence, and "env_id" where it matters. Where all groups have
the same size, what the original finds is found here, in the same order. Any other queue that holds a batch of exactly
the size asked for gives one: a group is taken if the rest can still be completed, so sizes need not divide each other,
and a group that is larger than the batch stays where it is. A group without sequences is never taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from halteres.trajectories.exact_sums import Room, can_add_up

Group = TypeVar("Group", bound=Mapping[str, Any])


def find_groups_summing_to_target(buffer: Sequence[Mapping[str, Any]], target_size: int) -> list[int]:
    """Indices, ascending, of groups with exactly `target_size` sequences together, older ones first; [] if none."""
    groups = _waiting(buffer)
    batch = _Batch(groups, target_size)
    batch.fill(groups)
    return list(batch.taken) if batch.is_full else []


def grab_exact_from_heterogeneous_queue(queue: list[Group], batch_size: int) -> tuple[list[Group] | None, list[Group]]:
    """A batch of exactly `batch_size` sequences in queue order, and a queue without it; or None and `queue`."""
    taken = find_groups_summing_to_target(queue, batch_size)
    return _parted(queue, taken) if taken else (None, queue)


def grab_batch_with_minimum_allocations(
    queue: list[Group], batch_size: int, env_configs: Iterable[Mapping[str, Any]]
) -> tuple[list[Group] | None, list[Group]]:
    """As `grab_exact_from_heterogeneous_queue`, where connected environments may have a part of every batch.

    An environment with a part (`registered_id`, `connected`, `min_batch_allocation`: a fraction of the batch) that has
    nothing queued holds the batch back. Parts come first, in the order of `env_configs`, as far as the batch can still
    be completed; then what is oldest; then groups that name no environment, which the original never takes.
    """
    allocations = _allocations(env_configs)
    if not queue or not allocations:
        return grab_exact_from_heterogeneous_queue(queue, batch_size)
    groups = _waiting(queue)
    needs = _needs(groups, batch_size, allocations)
    if needs is None:
        return None, queue
    batch = _Batch(groups, batch_size)
    for env_id, need in needs.items():
        batch.fill((group for group in groups if group.env_id == env_id), need)
    batch.fill(sorted(groups, key=lambda group: group.env_id is None))
    return _parted(queue, list(batch.taken)) if batch.is_full else (None, queue)


def _allocations(env_configs: Iterable[Mapping[str, Any]]) -> dict[Hashable, float]:
    connected = [env for env in env_configs if env.get("connected", False)]
    parts = [env for env in connected if env.get("min_batch_allocation") is not None]
    return {env["registered_id"]: env["min_batch_allocation"] for env in parts}


def _parted(queue: list[Group], taken: list[int]) -> tuple[list[Group], list[Group]]:
    gone = set(taken)
    return [queue[at] for at in taken], [group for at, group in enumerate(queue) if at not in gone]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A group in the queue."""

    at: int  # index
    size: int  # sequences, at least 1
    env_id: Hashable


def _waiting(queue: Sequence[Mapping[str, Any]]) -> list[_Waiting]:
    sizes = [len(group.get("tokens", ())) for group in queue]
    return [
        _Waiting(at=at, size=size, env_id=group.get("env_id"))
        for at, (group, size) in enumerate(zip(queue, sizes, strict=True))
        if size
    ]


def _needs(
    groups: list[_Waiting], batch_size: int, allocations: Mapping[Hashable, float]
) -> dict[Hashable, int] | None:
    """Sequences of the batch that are an environment's, where it is any; None if one of them has nothing queued.

    Where they exceed the batch together, they shrink in proportion, each to its smallest group at least.
    """
    needs = {env_id: int(batch_size * part) for env_id, part in allocations.items()}
    needs = {env_id: need for env_id, need in needs.items() if need > 0}
    sizes = {env_id: [group.size for group in groups if group.env_id == env_id] for env_id in needs}
    if not all(sizes.values()):
        return None
    total = sum(needs.values())
    if total <= max(batch_size, 0):
        return needs
    scale = batch_size / total
    return {env_id: max(min(sizes[env_id]), int(need * scale)) for env_id, need in needs.items()}


class _Batch:
    """A batch on its way to being full."""

    def __init__(self, groups: list[_Waiting], batch_size: int) -> None:
        sizes = Counter(group.size for group in groups)
        self._room = Room(sizes if can_add_up(sizes, batch_size) else {}, batch_size)
        self.taken: dict[int, None] = {}  # indices in the order in which they were taken

    @property
    def is_full(self) -> bool:
        return self._room.missing == 0

    def fill(self, groups: Iterable[_Waiting], need: float = math.inf) -> None:
        """Take of these groups, in their order, until they gave so many sequences or it is full."""
        for group in groups:
            if need <= 0 or self.is_full:
                return
            if group.at not in self.taken and self._room.take(group.size):
                self.taken[group.at] = None
                need -= group.size
