"""All at once: environments post in a closed loop and poll, a trainer takes batches, somebody asks
/info.

Owns: the parties of that traffic, each a thread over blocking sockets; what they waited.
Never: waits for the server on the clients' account: requests exist before the round begins.
"""

from __future__ import annotations

import json
import resource
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from benchmarks.trajectories import groups
from benchmarks.trajectories.parties import Server, cpu_s
from benchmarks.trajectories.wire import Connection, Reply, once
from benchmarks.trajectories.workload import (
    BATCH_OF,
    USUAL,
    Allocations,
    is_null,
    registered,
    side_by_side,
)

Figures = dict[str, float]
Send = Callable[[bytes], Reply]

POLL_EVERY_S = 0.1
INFO_EVERY_S = 0.05
NO_BATCH_S = 0.02
"""How long the trainer waits after a null."""

WARM_UP_S = 1.0
KINDS_OF_AN_ENV = 2


@dataclass
class Traffic:
    """A round in progress: until when, since when it counts, what was waited (s) by kind of
    request.
    """

    counts_from: float
    ends: float
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, kind: str, send: Send, message: bytes) -> Reply:
        """A request of the round; counted once the round is warm."""
        began = time.perf_counter()
        reply = send(message)
        ended = time.perf_counter()
        if reply.status != 200:
            raise SystemExit(
                f"error: {kind} was answered with {reply.status}: {bytes(reply.content)[:300]!r}"
            )
        if self.counts_from <= ended <= self.ends:
            with self._lock:
                self.waits[kind].append(ended - began)
        return reply

    @property
    def going_on(self) -> bool:
        """The round is not over."""
        return time.perf_counter() < self.ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """So many environments for so long."""

    environments: int
    kept_alive: bool
    """Connections are; otherwise a new one per call, as the original's clients make them."""
    for_s: float

    def __str__(self) -> str:
        plural = "s" if self.environments > 1 else ""
        return (
            f"{self.environments} environment{plural}, "
            f"{'keep-alive' if self.kept_alive else 'a connection per call'}"
        )

    def round(self, server: Server) -> Figures:
        """One round against a fresh server."""
        env_ids = registered(server, Allocations(shares=(None,) * self.environments))
        for env_id in env_ids:  # made and compressed before the round
            groups.posts(USUAL, "gzip", env_id, KINDS_OF_AN_ENV)
        now = time.perf_counter()
        traffic = Traffic(now + WARM_UP_S, now + WARM_UP_S + self.for_s)
        works = [partial(self._post, server.port, traffic, env_id) for env_id in env_ids]
        works += [partial(self._poll, server.port, traffic, env_id) for env_id in env_ids]
        works += [
            partial(self._train, server.port, traffic),
            partial(self._ask_info, server.port, traffic),
        ]
        cpu, client = cpu_s(server.pid), _own_cpu_s()
        side_by_side(works)
        took = time.perf_counter() - now
        return {
            **self._figures(traffic.waits),
            "server_cores": (cpu_s(server.pid) - cpu) / took,
            "client_cores": (_own_cpu_s() - client) / took,
        }

    def _figures(self, waits: dict[str, list[float]]) -> Figures:
        figures: Figures = {
            "groups_per_s": len(waits["post"]) / self.for_s,
            "polls_per_s": len(waits["poll"]) / self.for_s,
        }
        figures |= {"batches_per_s": len(waits["batch"]) / self.for_s}
        for kind in ("post", "poll", "batch", "info"):
            if len(waits[kind]) > 1:
                figures[f"{kind}_p50_ms"] = 1e3 * statistics.median(waits[kind])
                figures[f"{kind}_p95_ms"] = (
                    1e3 * statistics.quantiles(waits[kind], n=20, method="inclusive")[-1]
                )
        return figures

    @contextmanager
    def _line(self, port: int, room: int = 1 << 12) -> Iterator[Send]:
        """How this round's clients reach the server."""
        if not self.kept_alive:
            yield partial(once, port)
            return
        with Connection(port, room) as connection:
            yield connection.exchange

    def _post(self, port: int, traffic: Traffic, env_id: int) -> None:
        messages = groups.posts(USUAL, "gzip", env_id, KINDS_OF_AN_ENV)
        with self._line(port) as send:
            number = 0
            while traffic.going_on:
                traffic.send("post", send, messages[number % len(messages)])
                number += 1

    def _poll(self, port: int, traffic: Traffic, env_id: int) -> None:
        message = groups.request("GET", "/status-env", json.dumps({"env_id": env_id}).encode())
        with self._line(port) as send:
            for _ in _every(POLL_EVERY_S, traffic, POLL_EVERY_S * env_id / self.environments):
                traffic.send("poll", send, message)

    def _ask_info(self, port: int, traffic: Traffic) -> None:
        with self._line(port) as send:
            for _ in _every(INFO_EVERY_S, traffic):
                traffic.send("info", send, groups.request("GET", "/info"))

    def _train(self, port: int, traffic: Traffic) -> None:
        with self._line(port, 1 << 22) as send:
            while traffic.going_on:
                began = time.perf_counter()
                reply = send(BATCH_OF["gzip"])
                ended = time.perf_counter()
                if is_null(reply):
                    time.sleep(NO_BATCH_S)
                elif traffic.counts_from <= ended <= traffic.ends:
                    traffic.waits["batch"].append(ended - began)


def _every(interval_s: float, traffic: Traffic, offset_s: float = 0.0) -> Iterator[None]:
    """Ticks of the round; those that were missed are left out."""
    due = time.perf_counter() + offset_s
    while traffic.going_on:
        time.sleep(max(0.0, due - time.perf_counter()))
        yield
        due = max(due + interval_s, time.perf_counter())


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def settings(quick: bool) -> list[Mixed]:
    """Environments, each with connections kept alive and without."""
    return [
        Mixed(environments=environments, kept_alive=kept_alive, for_s=2.0 if quick else 6.0)
        for kept_alive in (True, False)
        for environments in (1, 16, 64)
    ]
