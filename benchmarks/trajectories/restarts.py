"""kill -9 with a long queue, then start again: seconds to the first reply, groups that are still
there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.trajectories.parties import Server
from benchmarks.trajectories.wire import Connection
from benchmarks.trajectories.workload import USUAL, fill, registered, take

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """So many 16x512 groups wait when the server is killed."""

    queued: int

    def __str__(self) -> str:
        return f"{self.queued} groups of {USUAL}"

    def round(self, server: Server) -> Figures:
        """From the start of the new process to its first reply, to /status, and to the last byte of
        a batch.
        """
        fill(server, self.queued, registered(server), usual=True)
        server.kill()
        began = time.perf_counter()
        server.start()
        kept = server.ask("GET", "/status")["queue_size"]
        figures = {"ready_s": server.ready_s, "groups_kept": float(kept)}
        if kept:
            with Connection(server.port, room=1 << 22) as connection:
                take(connection, "identity")
            figures["first_batch_s"] = time.perf_counter() - began
        return figures


def settings(quick: bool) -> list[Restart]:
    """Ours keeps all; the original is asked with fewer, of which it keeps none."""
    return [Restart(queued=500 if quick else 10_000)]


def lost(quick: bool) -> list[Restart]:
    """What both keep of a queue that the original can hold."""
    return [Restart(queued=100 if quick else 500)]
