"""A group posted twice under one key counts once (spec §5.3)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from .server_fixtures import ServerFixture, group, marks, opened


async def test_the_same_key_gets_the_first_reply_again(scene: ServerFixture) -> None:
    await scene.begin(batch_size=4)
    env_id = await scene.register_env(group_size=4)
    part = group(3, env_id=env_id)
    first = await scene.post("/scored_data", part, idempotency_key="a")
    await scene.post("/scored_data", group(1, env_id=env_id), idempotency_key="b")
    assert (
        await scene.post("/scored_data", part, idempotency_key="a")
        == first
        == {"status": "buffered", "buffer_size": 3}
    )
    spoiled = group(scores=[float("nan"), 0.0])
    aside = await scene.post("/scored_data", spoiled, idempotency_key="c")
    assert await scene.post("/scored_data", spoiled, idempotency_key="c") == aside
    assert (await scene.diagnostics())["groups_accepted"] == 2


async def test_the_same_key_with_another_body_is_refused(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.post("/scored_data", group(mark=1), idempotency_key="a")
    answer = await scene.raw_post("/scored_data", group(mark=2), idempotency_key="a")
    assert answer.status_code == 409
    assert "used before" in answer.json()["detail"]


async def test_of_two_keys_the_first_counts(scene: ServerFixture) -> None:
    await scene.begin()
    both = [("idempotency-key", "a"), ("Idempotency-Key", "b")]
    answer = await scene.http.post("/scored_data", json=group(mark=1), headers=both)
    assert answer.json() == {"status": "received"}
    assert (
        await scene.raw_post("/scored_data", group(mark=2), idempotency_key="a")
    ).status_code == 409
    await scene.post("/scored_data", group(mark=2), idempotency_key="b")
    assert (await scene.get("/status"))["queue_size"] == 2


async def test_a_list_as_a_whole_has_no_key(scene: ServerFixture) -> None:
    await scene.begin()
    answer = await scene.raw_post("/scored_data_list", [group(mark=1)], idempotency_key="a")
    assert answer.status_code == 422
    assert "halteres_key" in answer.text
    assert (await scene.get("/status"))["queue_size"] == 0


async def test_a_retry_beside_the_first_try_counts_once(scene: ServerFixture) -> None:
    await scene.begin()
    tries = [scene.post("/scored_data", group(mark=1), idempotency_key="a") for _ in range(8)]
    assert await asyncio.gather(*tries) == [{"status": "received"}] * 8
    assert (await scene.get("/status"))["queue_size"] == 1


async def test_groups_of_a_list_carry_their_keys(scene: ServerFixture) -> None:
    await scene.begin()
    both = [group(mark=1, halteres_key="a"), group(mark=2, halteres_key="b")]
    await scene.post("/scored_data_list", both)
    await scene.post("/scored_data_list", both)
    assert (await scene.get("/status"))["queue_size"] == 2
    assert "halteres_key" not in (await scene.batch() or [])[0]


@pytest.mark.parametrize("earlier", [True, False])
async def test_a_list_with_a_reused_key_takes_no_group_at_all(
    scene: ServerFixture, earlier: bool
) -> None:
    await scene.begin()
    reused = group(mark=9, halteres_key="a")
    if earlier:
        await scene.post("/scored_data_list", [reused])
    first = group(mark=1, halteres_key="b") if earlier else reused
    answer = await scene.raw_post(
        "/scored_data_list", [first, group(mark=2), group(mark=3, halteres_key="a")]
    )
    assert answer.status_code == 409
    assert (await scene.get("/status"))["queue_size"] == (1 if earlier else 0)
    assert (await scene.diagnostics())["groups_accepted"] == (1 if earlier else 0)


async def test_keys_are_known_after_a_restart_and_after_delivery(tmp_path: Path) -> None:
    database = tmp_path / "queue.sqlite"
    async with opened(database) as scene:
        await scene.begin()
        await scene.post("/scored_data", group(mark=1), idempotency_key="a")
        await scene.post("/scored_data", group(mark=2), idempotency_key="b")
        assert marks(await scene.batch()) == [1, 2]
    async with opened(database) as scene:
        assert await scene.post("/scored_data", group(mark=1), idempotency_key="a") == {
            "status": "received"
        }
        assert (await scene.get("/status"))["queue_size"] == 0
