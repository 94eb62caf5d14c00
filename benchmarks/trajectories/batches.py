"""GET /batch of 128 sequences, from the request to the last byte, at several queue lengths; and
whole queues drained.

A round is a fresh server, warmed up by a few batches. Groups at the ends of a long queue are
16x512, between them 16x8.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.trajectories.groups import request
from benchmarks.trajectories.parties import Server, cpu_s
from benchmarks.trajectories.wire import Connection, timed
from benchmarks.trajectories.workload import (
    BATCH_OF,
    BATCH_SIZE,
    GROUP_SIZE,
    PLAIN,
    SHARES,
    Allocations,
    fill,
    is_null,
    registered,
    take,
)

Figures = dict[str, float]
GROUPS_OF_A_BATCH = BATCH_SIZE // GROUP_SIZE
WARM_UP = 4
"""Batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Batches from a queue of that length."""

    queued: int
    allocations: Allocations
    encoding: str
    throughout: bool = False
    """All groups 16x512, not those at the ends only."""

    def __str__(self) -> str:
        shape = " (all 16x512)" if self.throughout else ""
        return f"{self.queued} groups{shape}, {self.allocations}, {self.encoding}"

    def round(self, server: Server) -> Figures:
        """First batch and the median of the next ones."""
        env_ids = registered(server, self.allocations)
        _warm_up(server, env_ids, self.encoding)
        fill(server, self.queued, env_ids, usual=self.throughout)
        with _connected(server) as connection:
            cpu = cpu_s(server.pid)
            first = take(connection, self.encoding)
            num_next = min(self.queued // GROUPS_OF_A_BATCH - 1, 4)
            figures = {"first_ms": 1e3 * first.seconds, "reply_mb": first.num_bytes / 1e6}
            if num_next:
                took = [take(connection, self.encoding).seconds for _ in range(num_next)]
                figures |= {"next_ms": 1e3 * statistics.median(took)}
            figures["cpu_ms_per_batch"] = 1e3 * (cpu_s(server.pid) - cpu) / (1 + num_next)
            return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A whole queue of short groups, batch after batch until there is none."""

    queued: int
    allocations: Allocations

    def __str__(self) -> str:
        return f"{self.queued} groups of 16x8, {self.allocations}"

    def round(self, server: Server) -> Figures:
        """Time and processor time of all of it, and the longest wait."""
        env_ids = registered(server, self.allocations)
        _warm_up(server, env_ids, "identity")
        fill(server, self.queued, env_ids)
        with _connected(server) as connection:
            cpu, began, waits = cpu_s(server.pid), time.perf_counter(), [0.0]
            while True:
                took, reply = timed(connection, BATCH_OF["identity"])
                waits.append(took)
                if is_null(reply):
                    break
            took = time.perf_counter() - began
            assert len(waits) - 2 == self.queued // GROUPS_OF_A_BATCH, f"{len(waits) - 2} batches"
            return {
                "total_s": took,
                "cpu_s": cpu_s(server.pid) - cpu,
                "longest_ms": 1e3 * max(waits),
            }


def _warm_up(server: Server, env_ids: list[int], encoding: str) -> None:
    fill(server, WARM_UP * GROUPS_OF_A_BATCH, env_ids)
    with _connected(server) as connection:
        for _ in range(WARM_UP):
            take(connection, encoding)


@contextmanager
def _connected(server: Server) -> Iterator[Connection]:
    """A connection that was used just now: the original closes those that are idle for 5 s."""
    with Connection(server.port, room=1 << 22) as connection:
        timed(connection, request("GET", "/info"))
        yield connection


def settings(quick: bool) -> list[Delivery]:
    """Lengths, with and without minimum shares, both encodings."""
    lengths = (10, 1000) if quick else (10, 1000, 10_000)
    return [
        Delivery(queued=queued, allocations=allocations, encoding=encoding)
        for queued in lengths
        for allocations in (PLAIN, SHARES)
        for encoding in ("identity", "gzip")
    ]


def throughout(quick: bool) -> list[Delivery]:
    """All groups of the usual shape, 2.6 GB of JSON: ours alone, the original needs 6 GB of memory
    and minutes.
    """
    if quick:
        return []
    return [Delivery(queued=10_000, allocations=PLAIN, encoding="identity", throughout=True)]


def drains(quick: bool) -> list[Drain]:
    """With and without minimum shares."""
    return [
        Drain(queued=800 if quick else 4000, allocations=allocations)
        for allocations in (PLAIN, SHARES)
    ]
