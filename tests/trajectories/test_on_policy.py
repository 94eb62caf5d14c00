"""Policy versions: parking, staleness, lost replies, resumed trainers, allowances (DESIGN §2, spec
§5.8).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from .server_fixtures import ServerFixture, group, marks, opened

PAUSE = {
    "unallocated_fraction": 0,
    "queue_size": 0,
    "self_queue_size": 0,
    "max_group_size": 1,
    "allowance": 0,
}


def tagged(version: Any, mark: int = 7, **extra: Any) -> dict[str, Any]:
    return group(2, mark, policy_version=version, **extra)


async def begin(scene: ServerFixture, **changes: Any) -> int:
    """An on-policy run with one environment; gives its id."""
    await scene.begin(**{"max_staleness": 0, "run_id": "r1", **changes})
    return await scene.register_env()


async def is_paused(scene: ServerFixture, env_id: int) -> bool:
    status = await scene.status_env(env_id)
    return all(status[name] == value for name, value in PAUSE.items())


async def test_environments_pause_from_a_delivery_until_the_trainer_asks_with_a_new_version(
    scene: ServerFixture,
) -> None:
    env_id = await begin(scene)
    assert (await scene.status_env(env_id))["allowance"] == 2
    await scene.send(tagged(0, env_id=env_id))
    assert (await scene.status_env(env_id))["allowance"] == 1
    await scene.send(tagged(0, env_id=env_id))
    assert await is_paused(scene, env_id)  # a batch lies ready; more would be too old
    assert not (await scene.diagnostics())["parked"]
    await scene.batch(policy_version=0)
    assert await is_paused(scene, env_id)
    assert (await scene.diagnostics())["parked"]
    assert "paused" in await scene.reason_codes()
    assert (await scene.status_env(env_id))["current_step"] == 1
    assert await scene.batch(policy_version=1) is None
    assert (await scene.status_env(env_id))["allowance"] == 2
    assert not (await scene.diagnostics())["parked"]


@pytest.mark.parametrize("mode", ["trainer without versions", "unbounded"])
async def test_a_trainer_without_a_bound_parks_nobody(scene: ServerFixture, mode: str) -> None:
    await scene.begin()
    env_id = await scene.register_env()
    asks = {"policy_version": 0} if mode == "unbounded" else {}
    await scene.send(*(tagged(0) for _ in range(4)))
    await scene.batch(**asks)
    await scene.batch(**asks)
    assert (await scene.diagnostics())["set_aside"] == {}
    assert (await scene.status_env(env_id))["allowance"] == 2
    assert (await scene.get("/status"))["current_step"] == 2


async def test_a_bound_without_a_version_in_the_question_goes_by_the_step(
    scene: ServerFixture,
) -> None:
    await scene.register(max_staleness=0)
    await scene.batch()
    env_id = await scene.register_env()
    await scene.send(tagged(0, 1), tagged(0, 2), tagged(0, 3))
    assert marks(await scene.batch()) == [1, 2]
    assert await is_paused(scene, env_id)
    assert await scene.batch() is None
    assert (await scene.diagnostics())["set_aside"] == {"stale": 1}


async def test_the_same_version_again_gets_the_same_batch_and_counts_once(
    scene: ServerFixture,
) -> None:
    """The reply was lost, or the trainer died before its step: nothing was trained on that
    batch.
    """
    await begin(scene)
    await scene.send(tagged(0, 1), tagged(0, 2), tagged(0, 3), tagged(0, 4))
    first = await scene.get("/batch", policy_version=0)
    again = await scene.get("/batch", policy_version=0)
    assert first == again
    assert (first["step"], (await scene.get("/status"))["current_step"]) == (1, 1)
    assert (await scene.diagnostics())["parked"]


async def test_a_trainer_that_holds_its_batch_may_ask_for_more_of_the_same_version(
    scene: ServerFixture,
) -> None:
    await begin(scene)
    await scene.send(tagged(0, 1), tagged(0, 2), tagged(0, 3), tagged(0, 4))
    first = await scene.get("/batch", policy_version=0)
    more = await scene.get("/batch", policy_version=0, after=first["batch_id"])
    assert (marks(first["batch"]), marks(more["batch"])) == ([1, 2], [3, 4])
    lost = await scene.get("/batch", policy_version=0, after=first["batch_id"])
    assert lost == more


@pytest.mark.parametrize(
    ("max_staleness", "version", "delivered"),
    [(0, 5, [5]), (1, 5, [4, 5]), (2, 5, [3, 4, 5]), (None, 5, [3, 4, 5])],
)
async def test_groups_beyond_the_bound_are_set_aside_and_counted(
    scene: ServerFixture, max_staleness: int | None, version: int, delivered: list[int]
) -> None:
    await scene.register(max_staleness=max_staleness, batch_size=2 * len(delivered))
    await scene.send(tagged(3, 3), tagged(4, 4), tagged(5, 5))
    assert marks(await scene.batch(policy_version=version)) == delivered
    stale = 3 - len(delivered)
    assert (await scene.diagnostics())["set_aside"] == ({"stale": stale} if stale else {})


async def test_staleness_goes_by_the_oldest_token(scene: ServerFixture) -> None:
    await scene.register(max_staleness=1)
    await scene.send(tagged([[4, 5], [3, 5]], 1), tagged([[4, 5], [5, 5]], 2), tagged(5, 3))
    assert marks(await scene.batch(policy_version=5)) == [2, 3]


async def test_untagged_groups_are_of_unknown_age_and_served(scene: ServerFixture) -> None:
    await begin(scene)
    await scene.send(group(mark=1), group(mark=2))
    assert marks(await scene.batch(policy_version=9)) == [1, 2]


async def test_a_group_too_old_on_arrival_is_told_so(scene: ServerFixture) -> None:
    env_id = await begin(scene)
    await scene.batch(policy_version=3)
    answer = await scene.post("/scored_data", tagged(2, env_id=env_id))
    assert answer["set_aside"] == {
        "code": "stale",
        "why": "Sampled by version 2; the trainer is at 3 and allows a lag of 0.",
    }
    assert (await scene.status_env(env_id))["allowance"] == 2
    (env,) = (await scene.diagnostics())["environments"]
    assert (env["accepted"], env["rejected"]) == (0, 1)


async def test_a_trainer_back_at_a_checkpoint_gets_nothing_of_later_weights(
    scene: ServerFixture,
) -> None:
    env_id = await begin(scene)
    await scene.send(*(tagged(0) for _ in range(2)))
    await scene.batch(policy_version=0)
    await scene.batch(policy_version=3)
    await scene.send(*(tagged(3, 3) for _ in range(3)))
    assert marks(await scene.batch(policy_version=3)) == [3, 3]
    await scene.register(max_staleness=0, run_id="r1", starting_step=1)
    assert (await scene.get("/status"))["current_step"] == 1
    assert await is_paused(scene, env_id)
    assert await scene.batch(policy_version=1) is None
    await scene.send(tagged(3, 33), tagged(1, 1), tagged(1, 2))
    assert marks(await scene.batch(policy_version=1)) == [1, 2]
    assert (await scene.diagnostics())["set_aside"] == {"ahead": 2}
    assert (await scene.get("/status"))["current_step"] == 2


async def test_a_late_question_of_an_older_version_throws_nothing_away(
    scene: ServerFixture,
) -> None:
    await begin(scene, max_staleness=2)
    await scene.batch(policy_version=3)
    await scene.send(tagged(3, 1))
    assert await scene.batch(policy_version=2) is None
    await scene.send(tagged(3, 2))
    assert marks(await scene.batch(policy_version=3)) == [1, 2]
    assert (await scene.diagnostics())["set_aside"] == {}


async def test_a_trainer_that_registers_with_an_earlier_step_leaves_later_weights_behind_until_its_next_batch(
    scene: ServerFixture,
) -> None:
    await begin(scene, max_staleness=2)
    for version in (0, 1):
        await scene.send(tagged(version), tagged(version))
        assert await scene.batch(policy_version=version)
    await scene.send(tagged(2, 20))
    await scene.register(max_staleness=2, run_id="r1", starting_step=1)
    for _ in range(2):  # the second question is as far back as the first
        assert await scene.batch(policy_version=1, after=1) is None
        await scene.send(tagged(2, 21))
    await scene.send(tagged(1, 1), tagged(1, 2), tagged(1, 3))
    assert marks(await scene.batch(policy_version=1, after=1)) == [1, 2]
    assert (await scene.diagnostics())["set_aside"] == {"ahead": 3}
    await scene.send(tagged(2, 4))  # by weights of the trainer that went on
    assert marks(await scene.batch(policy_version=1)) == [3, 4]


async def test_a_trainer_that_gets_its_batch_again_after_a_crash_leaves_later_weights_behind(
    scene: ServerFixture,
) -> None:
    await begin(scene, max_staleness=2)
    await scene.send(tagged(0, 1), tagged(0, 2))
    await scene.batch(policy_version=0, after=0)
    await scene.send(tagged(1, 3))
    await scene.register(max_staleness=2, run_id="r1", starting_step=0)
    assert marks(await scene.batch(policy_version=0, after=0)) == [1, 2]
    assert (await scene.diagnostics())["set_aside"] == {"ahead": 1}


async def test_nobody_stays_parked_whom_a_registration_frees(scene: ServerFixture) -> None:
    env_id = await begin(scene)
    await scene.send(tagged(0), tagged(0))
    await scene.batch(policy_version=0)
    await scene.register(max_staleness=0, run_id="r1", starting_step=1)
    assert (await scene.diagnostics())["parked"]
    await scene.register(max_staleness=2, run_id="r1", starting_step=1)
    assert not (await scene.diagnostics())["parked"]
    assert (await scene.status_env(env_id))["allowance"] > 0


async def test_an_environment_may_ask_with_which_version_the_trainer_asked_for_a_batch(
    tmp_path: Path,
) -> None:
    """Also before there were batches, and after a restart of the server; not before the trainer has
    asked.
    """

    async def asked_version(scene: ServerFixture, asked_for: int) -> int | None:
        return (await scene.status_env(0, asked_for=asked_for)).get("asked_version")

    async with opened(tmp_path / "queue.sqlite") as scene:
        await scene.register(max_staleness=8, run_id="r1", starting_step=3)
        assert await scene.batch(policy_version=5, after=0) is None
        env_id = await scene.register_env()
        assert env_id == 0
        assert "asked_version" not in await scene.status_env(env_id)
        assert [await asked_version(scene, step) for step in (-1, 2, 3, 4)] == [5, 5, 5, None]
        await scene.send(tagged(5), tagged(5))
        first = await scene.get("/batch", policy_version=5, after=0)
        assert [await asked_version(scene, step) for step in (3, 4)] == [5, None]
        # the batch taught nothing
        assert await scene.batch(policy_version=5, after=first["batch_id"]) is None
        assert [await asked_version(scene, step) for step in (3, 4, 5)] == [5, 5, None]
        await scene.send(tagged(5), tagged(5))
        await scene.get("/batch", policy_version=7, after=first["batch_id"])
    async with opened(tmp_path / "queue.sqlite") as scene:
        assert [await asked_version(scene, step) for step in (3, 4, 5)] == [5, 7, None]


async def test_as_many_batches_may_lie_ready_as_the_bound_allows_versions_for(
    scene: ServerFixture,
) -> None:
    """A trainer that makes four versions of a batch cannot take two batches of weights that may lag
    four behind.
    """
    await scene.begin(max_staleness=4, updates_per_batch=4, batch_size=4)
    env_id = await scene.register_env()
    assert (await scene.status_env(env_id))["allowance"] == 2
    await scene.register(max_staleness=8, updates_per_batch=4, batch_size=4)
    assert (await scene.status_env(env_id))["allowance"] == 4


async def test_a_batch_tells_how_many_groups_were_set_aside_as_too_old(
    scene: ServerFixture,
) -> None:
    await begin(scene, max_staleness=1)
    await scene.send(tagged(0), tagged(0))
    first = await scene.get("/batch", policy_version=0, after=0)
    await scene.send(tagged(0), tagged(2), tagged(2))
    second = await scene.get("/batch", policy_version=2, after=first["batch_id"])
    assert (first["num_stale"], second["num_stale"]) == (0, 1)


# -- who asks for the last batch again: the table in `delivering.again`

FIRST, SECOND, THIRD = [1, 2], [3, 4], [5, 6]


async def served(scene: ServerFixture, *afters: int | None, **changes: Any) -> None:
    """Batches of version 0 to questions that held those; groups for one more wait."""
    await scene.register(**{"max_staleness": 2, "run_id": "r1", **changes})
    await scene.send(*(tagged(0, mark) for mark in range(1, 7)))
    for after in afters:
        assert await scene.batch(policy_version=0, **({} if after is None else {"after": after}))


@pytest.mark.parametrize(
    ("afters", "after", "version", "answer"),
    [
        ([None], None, 0, SECOND),  # a plain client of a run that is not on-policy
        ([None], 0, 0, FIRST),
        ([0], 0, 0, FIRST),
        ([0], 0, 1, SECOND),  # it holds nothing, and yet has trained
        ([0], 1, 0, SECOND),
        ([0, 1], 1, 0, SECOND),
        ([0, 1], 1, 2, SECOND),  # its reply was lost, and it trained on what it held
        ([0, 1], 1, 3, []),  # too old by now
        ([0, 1], 2, 0, THIRD),
        ([0, 1], 0, 0, SECOND),  # a trainer that begins anew
        ([0, 1], 0, 1, THIRD),
        ([0, None], 1, 0, THIRD),  # the last was another trainer's
        ([0, None], 1, 1, THIRD),
    ],
)
async def test_the_batch_that_came_last_answers_whoever_never_got_it(
    scene: ServerFixture,
    afters: list[int | None],
    after: int | None,
    version: int,
    answer: list[int],
) -> None:
    await served(scene, *afters)
    before = (await scene.get("/status"))["current_step"]
    named = {} if after is None else {"after": after}
    assert marks(await scene.batch(policy_version=version, **named)) == answer
    fresh = bool(answer) and answer[0] > 2 * len(afters)
    assert (await scene.get("/status"))["current_step"] == before + fresh


@pytest.mark.parametrize(
    ("starting_step", "version", "answer"),
    [
        (0, 0, FIRST),  # it died before the step
        (1, 1, SECOND),  # after it
        (1, 0, SECOND),  # after it, and before its weights were published
        (0, 1, SECOND),  # its weights say that it did the step
    ],
)
async def test_a_trainer_that_registers_again_gets_its_last_batch_only_if_it_did_not_train_on_it(
    scene: ServerFixture, starting_step: int, version: int, answer: list[int]
) -> None:
    await served(scene, 0)
    await scene.register(max_staleness=2, run_id="r1", starting_step=starting_step)
    assert marks(await scene.batch(policy_version=version, after=0)) == answer


async def test_a_batch_that_came_at_last_is_known_by_the_version_that_it_came_to(
    scene: ServerFixture,
) -> None:
    """Its first reply was lost; then the trainer got it at a later version, and died before the
    step.
    """
    await served(scene, 0, 1)
    assert marks(await scene.batch(policy_version=1, after=1)) == SECOND
    await scene.register(max_staleness=2, run_id="r1", starting_step=1)
    assert marks(await scene.batch(policy_version=1, after=0)) == SECOND
    assert (await scene.get("/status"))["current_step"] == 2


@pytest.mark.parametrize(
    "changes", [{"batch_size": 2}, {"max_staleness": 0, "starting_step": 0}, {"run_id": "r2"}]
)
async def test_a_batch_that_fits_the_registration_no_more_is_not_served_again(
    scene: ServerFixture, changes: dict[str, Any]
) -> None:
    await scene.register(max_staleness=2, run_id="r1")
    await scene.send(tagged(1, 1), tagged(0, 2), tagged(0, 3), tagged(0, 4))
    assert marks(await scene.batch(policy_version=0, after=0)) == [1, 2]
    await scene.register(**{"max_staleness": 2, "run_id": "r1", **changes})
    assert 1 not in marks(await scene.batch(policy_version=0, after=0))


async def test_a_lost_reply_is_known_to_the_next_server(tmp_path: Path) -> None:
    database = tmp_path / "queue.sqlite"
    async with opened(database) as scene:
        await served(scene, 0, 1)
    async with opened(database) as scene:
        assert await scene.batch(policy_version=1, after=7) != await scene.batch(
            policy_version=1, after=1
        )
    async with opened(database) as scene:
        assert marks(await scene.batch(policy_version=1, after=7)) == THIRD


async def test_a_trainer_that_died_before_its_step_gets_its_batch_again(
    scene: ServerFixture,
) -> None:
    await begin(scene)
    await scene.send(tagged(0, 1), tagged(0, 2))
    await scene.batch(policy_version=0)
    await scene.register(max_staleness=0, run_id="r1", starting_step=0)
    assert (await scene.get("/status"))["current_step"] == 0
    assert marks(await scene.batch(policy_version=0)) == [1, 2]
    assert (await scene.get("/status"))["current_step"] == 1


async def test_an_async_trainer_may_ask_while_newer_groups_arrive(scene: ServerFixture) -> None:
    await scene.register(max_staleness=1)
    await scene.send(tagged(6, 1), tagged(5, 2))
    assert marks(await scene.batch(policy_version=5)) == [1, 2]


async def test_the_old_client_with_a_minimum_share_is_held_during_a_pause(
    scene: ServerFixture,
) -> None:
    """Its worker count ignores the figures of a pause, so the reply waits (spec §3)."""
    await begin(scene)
    env_id = await scene.register_env(min_batch_allocation=0.5)
    await scene.send(tagged(0, env_id=env_id), tagged(0, env_id=env_id))
    await scene.batch(policy_version=0)
    async with asyncio.timeout(5):
        poll = asyncio.create_task(scene.status_env(env_id))
        await scene.batch(policy_version=1, wait=0.01)
        assert (await poll)["allowance"] > 0


async def test_one_environment_is_allowed_exactly_what_the_batch_lacks(
    scene: ServerFixture,
) -> None:
    await scene.begin(max_staleness=0, batch_size=12)
    env_id = await scene.register_env(group_size=2)
    for queued in range(6):
        assert (await scene.status_env(env_id))["allowance"] == 6 - queued
        await scene.send(tagged(0, env_id=env_id))
    assert (await scene.status_env(env_id))["allowance"] == 0


async def test_several_environments_share_what_the_batch_lacks(scene: ServerFixture) -> None:
    await scene.begin(max_staleness=0, batch_size=12)
    envs = [await scene.register_env() for _ in range(4)]
    for env_id in envs:
        await scene.status_env(env_id)
    # 6 in all, rounded up
    assert [(await scene.status_env(env_id))["allowance"] for env_id in envs] == [2, 2, 2, 2]
    scene.clock.now += 6  # three have gone silent
    assert (await scene.status_env(envs[0]))["allowance"] == 6


async def test_sizes_that_need_each_other_are_never_starved(scene: ServerFixture) -> None:
    await scene.begin(max_staleness=0, batch_size=24)
    six, eight = await scene.register_env(group_size=6), await scene.register_env(group_size=8)
    sizes = {six: 6, eight: 8}
    for _ in range(40):
        if (await scene.diagnostics())["batch_ready"]:
            break
        for env_id, size in sizes.items():
            if (await scene.status_env(env_id))["allowance"]:
                await scene.send(group(size, env_id=env_id))
    assert await scene.batch(policy_version=0)


async def test_a_size_that_can_never_fill_a_batch_is_allowed_nothing_once_it_is_full(
    scene: ServerFixture,
) -> None:
    await scene.begin(max_staleness=0, batch_size=24)
    env_id = await scene.register_env(group_size=16)
    assert (await scene.status_env(env_id))["allowance"] == 1
    await scene.send(group(16, env_id=env_id))
    assert (await scene.status_env(env_id))["allowance"] == 0
    assert "size_cannot_pack" in await scene.reason_codes()
