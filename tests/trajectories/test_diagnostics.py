"""Why there is no batch, in sentences (spec §5.9)."""

from __future__ import annotations

from typing import Any

import pytest

from .server_fixtures import ServerFixture, group, num_sequences


async def sentences(scene: ServerFixture) -> dict[str, str]:
    return {reason["code"]: reason["sentence"] for reason in (await scene.diagnostics())["reasons"]}


async def test_nobody_has_registered(scene: ServerFixture) -> None:
    found = await scene.diagnostics()
    assert (found["registered"], found["batch_ready"], found["first_group_at"]) == (
        False,
        False,
        None,
    )
    assert [reason["code"] for reason in found["reasons"]] == ["not_registered"]


async def test_the_trainer_has_not_asked_yet(scene: ServerFixture) -> None:
    await scene.register()
    said = await sentences(scene)
    assert "not_started" in said
    assert said["too_few_sequences"] == "0 of 4 sequences are queued. No environment is connected."


async def test_too_few_sequences(scene: ServerFixture) -> None:
    await scene.begin()
    env_id = await scene.register_env()
    await scene.send(group(2, env_id=env_id))
    assert await sentences(scene) == {"too_few_sequences": "2 of 4 sequences are queued."}
    await scene.send(group(2, env_id=env_id))
    found = await scene.diagnostics()
    assert (found["batch_ready"], found["reasons"]) == (True, [])


async def test_sizes_that_can_never_make_a_batch(scene: ServerFixture) -> None:
    await scene.begin(batch_size=24)
    env_id = await scene.register_env(group_size=16)
    await scene.send(group(16, env_id=env_id), group(16, env_id=env_id))
    said = await sentences(scene)
    assert said == {
        "size_cannot_pack": (
            "Groups of 16 sequences never add up to a batch of 24; choose sizes that do."
        )
    }


async def test_sizes_that_do_not_make_a_batch_yet(scene: ServerFixture) -> None:
    await scene.begin(batch_size=24)
    for size in (6, 8):
        env_id = await scene.register_env(group_size=size)
        await scene.send(*(group(size, env_id=env_id) for _ in range(2)))
    assert list(await sentences(scene)) == ["size_cannot_pack"]


async def test_what_was_set_aside_is_counted_per_reason(scene: ServerFixture) -> None:
    await scene.begin()
    env_id = await scene.register_env()
    spoiled = group(2, env_id=env_id, scores=[float("nan"), 1.0])
    await scene.send(spoiled, spoiled, group(2, env_id=env_id))
    found = await scene.diagnostics()
    assert found["set_aside"] == {"not_finite": 2}
    assert (await sentences(scene))["not_finite"] == (
        "2 groups were set aside: with a number that is NaN or infinite."
    )
    assert found["environments"] == [
        {
            "env_id": env_id,
            "name": "sums_0",
            "connected": True,
            "last_seen_s": 0.0,
            "group_size": 2,
            "queued": 1,
            "buffered": 0,
            "accepted": 1,
            "duplicates": 0,
            "rejected": 2,
            "last_rejection": "scores[0] is not a finite number.",
            "min_share": 0.0,
            "weight": 1.0,
        }
    ]


