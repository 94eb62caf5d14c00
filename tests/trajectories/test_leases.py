"""Batches that are lent: acknowledged, given back, expired, extended (spec §5.2: ours)."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from halteres.trajectories.server import clock_of
from halteres.trajectories.stores.sqlite import SqliteStore

from .server_fixtures import (
    ENV,
    TRAINER,
    Clock,
    Json,
    ServerFixture,
    ServerProcess,
    group,
    marks,
    opened,
)


async def lend(scene: ServerFixture, lease: float = 60, **params: Any) -> Json:
    """A batch under a lease."""
    return await scene.get("/batch", lease=lease, **params)


async def settle(scene: ServerFixture, what: str, batch: Json, **body: Any) -> tuple[int, Json]:
    """ack, nack or extend."""
    answer = await scene.raw_post(f"/v1/batches/{batch['batch_id']}/{what}", body)
    return answer.status_code, answer.json()


async def step(scene: ServerFixture) -> int:
    return (await scene.get("/status"))["current_step"]


async def begun(scene: ServerFixture, num_groups: int = 6) -> None:
    await scene.begin()
    await scene.send(*(group(mark=mark) for mark in range(1, num_groups + 1)))


def test_a_server_alone_goes_by_a_clock_that_never_jumps_and_several_by_the_one_of_their_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one server writes down, the others compare with their own time: it must not part for
    good.
    """
    with closing(SqliteStore(tmp_path / "queue.sqlite")) as store:
        monkeypatch.setattr(time, "time", lambda: 5.0)
        assert clock_of(store)() > 1e9
        monkeypatch.setattr(SqliteStore, "is_shared", True)
        assert clock_of(store)() == 5.0


async def test_a_lent_batch_counts_when_it_is_acknowledged(scene: ServerFixture) -> None:
    await begun(scene, 2)
    batch = await lend(scene)
    assert batch["lease_expires"] == scene.clock.now + 60
    # still work that waits
    assert await scene.get("/status") == {"current_step": 0, "queue_size": 2}
    assert await scene.batch() is None
    assert "all_leased" in await scene.reason_codes()
    assert (await settle(scene, "ack", batch))[0] == 200
    assert await scene.get("/status") == {"current_step": 1, "queue_size": 0}


async def test_an_acknowledgement_may_be_repeated(scene: ServerFixture) -> None:
    await begun(scene)
    batch = await lend(scene)
    first, again = await settle(scene, "ack", batch), await settle(scene, "ack", batch)
    assert first == again
    assert first[1] | {"batch_id": batch["batch_id"], "step": 1} == first[1]
    assert await step(scene) == 1


@pytest.mark.parametrize("how", ["nack", "expiry"])
async def test_a_batch_that_comes_back_answers_the_next_question_unchanged(
    scene: ServerFixture, how: str
) -> None:
    await begun(scene)
    batch = await lend(scene, 5)
    assert marks(batch["batch"]) == [1, 2]
    if how == "nack":
        assert (await settle(scene, "nack", batch))[0] == 200
    else:
        scene.clock.now += 5
    again = await lend(scene)
    assert again["batch"] == batch["batch"]
    assert again["batch_id"] != batch["batch_id"]
    assert marks(await scene.batch()) == [3, 4]


async def test_whoever_lost_its_lease_to_another_is_told(scene: ServerFixture) -> None:
    await begun(scene)
    late = await lend(scene, 5)
    scene.clock.now += 6
    again = await lend(scene)
    for what in ("ack", "nack", "extend"):
        status, answer = await settle(scene, what, late, lease=9)
        assert (status, answer["code"]) == (409, "lease_lost")
    assert (await settle(scene, "ack", again))[0] == 200
    assert await step(scene) == 1


@pytest.mark.parametrize("what", ["ack", "extend"])
async def test_an_expired_lease_that_nobody_took_is_still_its_holders(
    scene: ServerFixture, what: str
) -> None:
    await begun(scene)
    batch = await lend(scene, 5)
    scene.clock.now += 6
    assert (await settle(scene, what, batch, lease=9))[0] == 200
    assert marks(await scene.batch()) == [3, 4]


