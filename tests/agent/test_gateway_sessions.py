"""rl_open_session and rl_post_reward: an agent plays episodes on a run's service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from deadlines import until

from halteres.agent.call import call
from halteres.agent.table import BY_NAME
from halteres.agent.tool import Caller, OpenThreads
from halteres.runs.directory import RunDirectory

from .gateway_scene import KEY, GatewayScene, gateway_of_a_run, play
from .real_runs import make_the_call
from .run_fixtures import change, make_run, supervised, told
from .transports import TRANSPORTS, home_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_of(tmp_path, monkeypatch)


@pytest_asyncio.fixture
async def scene(home: Path) -> AsyncIterator[GatewayScene]:
    async with gateway_of_a_run(home) as scene:
        yield scene


@pytest.mark.runs
@pytest.mark.parametrize("name", list(TRANSPORTS))
async def test_an_episode_is_opened_played_and_scored_over_every_transport(
    scene: GatewayScene, name: str
) -> None:
    """The session's key comes as it is, the run's never."""
    async with TRANSPORTS[name]() as ask:
        opened = await ask("rl_open_session", {"task": {"sum": [1, 2]}, "ttl_s": 60})
        assert set(opened) == {
            *("session", "api_key", "openai_base_url", "anthropic_base_url", "run_base_url"),
            *("expires", "run_id", "next"),
        }
        assert opened["api_key"].startswith("hs-")
        await asyncio.to_thread(play, opened)
        scored = await ask("rl_post_reward", {"session": opened["session"], "reward": 0.5})
        again = await ask("rl_post_reward", {"session": opened["session"], "reward": 0.5})
        other = await ask("rl_post_reward", {"session": opened["session"], "reward": 1})
    _, view = await get(scene, opened["session"])
    assert view["task"] == {"sum": [1, 2]}
    assert view["nodes"][0]["policy_version"] == [0, 0]
    assert (scored["state"], scored["reward"]) == ("scored", 0.5)
    assert (scored["calls"], scored["sequences"]) == (1, 1)
    assert scored["trained_tokens"] == view["trainable_tokens"] > 0
    assert again == scored
    assert other["code"] == "invalid_data"
    assert KEY not in json.dumps([opened, scored, other])
    jsonschema.validate(opened, BY_NAME["rl_open_session"].output_schema())
    jsonschema.validate(scored, BY_NAME["rl_post_reward"].output_schema())


async def get(scene: GatewayScene, session: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{scene.service.url}/gateway/sessions/{session}"
    async with scene.service.http.get(url, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.runs
async def test_a_groups_sessions_go_to_the_runs_trajectory_server(scene: GatewayScene) -> None:
    """Each answer's `next` leads on; the rewards may be named."""
    opened = await told("rl_open_session", task="a", group="sums", group_size=2, pin_policy=True)
    await asyncio.to_thread(play, opened)
    first = await told("rl_post_reward", session=opened["session"], rewards={"a": 1, "b": 0.25})
    assert (first["reward"], first["group"]["state"]) == (1.25, "gathering")
    assert 'group="sums", group_size=2' in first["next"]
    opened = await make_the_call(first["next"].partition(": ")[2].replace("=task", '="b"'))
    await asyncio.to_thread(play, opened)
    second = await told("rl_post_reward", session=opened["session"], reward=0.0)
    assert second["next"].startswith("rl_check_status")
    await until(lambda: scene.service.gateway.groups.in_state("posted") != [])
    [group] = await asyncio.to_thread(lambda: scene.trajectories.ask("/batch")["batch"])
    assert sorted(group["scores"]) == [0.0, 1.25]


@pytest.mark.runs
async def test_an_episode_without_a_call_or_with_an_error_is_not_trained_on(
    scene: GatewayScene,
) -> None:
    silent = await told("rl_open_session")
    failed = await told("rl_post_reward", session=silent["session"], reward=1.0)
    assert (failed["state"], failed["failure"]["code"]) == ("failed", "nothing_sampled")
    broken = await told("rl_open_session")
    await asyncio.to_thread(play, broken)
    failed = await told("rl_post_reward", session=broken["session"], error="It crashed.")
    assert (failed["state"], failed["failure"]["why"]) == ("failed", "It crashed.")
    unclear = await told("rl_post_reward", session=broken["session"])
    assert unclear["code"] == "invalid_data"


@pytest.mark.runs
async def test_a_reward_for_a_session_that_is_not_there_names_the_call_that_opens_one(
    scene: GatewayScene,
) -> None:
    call = f'rl_open_session(task=task, run_id="{scene.run.run_id}")'
    unknown = await told("rl_post_reward", session="s-of-yesterday", reward=1.0)
    assert "There is no such gateway session here" in unknown["error"]
    over = await told("rl_open_session")
    await told("rl_post_reward", session=over["session"], error="It crashed.")
    late = await told("rl_post_reward", session=over["session"], reward=1.0)
    assert [unknown["next"], late["next"]] == [
        f"name a session that is open, or open one: {call}" for _ in range(2)
    ]


@pytest.mark.runs
async def test_another_service_is_asked_with_the_operators_key(
    scene: GatewayScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    opened = await told("rl_open_session", service=scene.service.url)
    assert f'service="{scene.service.url}"' in opened["next"]
    assert "run_id" not in opened
    await asyncio.to_thread(play, opened)
    scored = await told(
        "rl_post_reward", session=opened["session"], reward=1, service=scene.service.url
    )
    assert scored["state"] == "scored"
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-somebody-else")
    refused = await told("rl_open_session", service=scene.service.url)
    assert refused["code"] == "invalid_data"
    assert "tml-of-somebody-else" not in json.dumps(refused)


async def test_a_call_whose_service_is_not_there_says_what_to_do() -> None:
    assert (await told("rl_open_session"))["code"] == "run_not_found"
    run = make_run()
    ended = await told("rl_open_session", run_id=run.run_id)
    assert ended["next"] == f'rl_start_training(resume_from="{run.run_id}")'
    with supervised(run, status="starting"):
        early = await told("rl_open_session")
        assert early["next"].startswith(f'rl_check_status("{run.run_id}"')
        change(run, kind="reward")
        assert (await told("rl_open_session"))["next"] == "rl_list_runs()"
    both = await told("rl_open_session", run_id=run.run_id, service="http://127.0.0.1:1")
    assert "service" in both["error"]
    assert (await told("rl_open_session", service="here"))["code"] == "invalid_config"
    alone = await told("rl_open_session", service="http://127.0.0.1:1", group="g")
    assert "group_size" in alone["error"]
    for session in ("../runs", "s-1/../../x", ""):
        assert (await told("rl_post_reward", session=session, reward=1.0))[
            "code"
        ] == "invalid_arguments"


@pytest.mark.parametrize("name", ["rl_open_session", "rl_post_reward"])
async def test_without_the_token_no_session_is_opened_or_ended(name: str) -> None:
    """Whatever route may lead here: its reward would be what somebody's run is trained on."""
    caller = Caller(open_threads=OpenThreads())
    given = {"rl_open_session": {}, "rl_post_reward": {"session": "s-1", "reward": 1.0}}[name]
    run: RunDirectory = make_run()
    for where in ({"run_id": run.run_id}, {"service": "http://127.0.0.1:1"}):
        reply = await call(name, {**given, **where}, caller)
        assert reply.body["code"] == "unauthorized"
    assert BY_NAME[name].hints.read_only is False
