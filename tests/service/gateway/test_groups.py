"""The groups of gateway sessions at a real trajectory server: posted once, whole, and as its protocol
has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import until
from trajectories.server_fixtures import TRAINER, ServerProcess

from halteres.process import steady_time
from halteres.service.gateway.groups import body_of
from halteres.service.service import Options
from service.live_service import LiveService, serving

from .episodes import EngineTap, Episode, opened, user

pytestmark = pytest.mark.runs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A trajectory server whose trainer has asked for a batch."""
    server = ServerProcess(tmp_path / "queue.sqlite")
    server.ask("/register", {**TRAINER, "batch_size": 2, "max_token_len": 2048})
    server.ask("/batch")
    try:
        yield server
    finally:
        server.close()


def options(server: ServerProcess) -> Options:
    return Options(trajectory_server=server.url)


async def rollouts(scene: LiveService, count: int = 2, **more: Any) -> list[Episode]:
    """Sessions of one task, each with one call."""
    group = {"group": "task 7".replace(" ", "-"), "group_size": 2, **more}
    found = [await opened(scene, **group) for _ in range(count)]
    for one in found:
        await one.chat([user("Hello.")])
    return found


async def state_of(episode: Episode) -> str:
    return (await episode.view())["group"]["state"]


async def posted(scene: LiveService, episode: Episode) -> None:
    await until(lambda: scene.gateway.groups.in_state("posted") != [])
    assert await state_of(episode) == "posted"


async def test_the_rollouts_of_one_task_are_one_group_that_is_posted_once(
    server: ServerProcess, tmp_path: Path
) -> None:
    """Trap 14, and trap 13 on the wire: a rollout of two branches counts as one."""
    async with serving(tmp_path / "state", options(server)) as scene:
        tap = EngineTap(scene)
        first, second = await rollouts(scene)
        await first.chat([user("Something else.")])
        await first.reward(reward=1.0, turn_rewards=[0.25, 0.5])
        assert await state_of(first) == "gathering"
        await second.reward(reward=0.0)
        await posted(scene, first)
        [group] = server.ask("/batch")["batch"]
        assert group["scores"] == [1.0, 1.0, 0.0]
        assert group["episodes"] == [0, 0, 1]
        assert [span[0] for span in group["spans"]] == [0, 1, 2]
        assert [span[3] for span in group["spans"]] == [0.25, 0.5, 0.0]
        order = (0, 2, 1)
        sampled = [tap.samplings[at] for at in order]
        assert group["tokens"] == [one.prompt + one.tokens for one in sampled]
        assert group["masks"] == [[-100] * len(one.prompt) + one.tokens for one in sampled]
        assert group["inference_logprobs"] == [
            [1.0] * len(one.prompt) + one.logprobs for one in sampled
        ]
        assert group["policy_version"] == [[0, 0]] * 3
        await scene.gateway.tick(steady_time() + 10)
        assert server.ask("/batch")["batch"] is None
        assert server.ask("/v1/groups")["groups"][0]["size"] == 2