async def test_the_next_question_acknowledges_what_it_names(scene: ServerFixture) -> None:
    await begun(scene)
    batch = await lend(scene, 5)
    assert marks(await scene.batch(lease=5, after=batch["batch_id"])) == [3, 4]
    assert await step(scene) == 1


async def test_an_extended_lease_lasts_longer(scene: ServerFixture) -> None:
    await begun(scene, 2)
    batch = await lend(scene, 5)
    scene.clock.now += 4
    status, answer = await settle(scene, "extend", batch, lease=10)
    assert (status, answer["lease_expires"]) == (200, scene.clock.now + 10)
    scene.clock.now += 9
    assert await scene.batch() is None
    assert (await settle(scene, "ack", batch))[0] == 200


async def test_a_batch_that_never_was_is_not_found(scene: ServerFixture) -> None:
    await begun(scene)
    assert (await settle(scene, "ack", {"batch_id": 77}))[0] == 404


async def test_a_question_that_is_held_gets_the_batch_whose_lease_ends(tmp_path: Path) -> None:
    """Nobody posts or asks meanwhile: the server's own clock wakes it."""
    loop = asyncio.get_running_loop()

    class Real(Clock):
        def __call__(self) -> float:
            return loop.time()

    async with opened(tmp_path / "queue.sqlite", Real()) as scene, asyncio.timeout(10):
        await begun(scene, 2)
        await lend(scene, 0.2)
        assert marks(await scene.batch(wait=9)) == [1, 2]


JUMPING_CLOCK = """
import pathlib, time
real, jumped = time.time, pathlib.Path(__file__).with_name("jumped")
time.time = lambda: real() + 2 * 86400 * jumped.exists()
"""


def test_a_wall_clock_that_jumps_by_days_ends_no_lease_and_silences_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with closing(ServerProcess(tmp_path / "queue.sqlite")) as server:
        server.ask("/register", TRAINER)
        server.ask("/batch")
        server.ask("/register-env", ENV)
        for mark in range(1, 7):
            server.ask("/scored_data", group(mark=mark))
        first = server.ask("/batch?lease=60")
        (tmp_path / "jumped").touch()
        assert marks(server.ask("/batch?lease=60")["batch"]) == [3, 4]
        assert server.ask(f"/v1/batches/{first['batch_id']}/ack", {})["step"] == 1
        (env,) = server.ask("/v1/diagnostics")["environments"]
        assert env["connected"]


async def test_leases_survive_the_server(tmp_path: Path) -> None:
    database, clock = tmp_path / "queue.sqlite", Clock()
    async with opened(database, clock) as scene:
        await begun(scene)
        first, second = await lend(scene, 5), await lend(scene, 50)
    clock.now += 6
    async with opened(database, clock) as scene:
        assert marks(await scene.batch()) == marks(first["batch"])
        assert (await settle(scene, "ack", second))[0] == 200
        assert (await settle(scene, "ack", second))[0] == 200
        assert marks(await scene.batch()) == [5, 6]
        assert await step(scene) == 3
    async with opened(database, clock) as scene:
        assert (await settle(scene, "ack", second))[0] == 200


async def test_what_was_acknowledged_answers_no_question_again(scene: ServerFixture) -> None:
    """Its holder learnt from it, also where it asks for the next one without a lease."""
    await scene.register(max_staleness=2)
    await scene.send(*(group(mark=mark, policy_version=0) for mark in range(1, 5)))
    batch = await lend(scene, policy_version=0, after=0)
    assert (await settle(scene, "ack", batch))[0] == 200
    assert marks(await scene.batch(policy_version=0, after=0)) == [3, 4]


async def test_an_acknowledgement_may_be_repeated_however_long_ago_it_was(tmp_path: Path) -> None:
    """Memory knows the newest only; the store knows all."""
    database = tmp_path / "queue.sqlite"
    async with opened(database) as scene:
        await begun(scene)
        kept, returned = await lend(scene), await lend(scene)
        for what, batch in (("ack", kept), ("nack", returned)):
            assert (await settle(scene, what, batch))[0] == 200
        first = await settle(scene, "ack", kept)
        await lend(scene)
    async with opened(database) as scene:
        scene.app.state.service.state.settled.clear()
        assert await settle(scene, "ack", kept) == first
        status, told = await settle(scene, "ack", returned)
        assert (status, "served to another" in told["detail"]) == (409, True)
        assert (await settle(scene, "ack", {"batch_id": 99}))[0] == 404


