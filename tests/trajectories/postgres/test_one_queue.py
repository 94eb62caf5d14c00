"""Servers in process on one PostgreSQL: whatever one of them promised, all of them keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from deadlines import until

from halteres.trajectories.records import (
    Remembered,
    RunRecord,
)
from halteres.trajectories.stores.postgres import PostgresStore
from trajectories.server_fixtures import Clock, ServerFixture, group, marks, opened

from .cluster import Cluster

pytestmark = pytest.mark.runs

Pair = tuple[ServerFixture, ServerFixture]


@pytest.fixture
async def pair(url: str, tmp_path: Path) -> AsyncIterator[Pair]:
    """Two servers of one clock, a trainer that has asked at the first."""
    clock = Clock()
    async with (
        opened(tmp_path, clock, PostgresStore(url)) as one,
        opened(tmp_path, clock, PostgresStore(url)) as other,
    ):
        await one.begin()
        await until(lambda: run_of(other).started)
        yield one, other


def run_of(scene: ServerFixture) -> RunRecord:
    """The run, as far as this server has heard of it."""
    return scene.app.state.service.state.run


async def test_a_group_posted_at_one_is_in_the_batch_of_another(pair: Pair) -> None:
    one, other = pair
    await one.send(group(mark=1))
    await other.send(group(mark=2))
    assert marks(await one.batch()) == [1, 2]
    assert await other.batch() is None


async def test_a_question_that_waits_at_one_is_answered_by_a_group_that_comes_to_another(
    pair: Pair,
) -> None:
    one, other = pair
    asked = asyncio.create_task(one.batch(wait=10))
    await other.send(group(mark=1), group(mark=2))
    assert marks(await asked) == [1, 2]


async def test_a_key_counts_once_whichever_server_hears_it(pair: Pair) -> None:
    one, other = pair
    first = await one.post("/scored_data", group(mark=1), Idempotency_Key="k1")
    assert await other.post("/scored_data", group(mark=1), Idempotency_Key="k1") == first
    refused = await other.raw_post("/scored_data", group(mark=2), Idempotency_Key="k1")
    assert refused.status_code == 409
    assert (await other.diagnostics())["queued_groups"] == 1


async def test_a_lease_of_one_is_acknowledged_at_another(pair: Pair) -> None:
    one, other = pair
    await one.send(group(mark=1), group(mark=2))
    batch = await one.get("/batch", lease=60)
    assert (await other.raw_post(f"/v1/batches/{batch['batch_id']}/ack", {})).status_code == 200
    assert (await one.raw_post(f"/v1/batches/{batch['batch_id']}/ack", {})).status_code == 200
    assert (
        await one.get("/status")
        == await other.get("/status")
        == {"current_step": 1, "queue_size": 0}
    )


async def test_a_lease_of_one_that_expires_comes_back_at_another(pair: Pair) -> None:
    one, other = pair
    await one.send(group(mark=1), group(mark=2))
    batch = await one.get("/batch", lease=5)
    assert await other.batch() is None
    one.clock.now += 6
    again = await other.get("/batch", lease=5)
    assert (marks(again["batch"]), again["batch_id"] > batch["batch_id"]) == ([1, 2], True)
    assert (await one.raw_post(f"/v1/batches/{batch['batch_id']}/ack", {})).status_code == 409


async def test_a_trainer_may_name_the_batch_it_holds_to_another_server(pair: Pair) -> None:
    one, other = pair
    await one.send(*(group(mark=mark) for mark in (1, 2, 3, 4)))
    batch = await one.get("/batch", policy_version=0)
    following = await other.get("/batch", policy_version=0, after=batch["batch_id"])
    assert (marks(batch["batch"]), marks(following["batch"])) == ([1, 2], [3, 4])
    assert (batch["step"], following["step"]) == (1, 2)


async def test_an_environment_is_known_to_every_server_under_its_id(pair: Pair) -> None:
    one, other = pair
    ids = [await one.register_env(), await other.register_env(), await one.register_env()]
    assert len(set(ids)) == 3
    await other.send(group(mark=1, env_id=ids[0]))
    told = await other.status_env(ids[0])
    assert told["self_queue_size"] == 1
    assert told == await one.status_env(ids[0])
    names = {each["name"] for each in (await other.diagnostics())["environments"]}
    assert names == {"sums_0", "sums_1", "sums_2"}


async def test_a_reset_at_one_is_a_reset_of_all(pair: Pair) -> None:
    one, other = pair
    await one.send(group(mark=1), group(mark=2))
    await other.http.get("/reset_data")
    await until(lambda: run_of(one).registration is None)
    assert (await one.http.get("/batch")).json()["status"] == "error"
    await one.begin(wandb_group="another")
    await other.send(group(mark=3), group(mark=4))
    assert marks(await other.batch()) == [3, 4]


async def test_servers_outlive_a_postgresql_that_starts_again(
    pair: Pair, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was acknowledged before is served; what was asked meanwhile is refused with 503, to be
    sent again.
    """
    one, other = pair
    await one.send(group(mark=1))
    going_back: list[PostgresStore] = []
    load = PostgresStore.load

    def noted(store: PostgresStore) -> Remembered:
        going_back.append(store)
        return load(store)

    monkeypatch.setattr(PostgresStore, "load", noted)
    cluster.stop()
    asked = asyncio.create_task(other.raw_post("/scored_data", group(mark=2), Idempotency_Key="k"))
    await until(lambda: len(set(going_back)) == 2)
    cluster.start()
    refused = await asked
    assert (refused.status_code, "Look whether PostgreSQL runs there" in refused.text) == (
        503,
        True,
    )
    assert await other.post("/scored_data", group(mark=2), Idempotency_Key="k") == {
        "status": "received"
    }
    assert marks(await one.batch()) == [1, 2]
