"""What a server knows of its environments: who is live, what each weighs; what is the same after a
restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halteres.trajectories.environments import Environment, Environments
from halteres.trajectories.records import (
    EnvRecord,
)
from halteres.trajectories.schema import EnvRegistration

from .server_fixtures import Clock, ServerFixture, group, opened

NOW = 1000.0


def known(num: int, now: float = NOW, **fields: Any) -> Environments:
    envs = Environments(timeout_s=60.0)
    for number in range(num):
        registration = EnvRegistration(max_token_length=10, group_size=2, weight=number + 1.0)
        record = EnvRecord(
            id=number, name=f"e{number}", desired_name="e", registration=registration, **fields
        )
        envs.save(record, now)
    return envs


def ids(envs: list[Environment]) -> list[int]:
    return [env.id for env in envs]


def test_who_is_silent_is_live_no_more_until_it_is_heard_of() -> None:
    envs = known(4)
    envs.by_id[2].last_seen = NOW + 50
    assert ids(envs.live(NOW + 60)) == [0, 1, 2, 3]
    assert ids(envs.live(NOW + 61)) == [2]
    envs.by_id[0].last_seen = NOW + 100
    assert (ids(envs.live(NOW + 101)), ids(envs.polling(NOW + 101))) == ([0, 2], [0])
    assert ids(envs.live(NOW + 1000)) == []


def test_who_says_goodbye_is_live_no_more_until_it_is_saved_as_connected() -> None:
    envs = known(2)
    gone, back = (
        EnvRecord(id=1, name="e1", desired_name="e", registration=None, connected=connected)
        for connected in (False, True)
    )
    envs.save(gone, NOW)
    envs.by_id[1].last_seen = NOW + 1  # its last groups
    assert ids(envs.live(NOW + 1)) == ids(envs.polling(NOW + 1)) == [0]
    envs.save(back, NOW + 2)
    assert ids(envs.live(NOW + 2)) == [0, 1]


def test_one_that_polls_is_told_so_however_short_the_time_out() -> None:
    envs = Environments(timeout_s=1.0, polling_s=5.0)
    envs.save(EnvRecord(id=0, name="e", desired_name="e", registration=None), NOW)
    assert (ids(envs.live(NOW + 3)), ids(envs.polling(NOW + 3))) == ([], [0])


def test_weights_are_parts_of_the_total_of_those_that_are_live() -> None:
    envs = known(4)
    for env in envs.by_id.values():
        assert envs.weight_of(env, NOW) == (env.id + 1) / 10
    envs.by_id[3].last_seen = NOW + 100
    assert envs.weight_of(envs.by_id[3], NOW + 100) == 1.0


def test_ids_follow_each_other_but_for_those_that_were_made_up() -> None:
    envs = known(3)
    for made_up in (2**31, 3):
        envs.save(EnvRecord(id=made_up, name="a", desired_name="a", registration=None), NOW)
    assert envs.new_record(EnvRegistration(max_token_length=1, group_size=1, weight=1.0)).id == 4


# -- after a restart


async def counted(scene: ServerFixture) -> tuple[Any, ...]:
    found = await scene.diagnostics()
    counts = [(env["env_id"], env["accepted"], env["rejected"]) for env in found["environments"]]
    return found["first_group_at"], found["groups_accepted"], found["set_aside"], counts


async def told_before_and_after(
    tmp_path: Path, *groups: dict[str, Any], **trainer: Any
) -> tuple[Any, Any]:
    """The groups are sent one every second, and the server is started again."""
    clock = Clock()
    async with opened(tmp_path / "q.sqlite", clock) as scene:
        await scene.begin(batch_size=4, **trainer)
        for each in groups:
            await scene.send(each)
            clock.now += 1
        if "max_staleness" in trainer:
            await scene.batch(policy_version=5)
        before = await counted(scene)
    async with opened(tmp_path / "q.sqlite", clock) as scene:
        return before, await counted(scene)


BAD = group(2, env_id=7) | {"scores": [1.0]}


async def test_groups_set_aside_before_their_environment_was_known_are_its_own(
    tmp_path: Path,
) -> None:
    before, after = await told_before_and_after(tmp_path, BAD, BAD, group(2, env_id=7), BAD)
    assert before == after == (1002.0, 1, {"lengths": 3}, [(7, 1, 3)])


async def test_groups_of_nobody_known_wait_for_their_environment_over_a_restart(
    tmp_path: Path,
) -> None:
    before, after = await told_before_and_after(tmp_path, BAD, group(2))
    assert before == after == (1001.0, 1, {"lengths": 1}, [])
    async with opened(tmp_path / "q.sqlite") as scene:
        await scene.send(group(2, env_id=7))
        assert (await counted(scene))[3] == [(7, 1, 1)]


async def test_another_run_does_not_count_them(tmp_path: Path) -> None:
    async with opened(tmp_path / "q.sqlite") as scene:
        await scene.begin()
        await scene.send(BAD)
        await scene.register(wandb_group="next")
        await scene.send(group(2, env_id=7))
        expected = (1000.0, 1, {}, [(7, 1, 0)])
        assert await counted(scene) == expected
    async with opened(tmp_path / "q.sqlite") as scene:
        assert await counted(scene) == expected


async def test_the_first_group_stays_the_first_whatever_becomes_of_it(tmp_path: Path) -> None:
    groups = [BAD, *(group(2, policy_version=version) for version in (0, 5, 5))]
    before, after = await told_before_and_after(tmp_path, *groups, max_staleness=0)
    assert before == after == (1001.0, 2, {"lengths": 1, "stale": 1}, [])


async def test_parts_of_groups_count_as_first_too(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path / "q.sqlite", clock) as scene:
        await scene.begin(batch_size=4)
        env_id = await scene.register_env(group_size=2)
        for _ in range(4):
            await scene.send(group(1, env_id=env_id))
            clock.now += 1
        assert await scene.batch() is not None
        before = await counted(scene)
    async with opened(tmp_path / "q.sqlite", clock) as scene:
        assert await counted(scene) == before
        assert before[0] == 1000.0