async def test_a_pending_post_survives_a_restart_and_is_made_once(
    server: ServerProcess, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    async with serving(state, options(server)) as scene:
        for one in await rollouts(scene):
            await one.reward(reward=1.0)
        await posted(scene, one)
        group = scene.gateway.groups.get("task-7")
        assert group is not None
        # As if the service had been killed before it could write that down.
        await scene.gateway.groups.move(group, "pending")
    async with serving(state, options(server)) as scene:
        await posted(scene, Episode(scene, one.opened))
    assert len(server.ask("/v1/groups")["groups"]) == 1


async def test_a_server_that_is_away_gets_the_group_when_it_is_back(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.service.gateway.gateway.POST_AGAIN_S", 0.05)
    server.kill()
    server.listener.close()
    async with serving(tmp_path / "state", options(server)) as scene:
        episodes = await rollouts(scene)
        for one in episodes:
            await one.reward(reward=1.0)
        assert await state_of(episodes[0]) == "pending"
    again = ServerProcess(tmp_path / "queue.sqlite")
    try:
        async with serving(tmp_path / "state", options(again)) as scene:
            await posted(scene, Episode(scene, episodes[0].opened))
            assert len(again.ask("/v1/groups")["groups"]) == 1
    finally:
        again.close()


async def test_a_group_that_cannot_be_made_holds_up_no_other(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = body_of

    def fails_once(rollouts: Any) -> Any:
        if rollouts[0].verdict.reward == 7.0:
            raise RuntimeError("a bug")
        return made(rollouts)

    monkeypatch.setattr("halteres.service.gateway.gateway.body_of", fails_once)
    async with serving(tmp_path / "state", options(server)) as scene:
        for name, reward in (("first", 7.0), ("second", 1.0)):
            episodes = await rollouts(scene, group=name)
            for one in episodes:
                await one.reward(reward=reward)
        await posted(scene, episodes[0])
        assert [one.name for one in scene.gateway.groups.in_state("pending")] == ["first"]


async def test_failed_rollouts_are_left_out_and_one_rollout_alone_is_no_group(
    server: ServerProcess, tmp_path: Path
) -> None:
    async with serving(tmp_path / "state", options(server)) as scene:
        three = {"group": "three", "group_size": 3}
        episodes = await rollouts(scene, 3, **three)
        await episodes[0].reward(error="It crashed.")
        for one, reward in zip(episodes[1:], (0.0, 1.0), strict=True):
            await one.reward(reward=reward)
        await posted(scene, episodes[0])
        [group] = server.ask("/v1/groups")["groups"]
        assert group["size"] == 2
        first, second = await rollouts(scene)
        await first.reward(reward=1.0)
        await second.reward(error="It crashed.")
        view = await first.view()
        assert view["group"]["state"] == "dropped"
        assert "1 of 2 sessions were scored; 2 are needed." in view["group"]["why"]


async def test_a_groups_deadline_posts_what_is_scored_and_ends_the_rest(
    server: ServerProcess, tmp_path: Path
) -> None:
    async with serving(tmp_path / "state", options(server)) as scene:
        late = {"group": "late", "group_size": 4, "group_deadline_s": 60}
        episodes = await rollouts(scene, 3, **late)
        for one in episodes[:2]:
            await one.reward(reward=1.0)
        await scene.gateway.tick(steady_time() + 59)
        assert await state_of(episodes[0]) == "gathering"
        await scene.gateway.tick(steady_time() + 61)
        await posted(scene, episodes[0])
        assert (await episodes[2].view())["failure"]["code"] == "session_expired"
        status, refusal = await scene.ask("/gateway/sessions", **late)
        assert (status, "is over" in refusal["detail"]) == (422, True)


async def test_sessions_that_are_opened_at_once_are_no_more_than_the_groups_size(
    server: ServerProcess, tmp_path: Path
) -> None:
    async with serving(tmp_path / "state", options(server)) as scene:
        asked = {"group": "g", "group_size": 2}
        answers = await asyncio.gather(*(scene.ask("/gateway/sessions", **asked) for _ in range(5)))
        assert sorted(status for status, _ in answers) == [200, 200, 422, 422, 422]


async def test_a_group_has_one_size_and_so_many_sessions(
    server: ServerProcess, tmp_path: Path
) -> None:
    async with serving(tmp_path / "state", options(server)) as scene:
        await rollouts(scene)
        for more, words in (
            ({"group_size": 2}, "has its 2 sessions already"),
            ({"group_size": 3}, "is another one"),
            ({"run": "halteres/tiny", "group_size": 2}, "is another one"),
            ({}, "needs a `group_size`"),
        ):
            status, refusal = await scene.ask("/gateway/sessions", group="task-7", **more)
            assert (status in (400, 422), words in refusal["detail"]) == (True, True), refusal
