"""Three server processes on one PostgreSQL under load, one of them killed: nothing lost, nothing
doubled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

import pytest
from deadlines import until

from halteres.clients.retries import Retries
from halteres.clients.trajectories import (
    EnvironmentClient,
    LeaseLost,
    TrainerClient,
    TrainerRegistration,
    new_key,
)
from halteres.errors import NotReady
from trajectories.server_fixtures import Json, ServerProcess, group

pytestmark = pytest.mark.runs

T = TypeVar("T")

BATCH_SIZE, GROUP_SIZE = 8, 2
NUM_BATCHES = 30
NUM_GROUPS = NUM_BATCHES * BATCH_SIZE // GROUP_SIZE
AT_ONCE = Retries.for_seconds(0)  # the next attempt goes to another server
LEASE_S = 2.0


@dataclass
class Fleet:
    """Servers, and what their clients were promised."""

    servers: list[ServerProcess]
    down: set[ServerProcess] = field(default_factory=set)
    turn: count[int] = field(default_factory=count)
    posted: set[int] = field(default_factory=set)  # marks of acknowledged groups
    trained: list[list[int]] = field(default_factory=list)  # marks of each acknowledged batch
    answered: Counter[str] = field(default_factory=Counter)  # per server

    def next(self) -> str:
        """The next server that is up."""
        up = [server for server in self.servers if server not in self.down]
        return up[next(self.turn) % len(up)].url

    async def somewhere(self, ask: Callable[[str], Awaitable[T]]) -> T:
        """Ask one server after another until one answers."""
        while True:
            url = self.next()
            with contextlib.suppress(NotReady):
                answer = await ask(url)
                self.answered[url] += 1
                return answer

    @property
    def num_trained(self) -> int:
        return sum(map(len, self.trained))


@pytest.fixture
async def fleet(url: str) -> AsyncIterator[Fleet]:
    """Three servers on one database, a registered trainer that has asked once."""
    servers = await asyncio.gather(*(asyncio.to_thread(ServerProcess, url) for _ in range(3)))
    trainer = TrainerClient(servers[0].url)
    trainer.register(
        TrainerRegistration(batch_size=BATCH_SIZE, max_token_len=64, num_steps=NUM_BATCHES)
    )
    servers[1].ask("/batch")
    yield Fleet(servers)
    trainer.close()
    for server in servers:
        server.close()


async def post(fleet: Fleet, marks: range) -> None:
    """An environment: every group until it is acknowledged, under one key, wherever somebody
    listens.
    """
    for mark in marks:
        send = partial(send_once, body=group(GROUP_SIZE, mark), key=new_key())
        await fleet.somewhere(send)
        if mark % 5 == 0:  # as if the reply had been lost: another server hears the same
            await fleet.somewhere(send)
        fleet.posted.add(mark)


async def send_once(url: str, body: Json, key: str) -> None:
    async with EnvironmentClient(url, AT_ONCE) as client:
        await client.post(body, key=key)


async def train(fleet: Fleet) -> None:
    """A trainer: leases here, acknowledges there."""
    while fleet.num_trained < NUM_GROUPS:
        leased = await fleet.somewhere(lambda url: asyncio.to_thread(lease, url))
        if leased is None:
            continue
        number, marks = leased
        with contextlib.suppress(LeaseLost):
            await fleet.somewhere(
                lambda url, number=number: asyncio.to_thread(acknowledge, url, number)
            )
            fleet.trained.append(marks)


def lease(url: str) -> tuple[int, list[int]] | None:
    """A batch: its id, and the marks of its groups."""
    client = TrainerClient(url, AT_ONCE)
    try:
        batch = client.batch(0, deadline_s=0.2, lease_s=LEASE_S)
        assert batch and sum(len(each.tokens) for each in batch.groups) == BATCH_SIZE
        return client.leased.id, [each.tokens[0][0] for each in batch.groups]
    except NotReady as nothing:
        if "No batch came" in nothing.what:
            return None
        raise
    finally:
        client.close()


def acknowledge(url: str, number: int) -> None:
    client = TrainerClient(url, AT_ONCE)
    try:
        client.acknowledge(number)
    finally:
        client.close()


async def kill_and_restart(fleet: Fleet, server: ServerProcess) -> None:
    """kill -9 in the middle; it starts again once the others have served further batches."""
    await until(lambda: len(fleet.trained) >= NUM_BATCHES // 4, what=lambda: fleet)
    fleet.down.add(server)
    server.kill()
    before = len(fleet.trained)
    await until(lambda: len(fleet.trained) >= before + 3, what=lambda: fleet)
    await asyncio.to_thread(server.start)
    fleet.down.discard(server)


async def test_with_three_servers_and_a_kill_every_acknowledged_group_is_in_exactly_one_acknowledged_batch(
    fleet: Fleet,
) -> None:
    num_posters = 4
    async with asyncio.timeout(25), asyncio.TaskGroup() as tasks:
        for first in range(1, num_posters + 1):
            tasks.create_task(post(fleet, range(first, NUM_GROUPS + 1, num_posters)))
        for _ in range(2):
            tasks.create_task(train(fleet))
        tasks.create_task(kill_and_restart(fleet, fleet.servers[1]))

    assert fleet.posted == set(range(1, NUM_GROUPS + 1))
    assert sorted(mark for batch in fleet.trained for mark in batch) == list(
        range(1, NUM_GROUPS + 1)
    )
    assert {len(batch) for batch in fleet.trained} == {BATCH_SIZE // GROUP_SIZE}
    assert all(fleet.answered[server.url] for server in fleet.servers)
    for server in fleet.servers:
        await until(
            lambda server=server: server.ask("/status")
            == {"current_step": NUM_BATCHES, "queue_size": 0}
        )
        assert server.ask("/v1/diagnostics")["groups_accepted"] == NUM_GROUPS
