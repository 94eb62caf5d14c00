"""kill -9 of a real server, again and again, under mixed load: nothing that was acknowledged is
lost, nothing doubled.

The instants come from a seed, which is printed: so many replies after the last start, and up to
some milliseconds more. Ready means: from the start of the process to its first reply.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from deadlines import wait_until

from .concurrent_clients import ConcurrentClients, Work
from .server_fixtures import ENV, TRAINER, ServerProcess, group

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

NUM_POSTERS = 3
FIRST_MARKS = 10**6
"""Between those of two posters."""

MOST_REPLIES = 25
"""Between a start and the next kill."""

MOST_MS = 8.0
WITHIN_S = 60.0

Trainers = Callable[[ConcurrentClients, random.Random], list[Work]]


def killed(folder: Path, num_kills: int, trainers: Trainers) -> tuple[ConcurrentClients, int]:
    """A server under load, killed so often; then everything is taken. Gives what everybody knows,
    and the last step.
    """
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it where the test fails
    chance = random.Random(seed)
    server, ready_s = ServerProcess(folder / "queue.sqlite"), list[float]()
    crowd = ConcurrentClients(server.url)
    try:
        server.ask("/register", TRAINER)
        server.ask("/batch")
        env_ids = [server.ask("/register-env", ENV)["env_id"] for _ in range(NUM_POSTERS)]
        posters = [
            crowd.poster(id, FIRST_MARKS * (id + 1), chance.randrange(2**32)) for id in env_ids
        ]
        crowd.come([*posters, crowd.poller(env_ids[0])], trainers(crowd, chance))
        for _ in range(num_kills):
            crowd.events.wait_for(chance.randint(0, MOST_REPLIES), WITHIN_S)
            _spin(chance.uniform(0, MOST_MS / 1e3))
            server.kill()
            began = time.perf_counter()
            server.start()
            ready_s.append(time.perf_counter() - began)
        step = _emptied(server, crowd)
    finally:
        crowd.end()
        server.close()
    print(  # noqa: T201
        f"{num_kills} kills, {len(crowd.acknowledged)} groups, {len(crowd.batches)} batches; "
        f"ready again: median {statistics.median(ready_s):.2f} s, longest {max(ready_s):.2f} s"
    )
    return crowd, step


def _spin(seconds: float) -> None:
    """Up to an instant finer than a thread can be woken at."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


def _emptied(server: ServerProcess, crowd: ConcurrentClients) -> int:
    """Environments stop, trainers go on until nothing waits; gives the step."""
    crowd.end_posting()
    if len(crowd.acknowledged) % 2:  # a batch is two groups
        server.ask("/scored_data", group(2, mark=1))
        crowd.acknowledged.append(1)
    wait_until(lambda: server.ask("/status")["queue_size"] == 0, WITHIN_S, "everything is taken")
    crowd.end_training()
    return server.ask("/status")["current_step"]


def _assert_each_once(crowd: ConcurrentClients, step: int) -> None:
    delivered = Counter(mark for batch in crowd.batches for mark in batch)
    lost = set(crowd.acknowledged) - delivered.keys()
    doubled = [mark for mark, num in delivered.items() if num > 1]
    assert (sorted(lost), sorted(doubled)) == ([], [])
    assert delivered.keys() == set(crowd.acknowledged)
    assert step == len(crowd.batches)


def test_100_kills_lose_and_double_nothing_for_trainers_with_leases(tmp_path: Path) -> None:
    crowd, step = killed(
        tmp_path,
        100,
        lambda crowd, chance: [crowd.leasing(chance.randrange(2**32)) for _ in range(2)],
    )
    _assert_each_once(crowd, step)


def test_25_kills_lose_and_double_nothing_for_a_trainer_that_names_the_batch_it_holds(
    tmp_path: Path,
) -> None:
    crowd, step = killed(tmp_path, 25, lambda crowd, chance: [crowd.holding()])
    _assert_each_once(crowd, step)


def test_25_kills_lose_nothing_for_the_original_s_trainer(tmp_path: Path) -> None:
    """A batch may come again where the server died right after its last byte: whole, and once for
    each kill at most.
    """
    crowd, step = killed(tmp_path, 25, lambda crowd, chance: [crowd.plain()])
    delivered = Counter(mark for batch in crowd.batches for mark in batch)
    assert delivered.keys() == set(crowd.acknowledged)
    again = [batch for batch in crowd.batches if any(delivered[mark] > 1 for mark in batch)]
    assert all(batch in crowd.uncertain for batch in again), (
        "a batch was doubled, or torn, without need"
    )
    assert step == len({tuple(batch) for batch in crowd.batches})
    assert len(crowd.batches) - step <= 25