async def test_a_minimum_share_without_groups(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.register_env(min_batch_allocation=0.5)
    await scene.send(group(), group())
    said = "Environment 'sums_0' asked for 2 sequences of every batch and has none queued."
    assert (await sentences(scene))["min_allocation_unmet"] == said
    assert await scene.batch() is None
    scene.clock.now += 20
    found = await scene.diagnostics()
    (reason,) = (each for each in found["reasons"] if each["code"] == "min_allocation_unmet")
    assert reason["sentence"] == f"{said} It was heard of 20 s ago; in 40 s it loses its share."
    assert reason["since_s"] == 20.0
    assert found["why"] == reason["sentence"]


async def test_shares_that_are_a_whole_batch_are_named_where_others_wait_beside_them(
    scene: ServerFixture,
) -> None:
    """The batches go on, so nothing else would tell why an environment's groups are in none of
    them.
    """
    await scene.begin()
    first, second = [await scene.register_env(min_batch_allocation=0.5) for _ in range(2)]
    other = await scene.register_env()
    await scene.send(group(env_id=first), group(env_id=second))
    assert (await scene.diagnostics())["why"] == "", "nobody waits beside them"
    await scene.send(*(group(env_id=other) for _ in range(3)))
    found = await scene.diagnostics()
    assert (found["batch_ready"], [reason["code"] for reason in found["reasons"]]) == (
        True,
        ["shares_fill_batch"],
    )
    assert found["why"] == (
        "The minimum shares of 'sums_0', 'sums_1' are together a whole batch of 4: other groups "
        "(3 queued) are taken "
        "only where theirs are too few; lower the shares."
    )
    assert num_sequences(await scene.batch()) == 4
    await scene.send(group(env_id=first))
    assert await scene.reason_codes() == ["min_allocation_unmet", "shares_fill_batch"]
    assert (await scene.diagnostics())["queued_groups"] == 4


async def test_shares_of_which_whole_groups_are_more_than_a_batch_are_named_too(
    scene: ServerFixture,
) -> None:
    await scene.begin()
    envs = [await scene.register_env(min_batch_allocation=0.25) for _ in range(2)]
    await scene.send(*(group(env_id=env_id) for env_id in envs), group())
    assert await scene.reason_codes() == ["shares_fill_batch"]


@pytest.mark.parametrize(("share", "size"), [(0.5, 2), (1.0, 3)])
async def test_shares_that_leave_room_for_others_are_not(
    scene: ServerFixture, share: float, size: int
) -> None:
    await scene.begin()
    env_id = await scene.register_env(min_batch_allocation=share, group_size=size)
    await scene.send(group(size, env_id=env_id), group(4 - size), group(4 - size))
    found = await scene.diagnostics()
    assert (found["batch_ready"], found["reasons"]) == (True, [])


async def test_many_shares_are_named_by_a_few(scene: ServerFixture) -> None:
    await scene.begin(batch_size=16)
    envs = [await scene.register_env(min_batch_allocation=0.125) for _ in range(8)]
    await scene.send(*(group(env_id=env_id) for env_id in envs), group())
    assert "'sums_4' and 3 more are together" in (await scene.diagnostics())["why"]


async def test_an_environment_that_cannot_be_is_told_which_can(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.send(group(env_id=2**31))
    assert "they are from 0 to 2147483647" in (await sentences(scene))["env_id"]


async def test_a_share_that_can_never_be_served_holds_nobody_back(scene: ServerFixture) -> None:
    """Groups of 3 fit no batch of 4 together with groups of 2."""
    await scene.begin()
    env_id = await scene.register_env(min_batch_allocation=0.5, group_size=3)
    await scene.send(group(3, env_id=env_id), group(mark=1), group(mark=2))
    assert num_sequences(await scene.batch()) == 4


async def test_what_waits_is_measured(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.send(group(), group())
    scene.clock.now += 12
    await scene.get("/batch", lease=60)
    found = await scene.diagnostics()
    assert found["oldest_s"] == 12.0
    assert found["waiting_bytes"] > 400
    assert found["batches_out"] == {"leased": 1}
    assert (
        found["why"]
        == "1 batch is with a trainer that has not acknowledged it; the next lease ends in 60 s."
    )


async def test_groups_that_came_again_are_counted(scene: ServerFixture) -> None:
    await scene.begin()
    env_id = await scene.register_env()
    for _ in range(3):
        await scene.post("/scored_data", group(env_id=env_id), idempotency_key="one")
    found = await scene.diagnostics()
    assert (found["groups_accepted"], found["duplicates"]) == (1, 2)
    assert found["environments"][0]["duplicates"] == 2


async def test_a_trainer_that_gets_nothing_though_enough_waits_is_told_once_in_the_log(
    scene: ServerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    await scene.begin()
    await scene.register_env(min_batch_allocation=0.5)
    await scene.send(group(), group())
    for _ in range(20):
        assert await scene.batch() is None
        scene.clock.now += 4
        await scene.status_env(0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "No batch for 30 s: Environment 'sums_0' asked for 2 sequences" in told[0]


async def test_parts_that_wait_for_their_group(scene: ServerFixture) -> None:
    await scene.begin(batch_size=8)
    env_id = await scene.register_env(group_size=4)
    await scene.send(group(3, env_id=env_id))
    assert "sent 3 sequences in groups smaller than its 4" in (await sentences(scene))["buffered"]


async def test_totals_and_the_first_group(scene: ServerFixture) -> None:
    await scene.begin()
    scene.clock.now = 2000.0
    await scene.send(group())
    scene.clock.now = 3000.0
    await scene.send(group(), group())
    found: dict[str, Any] = await scene.diagnostics()
    assert (found["queued_groups"], found["queued_sequences"], found["groups_accepted"]) == (
        3,
        6,
        3,
    )
    assert (found["step"], found["first_group_at"]) == (0, 2000.0)


async def test_silence_is_measured(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.register_env()
    scene.clock.now += 90
    (env,) = (await scene.diagnostics())["environments"]
    assert (env["last_seen_s"], env["connected"]) == (90.0, False)


async def test_refused_posts_are_counted_with_the_words_of_the_last(scene: ServerFixture) -> None:
    await scene.begin()
    found = await scene.diagnostics()
    assert (found["requests_refused"], found["last_refusal"]) == (0, None)
    assert (await scene.raw_post("/scored_data", {"tokens": "none"})).status_code == 422
    found = await scene.diagnostics()
    assert "body.tokens" in found["last_refusal"]["why"]
    assert (await scene.raw_post("/scored_date", {})).status_code == 404
    found = await scene.diagnostics()
    assert found["requests_refused"] == 2
    assert (found["last_refusal"]["path"], found["last_refusal"]["status"]) == ("/scored_date", 404)


async def test_what_was_refused_before_an_environment_registered_is_no_refusal_of_its_calls(
    scene: ServerFixture,
) -> None:
    await scene.begin()
    assert (await scene.raw_post("/register-env", {})).status_code == 422
    await scene.register_env()
    found = await scene.diagnostics()
    assert (found["requests_refused"], found["last_refusal"]) == (0, None)
