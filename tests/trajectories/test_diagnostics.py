"""Why there is no batch, in sentences (spec §5.9)."""

from __future__ import annotations

from typing import Any

from .scenes import Scene, group


async def sentences(scene: Scene) -> dict[str, str]:
    return {reason["code"]: reason["sentence"] for reason in (await scene.diagnostics())["reasons"]}


async def test_nobody_has_registered(scene: Scene) -> None:
    found = await scene.diagnostics()
    assert (found["registered"], found["batch_ready"], found["first_group_at"]) == (False, False, None)
    assert [reason["code"] for reason in found["reasons"]] == ["not_registered"]


async def test_the_trainer_has_not_asked_yet(scene: Scene) -> None:
    await scene.register()
    said = await sentences(scene)
    assert "not_started" in said
    assert said["too_few_sequences"] == "0 of 4 sequences are queued. No environment is connected."


async def test_too_few_sequences(scene: Scene) -> None:
    await scene.begin()
    env_id = await scene.register_env()
    await scene.send(group(2, env_id=env_id))
    assert await sentences(scene) == {"too_few_sequences": "2 of 4 sequences are queued."}
    await scene.send(group(2, env_id=env_id))
    found = await scene.diagnostics()
    assert (found["batch_ready"], found["reasons"]) == (True, [])


async def test_sizes_that_can_never_make_a_batch(scene: Scene) -> None:
    await scene.begin(batch_size=24)
    env_id = await scene.register_env(group_size=16)
    await scene.send(group(16, env_id=env_id), group(16, env_id=env_id))
    said = await sentences(scene)
    assert said == {"size_cannot_pack": "Groups of 16 sequences never add up to a batch of 24; choose sizes that do."}


async def test_sizes_that_do_not_make_a_batch_yet(scene: Scene) -> None:
    await scene.begin(batch_size=24)
    for size in (6, 8):
        env_id = await scene.register_env(group_size=size)
        await scene.send(*(group(size, env_id=env_id) for _ in range(2)))
    assert list(await sentences(scene)) == ["size_cannot_pack"]


async def test_what_was_set_aside_is_counted_per_reason(scene: Scene) -> None:
    await scene.begin()
    env_id = await scene.register_env()
    spoiled = group(2, env_id=env_id, scores=[float("nan"), 1.0])
    await scene.send(spoiled, spoiled, group(2, env_id=env_id))
    found = await scene.diagnostics()
    assert found["set_aside"] == {"not_finite": 2}
    assert (await sentences(scene))["not_finite"] == ("2 groups were set aside: with a number that is NaN or infinite.")
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
            "rejected": 2,
        }
    ]


async def test_a_minimum_share_without_groups(scene: Scene) -> None:
    await scene.begin()
    await scene.register_env(min_batch_allocation=0.5)
    await scene.send(group(), group())
    said = await sentences(scene)
    assert said["min_allocation_unmet"] == (
        "Environment 'sums_0' asked for 2 sequences of every batch and has none queued."
    )


async def test_parts_that_wait_for_their_group(scene: Scene) -> None:
    await scene.begin(batch_size=8)
    env_id = await scene.register_env(group_size=4)
    await scene.send(group(3, env_id=env_id))
    assert "sent 3 sequences in groups smaller than its 4" in (await sentences(scene))["buffered"]


async def test_totals_and_the_first_group(scene: Scene) -> None:
    await scene.begin()
    scene.clock.now = 2000.0
    await scene.send(group())
    scene.clock.now = 3000.0
    await scene.send(group(), group())
    found: dict[str, Any] = await scene.diagnostics()
    assert (found["queued_groups"], found["queued_sequences"], found["groups_accepted"]) == (3, 6, 3)
    assert (found["step"], found["first_group_at"]) == (0, 2000.0)


async def test_silence_is_measured(scene: Scene) -> None:
    await scene.begin()
    await scene.register_env()
    scene.clock.now += 90
    (env,) = (await scene.diagnostics())["environments"]
    assert (env["last_seen_s"], env["connected"]) == (90.0, False)
