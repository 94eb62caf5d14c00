"""What an operator may choose, seen from the outside: each rule of `Rules`, and the defaults beside
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from halteres.trajectories import service as service_module
from halteres.trajectories.options import Options, Rules

from .server_fixtures import ServerFixture, group, marks, opened

Ruled = Callable[..., AbstractAsyncContextManager[ServerFixture]]


@pytest.fixture
async def ruled(tmp_path: Path) -> AsyncIterator[Ruled]:
    """Opens a server under rules."""

    def opening(**rules: Any) -> AbstractAsyncContextManager[ServerFixture]:
        return opened(tmp_path / "queue.sqlite", options=Options(database="", rules=Rules(**rules)))

    yield opening


async def is_paused(scene: ServerFixture, env_id: int) -> bool:
    """In words that also an unmodified client of the original takes for a pause."""
    told = await scene.status_env(env_id)
    return (
        told["unallocated_fraction"],
        told["queue_size"],
        told["self_queue_size"],
        told["max_group_size"],
    ) == (
        0.0,
        0,
        0,
        1,
    )


async def test_environments_pause_while_as_many_batches_wait_as_allowed(ruled: Ruled) -> None:
    async with ruled(max_queue_batches=2) as scene:
        await scene.begin()
        env_id = await scene.register_env()
        for mark in range(1, 5):
            assert not await is_paused(scene, env_id)
            await scene.send(group(mark=mark))
        assert await is_paused(scene, env_id)
        assert "queue_full" not in await scene.reason_codes()  # a batch is ready
        lent = await scene.get("/batch", lease=60)
        assert await is_paused(scene, env_id)  # what is lent still waits
        await scene.post(f"/v1/batches/{lent['batch_id']}/ack", {})
        assert not await is_paused(scene, env_id)


async def test_posts_wait_for_room_before_they_are_refused(
    ruled: Ruled, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"messages": [[{"role": "user", "content": "x" * 200_000}]] * 2}
    async with ruled(max_queue_bytes=1024 * 1024) as scene, asyncio.timeout(10):
        await scene.begin(batch_size=2)
        env_id = await scene.register_env()
        await scene.send(group(mark=1, **said), group(mark=2, **said))
        assert await is_paused(scene, env_id)
        held = asyncio.create_task(scene.raw_post("/scored_data", group(mark=3, **said)))
        while (await scene.get("/status"))["queue_size"] == 2 and not held.done():
            assert marks(await scene.batch()) == [1]
        assert (await held).json() == {"status": "received"}
        monkeypatch.setattr(service_module, "FULL_HOLD_S", 0.05)
        refused = await scene.raw_post("/scored_data", group(mark=4, **said))
        assert (refused.status_code, refused.json()["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) > 0
        assert marks(await scene.batch()) == [2]
        assert marks(await scene.batch()) == [3]
        assert await scene.batch() is None


async def test_strict_mode_refuses_what_quarantine_sets_aside(ruled: Ruled) -> None:
    spoilt = group(mark=1, scores=[float("nan"), 0.0])
    async with ruled(validation="strict") as scene:
        await scene.begin()
        for bad, where in (
            (spoilt, "not_finite"),
            (group(6), "group_exceeds_batch"),
            (group(scores=[1.0]), "lengths"),
        ):
            refused = await scene.raw_post("/scored_data", bad)
            assert (refused.status_code, refused.json()["detail"][0]["type"]) == (422, where)
        refused = await scene.raw_post("/scored_data_list", [group(mark=1), group(6)])
        assert refused.json()["detail"][0]["loc"][:2] == ["body", 1]
        assert (await scene.diagnostics())["groups_accepted"] == 0  # all or none
        await scene.send(group(mark=1), group(mark=2))
        assert marks(await scene.batch()) == [1, 2]


async def test_strict_mode_holds_the_conventions_of_masks_and_logprobs(ruled: Ruled) -> None:
    async with ruled(validation="strict") as scene:
        await scene.begin(max_token_len=3)
        for bad in (
            group(inference_logprobs=[[0.0, -0.5, -0.25]] * 2),  # context carries the sentinel 1.0
            group(inference_logprobs=[[1.0, 1.0, -0.25]] * 2),  # ... and nothing else does
            group(inference_logprobs=[[1.0, 0.5, -0.25]] * 2),
            group(mark=-4),
            group(tokens=[[7, 5, 6, 8]] * 2, masks=[[-100, 5, 6, 8]] * 2, inference_logprobs=None),
        ):
            assert (await scene.raw_post("/scored_data", bad)).status_code == 422


async def test_untagged_groups_are_set_aside_where_versions_are_asked_for(ruled: Ruled) -> None:
    async with ruled(require_version=True) as scene:
        await scene.begin()
        answer = await scene.post("/scored_data", group())
        assert answer["set_aside"]["code"] == "untagged"
        await scene.send(group(mark=1, policy_version=0), group(mark=2, policy_version=0))
        assert marks(await scene.batch()) == [1, 2]


async def test_the_servers_staleness_holds_where_the_trainer_names_none(ruled: Ruled) -> None:
    async with ruled(max_staleness=1) as scene:
        await scene.register()
        await scene.send(*(group(mark=version, policy_version=version) for version in range(1, 5)))
        assert marks(await scene.batch(policy_version=4)) == [3, 4]
        assert (await scene.diagnostics())["set_aside"] == {"stale": 2}


async def test_an_environment_is_silent_after_the_operators_time(ruled: Ruled) -> None:
    async with ruled(env_timeout_s=5) as scene:
        await scene.begin()
        env_id = await scene.register_env(min_batch_allocation=0.5)
        await scene.send(group(mark=1), group(mark=2))
        assert await scene.batch() is None
        scene.clock.now += 6
        assert marks(await scene.batch()) == [1, 2]
        await scene.status_env(env_id)
        (env,) = (await scene.diagnostics())["environments"]
        assert env["connected"]


async def test_a_starved_environment_is_waited_for_as_long_as_the_operator_says(
    ruled: Ruled,
) -> None:
    async with ruled(min_share_patience_s=10) as scene:
        await scene.begin()
        env_id = await scene.register_env(min_batch_allocation=0.5)
        await scene.send(group(mark=1), group(mark=2))
        assert await scene.batch() is None
        scene.clock.now += 9
        await scene.status_env(env_id)
        assert await scene.batch() is None
        scene.clock.now += 2
        await scene.status_env(env_id)
        assert marks(await scene.batch()) == [1, 2]


@pytest.mark.parametrize(("window", "accepted"), [(0.0, 2), (10.0, 1)])
async def test_clients_without_keys_may_be_known_by_what_they_send(
    ruled: Ruled, window: float, accepted: int
) -> None:
    async with ruled(same_content_s=window) as scene:
        await scene.begin()
        env_id = await scene.register_env()
        await scene.send(group(env_id=env_id), group(env_id=env_id))
        assert (await scene.diagnostics())["groups_accepted"] == accepted
        scene.clock.now += 9
        await scene.send(group(env_id=env_id))
        scene.clock.now += 21
        await scene.send(group(env_id=env_id))
        assert (await scene.diagnostics())["groups_accepted"] == (4 if not window else 2)


@pytest.mark.parametrize("path", ["/status-env", "/scored_data"])
async def test_our_clients_are_told_that_nobody_knows_them(scene: ServerFixture, path: str) -> None:
    """Others are adopted: they would not understand."""
    await scene.begin()
    ours = {"Halteres-Client": "0.1.0"}
    method, body = ("GET", {"env_id": 5}) if path == "/status-env" else ("POST", group(env_id=5))
    told = await scene.http.request(method, path, json=body, headers=ours)
    assert (told.status_code, told.json()["code"]) == (410, "environment_unknown")
    assert (await scene.diagnostics())["environments"] == []
    assert (await scene.http.request(method, path, json=body)).status_code == 200
    assert len((await scene.diagnostics())["environments"]) == 1


async def test_a_full_queue_that_makes_no_batch_pauses_nobody(ruled: Ruled) -> None:
    """What it lacks may be just what an environment is about to make."""
    async with ruled(max_queue_batches=1) as scene:
        await scene.begin(batch_size=24)
        large = await scene.register_env(group_size=16)
        small = await scene.register_env(group_size=8)
        await scene.send(group(16, env_id=large), group(16, env_id=large))
        assert await scene.batch() is None
        for env_id in (large, small):
            assert not await is_paused(scene, env_id)
            assert (await scene.status_env(env_id))["allowance"] > 0
        await scene.send(group(8, env_id=small))
        assert await is_paused(scene, small)
        assert len(await scene.batch() or ()) == 2


async def test_a_share_of_groups_that_fit_no_batch_holds_nobody_back_and_is_named(
    ruled: Ruled,
) -> None:
    async with ruled() as scene:
        await scene.begin()
        await scene.register_env(group_size=8, min_batch_allocation=0.5)
        assert "group_exceeds_batch" in await scene.reason_codes()
        await scene.send(group(mark=1), group(mark=2))
        assert marks(await scene.batch()) == [1, 2]


async def test_the_same_content_counts_once_however_it_is_written(ruled: Ruled) -> None:
    async with ruled(same_content_s=10) as scene:
        await scene.begin()
        await scene.send(group(env_id=0, sent_at=1))
        answer = await scene.post(
            "/scored_data_list", [group(env_id=0, sent_at=2), group(mark=8, env_id=0)]
        )
        assert answer["groups_processed"] == 2
        assert (await scene.get("/status"))["queue_size"] == 2


async def test_a_key_that_is_known_is_answered_though_the_queue_is_full(ruled: Ruled) -> None:
    said = {"messages": [[{"role": "user", "content": "x" * 300_000}]] * 2}
    async with ruled(max_queue_bytes=1024 * 1024) as scene, asyncio.timeout(10):
        await scene.begin(batch_size=64)
        first = await scene.post("/scored_data", group(mark=1, **said), idempotency_key="a")
        assert await scene.post("/scored_data", group(mark=1, **said), idempotency_key="a") == first
        assert "queue_full" not in await scene.reason_codes()