async def test_two_trainers_hold_different_batches(scene: ServerFixture) -> None:
    await begun(scene)
    async with asyncio.timeout(10):
        batches = await asyncio.gather(*(lend(scene) for _ in range(3)))
    assert sorted(marks(batch["batch"]) for batch in batches) == [[1, 2], [3, 4], [5, 6]]
    for batch in reversed(batches):
        assert (await settle(scene, "ack", batch))[0] == 200
    assert await step(scene) == 3


async def test_a_batch_that_came_back_and_fits_no_more_is_taken_apart(scene: ServerFixture) -> None:
    """A trainer that registered again with another batch size: the groups queue at their old
    place.
    """
    await begun(scene, 4)
    batch = await lend(scene)
    assert (await settle(scene, "nack", batch))[0] == 200
    await scene.register(batch_size=6)
    assert marks(await scene.batch()) == [1, 2, 3]
    assert (await settle(scene, "ack", batch))[0] == 409


async def test_groups_that_grew_too_old_in_a_returned_batch_are_set_aside(
    scene: ServerFixture,
) -> None:
    await scene.begin(max_staleness=1)
    await scene.send(group(mark=1, policy_version=0), group(mark=2, policy_version=1))
    batch = await lend(scene, policy_version=0)
    assert marks(batch["batch"]) == [1, 2]
    await scene.send(group(mark=3, policy_version=2))
    assert (await settle(scene, "nack", batch))[0] == 200
    assert marks(await scene.batch(policy_version=2)) == [2, 3]
    assert (await scene.diagnostics())["set_aside"] == {"stale": 1}


async def test_on_policy_environments_pause_while_a_batch_is_lent(scene: ServerFixture) -> None:
    await scene.begin(max_staleness=0)
    env_id = await scene.register_env()
    assert (await scene.status_env(env_id))["allowance"] == 2
    await scene.send(group(mark=1, policy_version=0), group(mark=2, policy_version=0))
    batch = await lend(scene, policy_version=0)
    assert (await scene.status_env(env_id))["allowance"] == 0
    assert (await settle(scene, "ack", batch))[0] == 200
    assert (await scene.status_env(env_id))["allowance"] == 0
    assert await scene.batch(policy_version=1, lease=5) is None
    assert (await scene.status_env(env_id))["allowance"] == 2


async def test_a_leased_batch_that_is_trained_on_leaves_room_for_one_that_waits(
    scene: ServerFixture,
) -> None:
    await scene.begin(max_staleness=1)
    env_id = await scene.register_env()
    await scene.send(group(mark=1, policy_version=0), group(mark=2, policy_version=0))
    assert (await scene.status_env(env_id))["allowance"] == 0  # a batch lies ready
    await lend(scene, policy_version=0)
    assert (await scene.status_env(env_id))["allowance"] == 2


async def test_batches_come_back_oldest_first_however_often_they_were_handed_out(
    scene: ServerFixture,
) -> None:
    await begun(scene)
    first, second = await lend(scene), await lend(scene)
    for batch in (first, second):
        await settle(scene, "nack", batch)
    again = await lend(scene)
    assert marks(again["batch"]) == [1, 2]
    await settle(scene, "nack", again)
    assert [marks(await scene.batch()) for _ in range(3)] == [[1, 2], [3, 4], [5, 6]]


async def test_what_is_lent_counts_for_every_other_environment(scene: ServerFixture) -> None:
    """The original's formula looks at the largest group that waits: groups that are out wait,
    too.
    """
    await scene.begin()
    own, other = await scene.register_env(), await scene.register_env()
    await scene.send(*(group(env_id=own) for _ in range(6)))
    seen = [(await scene.status_env(other))["queue_size"]]
    for _ in range(3):
        await lend(scene)
        seen.append((await scene.status_env(other))["queue_size"])
    assert seen == [6] * 4
