"""Queues of groups, written short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from halteres.trajectories.batch_selection import Minimum, Queue
from halteres.trajectories.records import (
    GroupRecord,
    Place,
    Versions,
)

Queued = Sequence[tuple[int | None, int]]
"""Environment and size of each group, in order."""

queues = st.lists(
    st.tuples(st.sampled_from([None, 0, 1, 2]), st.sampled_from([1, 2, 3, 4, 6, 8])), max_size=10
)


def record(
    position: int, size: int, env_id: int | None = None, versions: Versions | None = None
) -> GroupRecord:
    """A group; its id is its position."""
    return GroupRecord(
        id=position,
        env_id=env_id,
        size=size,
        num_bytes=1,
        received_at=0.0,
        place=Place.QUEUED,
        position=position,
        versions=versions,
    )


def filled(groups: Queued) -> Queue:
    """A queue of these groups."""
    queue = Queue()
    for position, (env_id, size) in enumerate(groups):
        queue.add(record(position, size, env_id))
    return queue


def minima(needs: Mapping[int, int]) -> list[Minimum]:
    """Minimum shares in sequences, per environment."""
    return [Minimum(env_id=env_id, need=need) for env_id, need in needs.items()]
