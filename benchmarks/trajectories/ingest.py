"""POST /scored_data in a closed loop: processor time of the server per group, groups and JSON per
second, memory.

A round is a fresh server: some groups to warm up, then the counted ones; all of them stay queued.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from benchmarks.trajectories import groups
from benchmarks.trajectories.groups import Shape
from benchmarks.trajectories.parties import Server, cpu_s, resident_bytes
from benchmarks.trajectories.wire import Connection, timed
from benchmarks.trajectories.workload import LONG, USUAL, registered, side_by_side

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingest:
    """One way of posting."""

    shape: Shape
    encoding: str
    connections: int
    num_groups: int

    def __str__(self) -> str:
        return (
            f"{self.shape} {self.encoding}, {self.connections} "
            f"connection{'s' * (self.connections > 1)}"
        )

    def round(self, server: Server) -> Figures:
        """One round against a fresh server."""
        (env_id,) = registered(server)
        messages = groups.posts(self.shape, self.encoding, env_id)
        num_warm_up = self._post(server.port, messages, max(self.num_groups // 8, self.connections))
        cpu, resident, began = cpu_s(server.pid), resident_bytes(server.pid), time.perf_counter()
        num_posted = self._post(server.port, messages, self.num_groups)
        took, cpu = time.perf_counter() - began, cpu_s(server.pid) - cpu
        resident = resident_bytes(server.pid) - resident
        queued = server.ask("GET", "/status")["queue_size"]
        assert queued == num_warm_up + num_posted, f"{server.name} holds {queued} groups"
        json_bytes = sum(
            len(groups.body(self.shape, kind, env_id)) for kind in range(len(messages))
        ) / len(messages)
        return {
            "cpu_ms_per_group": 1e3 * cpu / num_posted,
            "wall_ms_per_group": 1e3 * took / num_posted,
            "groups_per_s": num_posted / took,
            "json_mb_per_s": num_posted * json_bytes / took / 1e6,
            "resident_mb_per_group": resident / num_posted / 1e6,
        }

    def _post(self, port: int, messages: tuple[bytes, ...], num_groups: int) -> int:
        each = num_groups // self.connections
        side_by_side([partial(_loop, port, messages, each) for _ in range(self.connections)])
        return each * self.connections


def _loop(port: int, messages: tuple[bytes, ...], num_groups: int) -> None:
    with Connection(port) as connection:
        for number in range(num_groups):
            _, reply = timed(connection, messages[number % len(messages)])
            assert bytes(reply.content).startswith(b'{"status":"received"'), bytes(reply.content)


def settings(quick: bool) -> list[Ingest]:
    """The counted groups take the original seconds, ours some hundred ticks of the system's
    clock.
    """
    usual, long = (200, 40) if quick else (1200, 240)
    return [
        Ingest(shape=shape, encoding=encoding, connections=connections, num_groups=num_groups)
        for shape, num_groups in ((USUAL, usual), (LONG, long))
        for encoding in ("identity", "gzip")
        for connections in (1, 8)
    ]
