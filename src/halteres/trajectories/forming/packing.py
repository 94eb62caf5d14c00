"""Batch forming: which queued groups make a batch of exactly so many sequences.

Owns: what a batch is made of: exactness, each environment's soft minimum, then the order of the rest.
Never: splits a group, reads tokens, lets one group block the others.

Rule: every environment with a minimum share gives one group, then as many more as its share asks for; the rest is taken
oldest first, or by the environments' weights. A group is taken if the rest can still be completed exactly from what is
queued, so no choice leads into a dead end, and the oldest group that fits beside the shares is in the next batch.
Within an environment and a size the order is that of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from halteres.trajectories.forming.givers import Givers
from halteres.trajectories.forming.lanes import Queue
from halteres.trajectories.forming.sums import can_add_up, can_ever_add_up
from halteres.trajectories.forming.walk import OldestFirst, Order, Walk
from halteres.trajectories.records import GroupRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """Sequences of every batch that an environment asked for. Soft: one group suffices, others may fill the rest."""

    env_id: int
    need: int


def unmet(queue: Queue, batch_size: int, minima: Iterable[Minimum]) -> Minimum | None:
    """The first minimum that holds every batch back: its environment has nothing queued that fits one now.

    One whose groups can never fit, however many come, holds nobody back.
    """
    minima = tuple(minima)
    givers = Givers(queue, batch_size, (minimum.env_id for minimum in minima))
    return next((each for each in minima if _is_missing(queue, batch_size, each, givers)), None)


def choose(
    queue: Queue, batch_size: int, minima: Iterable[Minimum] = (), order: Order | None = None
) -> list[GroupRecord] | None:
    """The groups of the next batch in queue order, or None if none can be formed.

    There is one wherever groups add up exactly and no minimum is `unmet`. Every environment with a minimum is in it if
    any batch holds them all. Otherwise whose group has waited longest is, and who can be beside it: each has its turn.
    """
    minima = tuple(minima)
    if batch_size <= 0 or not can_add_up(queue.num_by_size, batch_size):
        return None
    needs = {minimum.env_id: minimum.need for minimum in minima}
    givers = Givers(queue, batch_size, needs)
    if any(_is_missing(queue, batch_size, each, givers) for each in minima):
        return None
    walk = Walk(queue, batch_size, order or OldestFirst())
    together = givers.together()
    for env_id, size in together.items():
        walk.take(env_id, size)
    for env_id in together:
        walk.take_until(env_id, needs[env_id])
    walk.take_rest()
    return sorted(walk.taken, key=lambda group: group.position)


def _is_missing(queue: Queue, batch_size: int, minimum: Minimum, givers: Givers) -> bool:
    if givers.fitting[minimum.env_id]:
        return False
    own, known = queue.sizes_of(minimum.env_id), {size for size in queue.num_by_size if size <= batch_size}
    return not own or any(can_ever_add_up(known, batch_size - size) for size in own if size <= batch_size)
