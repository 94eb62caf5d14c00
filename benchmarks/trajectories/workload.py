"""What all scenarios need: a registered trainer and its environments, queues of a given length,
checked batches.

Owns: the registrations, the composition of a queue.
Never: measures, except where a reply's time is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.trajectories import groups
from benchmarks.trajectories.groups import NUM_KINDS, Shape
from benchmarks.trajectories.parties import Server
from benchmarks.trajectories.wire import Connection, Reply, timed

BATCH_SIZE = 128
GROUP_SIZE = 16
SHORT = Shape(GROUP_SIZE, 8)
USUAL = Shape(GROUP_SIZE, 512)
LONG = Shape(GROUP_SIZE, 4096)
BATCH_OF = {
    encoding: groups.request("GET", "/batch", accept=encoding) for encoding in ("identity", "gzip")
}

ENDS = 40
"""Groups at each end of a long queue that have the usual shape: five batches. The original serves
its newest first.
"""

FILLED_AT_ONCE = 50
"""Groups of a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """Minimum shares of the batch, one environment each; None: an environment without."""

    shares: tuple[float | None, ...] = (None,)

    def __str__(self) -> str:
        return (
            "plain"
            if self.shares == (None,)
            else "minimum shares " + "/".join(f"{share:g}" for share in self.shares)
        )


PLAIN = Allocations()
SHARES = Allocations(shares=(0.25, 0.25))


def registered(
    server: Server, allocations: Allocations = PLAIN, *, batch_size: int = BATCH_SIZE
) -> list[int]:
    """A trainer that has asked once, and its environments; gives their ids."""
    trainer: dict[str, Any] = {
        "wandb_group": "g",
        "wandb_project": "p",
        "checkpoint_dir": "/c",
        "num_steps": 10**6,
    }
    trainer |= {
        "batch_size": batch_size,
        "max_token_len": 8192,
        "save_checkpoint_interval": 0,
        "starting_step": 0,
    }
    server.ask("POST", "/register", trainer)
    assert server.ask("GET", "/batch") == {"batch": None}
    env: dict[str, Any] = {
        "max_token_length": 8192,
        "desired_name": "e",
        "weight": 1.0,
        "group_size": GROUP_SIZE,
    }
    asked = ({**env, "min_batch_allocation": share} for share in allocations.shares)
    return [server.ask("POST", "/register-env", each)["env_id"] for each in asked]


def fill(server: Server, num_groups: int, env_ids: Sequence[int], *, usual: bool = False) -> None:
    """Queue groups, the environments in turn: the usual shape at both ends or throughout, the short
    one between.
    """
    before = server.ask("GET", "/status")["queue_size"]
    with Connection(server.port) as connection:
        for first in range(0, num_groups, FILLED_AT_ONCE):
            numbers = range(first, min(first + FILLED_AT_ONCE, num_groups))
            shapes = [
                USUAL if usual or not ENDS <= number < num_groups - ENDS else SHORT
                for number in numbers
            ]
            bodies = [
                groups.body(shape, number % NUM_KINDS, env_ids[number % len(env_ids)])
                for shape, number in zip(shapes, numbers, strict=True)
            ]
            timed(connection, groups.list_post(bodies))
    queued = server.ask("GET", "/status")["queue_size"] - before
    assert queued == num_groups, f"{server.name} holds {queued} of {num_groups} groups"


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch that came whole."""

    seconds: float  # from the request to the last byte
    num_bytes: int  # of the reply, as it was sent


def take(connection: Connection, encoding: str) -> Taken:
    """GET /batch, which must bring exactly a batch of the usual shape."""
    took, reply = timed(connection, BATCH_OF[encoding])
    lengths = [len(sequence) for element in reply.json()["batch"] for sequence in element["tokens"]]
    assert lengths == [USUAL.tokens] * BATCH_SIZE, (
        f"{len(lengths)} sequences of {set(lengths)} tokens"
    )
    return Taken(took, len(reply.content))


def is_null(reply: Reply) -> bool:
    """GET /batch had nothing to give."""
    return len(reply.content) < 100 and reply.json()["batch"] is None


def side_by_side(works: Sequence[Callable[[], None]]) -> None:
    """All at once, each in its thread; the first failure is raised when all have ended."""
    with ThreadPoolExecutor(len(works)) as threads:
        started = [threads.submit(work) for work in works]
    for each in started:
        each.result()
