"""What the clients of a trajectory server know, and what must therefore be true of it.

Owns: groups that were acknowledged to environments, batches that are a trainer's for good, leases,
environments with their minimum shares; the rules by which a batch may be formed. Never: talks to a
server.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

ENV_TIMEOUT_S = 60.0
WAITING = {"queued", "buffered", "out"}


@dataclass(frozen=True, slots=True)
class Posted:
    """A group that was sent; `mark` is its first token."""

    mark: int
    size: int
    env_id: int | None


@dataclass(frozen=True, slots=True)
class Seen:
    """A group as the server lists it."""

    id: int
    mark: int
    size: int
    env_id: int | None
    place: str
    batch_id: int | None


@dataclass(slots=True)
class Env:
    """An environment: its part of every batch, when it was last heard of (unix s), whether it
    polled in this run and has not said goodbye.
    """

    group_size: int
    share: float
    seen_at: float
    connected: bool = True

    def is_live(self, now: float) -> bool:
        """It counts."""
        return self.connected and now - self.seen_at <= ENV_TIMEOUT_S


@dataclass(slots=True)
class Lease:
    """A batch that a trainer should acknowledge."""

    marks: list[int]
    expires_at: float


@dataclass(slots=True)
class Knowledge:
    """All clients together."""

    batch_size: int = 0  # 0: no trainer
    identity: str = ""
    first_step: int = 0
    delivered_before: int = 0  # batches of earlier runs
    accepted: dict[int, Posted] = field(default_factory=dict)  # of this run, by mark
    useless: dict[int, Posted] = field(default_factory=dict)  # acknowledged, but fit for no batch
    # batches that are a trainer's for good, of all runs
    delivered: list[list[int]] = field(default_factory=list)
    leases: dict[int, Lease] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)  # ids of delivered batches
    envs: dict[int, Env] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The run's."""
        return self.first_step + len(self.delivered) - self.delivered_before

    def begin_run(self, identity: str, batch_size: int) -> None:
        """Another run: what waits is in nobody's way any more. Groups that came before any trainer
        belong to it.
        """
        if self.batch_size:
            self.accepted.clear()
            self.useless.clear()
            self.leases.clear()
            for env in self.envs.values():
                env.connected = False
        self.identity, self.batch_size = identity, batch_size
        self.delivered_before = len(self.delivered)

    def deliver(self, marks: Sequence[int], batch_id: int | None = None) -> None:
        """A batch is a trainer's for good; `batch_id` where it knows that."""
        before = {mark for batch in self.delivered for mark in batch}
        assert not before & set(marks), f"delivered twice: {before & set(marks)}"
        self.delivered.append(list(marks))
        if batch_id is not None:
            self.acknowledged.add(batch_id)

    def minima(self, now: float) -> dict[int, int]:
        """Sequences of the next batch that live environments asked for; scaled down where they
        exceed it.
        """
        asked = {
            env_id: int(self.batch_size * env.share)
            for env_id, env in self.envs.items()
            if env.is_live(now)
        }
        asked = {env_id: need for env_id, need in asked.items() if need}
        total = sum(asked.values())
        if total <= self.batch_size:
            return asked
        scale = self.batch_size / total
        return {
            env_id: max(self.envs[env_id].group_size, int(need * scale))
            for env_id, need in asked.items()
        }

    def check_places(self, listing: Sequence[Seen]) -> None:
        """Every acknowledged group is in one place: in a batch that is a trainer's, or waiting. No
        other is.
        """
        twice = [mark for mark, num in Counter(seen.mark for seen in listing).items() if num > 1]
        assert not twice, f"listed twice: {twice}"
        places = {seen.mark: seen.place for seen in listing}
        delivered = {mark for batch in self.delivered for mark in batch}
        assert {mark for mark, place in places.items() if place == "delivered"} == delivered
        lost = [
            mark
            for mark in self.accepted
            if mark not in delivered and places.get(mark) not in WAITING
        ]
        assert not lost, f"lost: {[(mark, places.get(mark)) for mark in lost]}"
        waiting = {mark for mark, place in places.items() if place in WAITING}
        stray = waiting - self.accepted.keys() - self.useless.keys()
        assert not stray, f"nobody was told of {stray}"


def can_add_up(sizes: Iterable[int], total: int) -> bool:
    """Whether some of these sizes make exactly `total`."""
    if total < 0:
        return False
    reach = {0}
    for size in sizes:
        reach |= {made + size for made in reach if made + size <= total}
    return total in reach


def check_fresh(
    batch: Sequence[Seen], queued: Sequence[Seen], batch_size: int, minima: Mapping[int, int]
) -> None:
    """A batch that was formed from this queue, oldest first, is one that may be formed from it."""
    assert sum(seen.size for seen in batch) == batch_size
    _check_order(batch, queued)
    for env_id in minima:
        assert not _holds_back(env_id, queued, batch_size), (
            f"environment {env_id} has nothing in the batch"
        )
    taken, promised = (
        {seen.mark for seen in batch},
        [seen for seen in batch if seen.env_id in minima],
    )
    if _all_can_give(minima, queued, batch_size):
        assert {seen.env_id for seen in promised} == set(minima), (
            "an environment with a minimum was left out"
        )
    for env_id, need in minima.items():
        own = [seen for seen in queued if seen.env_id == env_id]
        if sum(seen.size for seen in own if seen.mark in taken) >= need:
            continue
        for seen in own:  # soft: one may be missing where the batch could not be exact with it
            if seen.mark not in taken:
                assert not _completes([*promised, seen], queued, batch_size), (
                    f"the minimum of {env_id} is not kept"
                )


def _completes(given: Sequence[Seen], queued: Sequence[Seen], batch_size: int) -> bool:
    """Whether some of the queue makes an exact batch with these."""
    missing = batch_size - sum(seen.size for seen in given)
    return missing >= 0 and can_add_up((seen.size for seen in queued if seen not in given), missing)


def _all_can_give(minima: Iterable[int], queued: Sequence[Seen], batch_size: int) -> bool:
    """Whether there is an exact batch with a group of each of these environments."""
    offers = [
        {seen.size: seen for seen in queued if seen.env_id == env_id}.values() for env_id in minima
    ]
    return any(_completes(choice, queued, batch_size) for choice in itertools.product(*offers))


def _holds_back(env_id: int, queued: Sequence[Seen], batch_size: int) -> bool:
    """Whether everybody waits for an environment with a minimum: it has nothing that fits, and
    something might come.
    """
    own = [seen for seen in queued if seen.env_id == env_id]
    if any(_completes([seen], queued, batch_size) for seen in own):
        return False
    known = [seen.size for seen in queued for _ in range(batch_size)]
    return not own or any(can_add_up(known, batch_size - seen.size) for seen in own)


def _check_order(batch: Sequence[Seen], queued: Sequence[Seen]) -> None:
    """First in, first out, among the groups of an environment and size."""
    taken = {seen.mark for seen in batch}
    for lane in {(seen.env_id, seen.size) for seen in batch}:
        waiting = [seen.mark for seen in queued if (seen.env_id, seen.size) == lane]
        first = waiting[: len(taken & set(waiting))]
        assert set(first) <= taken, f"{lane}: {taken & set(waiting)} before {first}"
        assert [seen.mark for seen in batch if (seen.env_id, seen.size) == lane] == first


def check_none(queued: Sequence[Seen], batch_size: int, minima: Mapping[int, int]) -> None:
    """There is no batch because there can be none."""
    held = any(_holds_back(env_id, queued, batch_size) for env_id in minima)
    assert held or not can_add_up((seen.size for seen in queued), batch_size), (
        "a batch could have been formed"
    )
