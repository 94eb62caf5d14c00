"""GET /status-env in a closed loop over one connection, at several queue lengths: latency,
processor time per poll.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass

from benchmarks.trajectories import groups
from benchmarks.trajectories.groups import NUM_KINDS
from benchmarks.trajectories.parties import Server, cpu_s
from benchmarks.trajectories.wire import Connection, timed
from benchmarks.trajectories.workload import FILLED_AT_ONCE, SHORT, Allocations, registered

Figures = dict[str, float]
TWO = Allocations(shares=(None, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Polls:
    """Polls for so long while so many short groups of two environments wait."""

    queued: int
    for_s: float

    def __str__(self) -> str:
        return f"{self.queued} groups"

    def round(self, server: Server) -> Figures:
        """One round against a fresh server."""
        # nothing is ever served: the queue keeps its length
        env_ids = registered(server, TWO, batch_size=2**20)
        poll = groups.request("GET", "/status-env", json.dumps({"env_id": env_ids[0]}).encode())
        with Connection(server.port) as connection:
            for first in range(0, self.queued, FILLED_AT_ONCE):
                numbers = range(first, min(first + FILLED_AT_ONCE, self.queued))
                bodies = [
                    groups.body(SHORT, number % NUM_KINDS, env_ids[number % 2])
                    for number in numbers
                ]
                timed(connection, groups.list_post(bodies))
            for _ in range(20):
                timed(connection, poll)
            cpu, ends, waits = cpu_s(server.pid), time.perf_counter() + self.for_s, []
            while time.perf_counter() < ends:
                waits.append(timed(connection, poll)[0])
        assert server.ask("GET", "/status")["queue_size"] == self.queued
        return {
            "p50_ms": 1e3 * statistics.median(waits),
            "p95_ms": 1e3 * statistics.quantiles(waits, n=20)[-1],
            "cpu_ms_per_poll": 1e3 * (cpu_s(server.pid) - cpu) / len(waits),
        }


def settings(quick: bool) -> list[Polls]:
    """Three lengths."""
    return [Polls(queued=queued, for_s=0.5 if quick else 2.0) for queued in (10, 1000, 10_000)]
