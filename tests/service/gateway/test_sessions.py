"""Gateway sessions over real HTTP: their keys, their ends, their bounds. We chose it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Mount, Route

from halteres.process import steady_time
from halteres.service.keys import KeyFile
from halteres.service.limits import Allowances, Limits
from halteres.service.server import create_app
from halteres.service.service import Options
from service.live_service import LiveService, closing, serving, trainer

from .episodes import Episode, opened, user

RUN = "r17"
HELLO: dict[str, Any] = {"messages": [user("Hello.")], "max_tokens": 4}


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[tuple[LiveService, str]]:
    """A service with one key, and that key."""
    key = KeyFile(tmp_path).create("alice").text
    async with serving(tmp_path) as scene:
        yield scene, key


async def asked(
    scene: LiveService, method: str, path: str, key: str | None, body: Any = None
) -> tuple[int, Any]:
    headers = {} if key is None else {"X-API-Key": key}
    url = f"{scene.url}{path}"
    async with scene.http.request(method, url, json=body or {}, headers=headers) as response:
        return response.status, await response.json(content_type=None)


async def of_alice(scene: LiveService, key: str, **body: Any) -> Episode:
    status, answer = await asked(scene, "POST", "/gateway/sessions", key, body)
    assert status == 200, answer
    return Episode(scene, answer)


async def begun(scene: LiveService, key: str, run: str) -> None:
    """A trainer has opened its session for a run, and published nothing."""
    body = {"tags": [], "user_metadata": {"halteres_run": run}, "sdk_version": "0.38.0"}
    status, answer = await asked(scene, "POST", "/api/v1/create_session", key, body)
    assert status == 200, answer


def paths_of(scene: LiveService) -> list[tuple[str, str]]:
    """Method and path of every route, from the app itself."""

    def of(routes: Any, before: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for route in routes:
            if isinstance(route, Mount):
                found += of(route.routes, before + route.path)
            elif isinstance(route, Route):
                path = re.sub(r"\{([a-z_]+)(:path)?\}", r"\1", before + route.path)
                found += [(method, path) for method in sorted(route.methods or ())]
        return found

    return of(create_app(scene.service, scene.gateway).routes, "")


@pytest.mark.parametrize("has_keys", [True, False], ids=["with keys", "open"])
async def test_a_sessions_key_opens_nothing_but_its_session(tmp_path: Path, has_keys: bool) -> None:
    """Trap 12, over the whole table of routes, of another session and of another run."""
    key = KeyFile(tmp_path).create("alice").text if has_keys else "any"
    async with serving(tmp_path) as scene:
        await begun(scene, key, RUN)
        episode, other = [await of_alice(scene, key, run=RUN) for _ in range(2)]
        own = episode.opened["api_key"]
        table = paths_of(scene)
        assert len(table) > 100
        keyless = ("/api/v1/healthz", "/halteres/v1/files/")
        for method, path in table:
            if path.startswith(keyless) or path.startswith("/g/session_id"):
                continue
            path = path.replace("run_id", "r18").replace("session_id", episode.id)
            status, answer = await asked(scene, method, path, own)
            assert (status, "KeyError" in str(answer)) == (403, False), (method, path)
        for method, path in table:
            if path.startswith("/g/session_id"):
                path = path.replace("session_id", other.id)
                assert (await asked(scene, method, path, own))[0] == 403, (method, path)
        for path in (f"/runs/{RUN}", f"/runs/{RUN}/", "/", "/nothing", f"/x/g/{episode.id}/v1"):
            assert (await asked(scene, "GET", path, own))[0] in (403, 404), path


async def test_a_sessions_key_names_it_under_its_runs_path(keyed: tuple[LiveService, str]) -> None:
    """For programs whose paths are fixed. The run has no weights yet."""
    scene, key = keyed
    await begun(scene, key, RUN)
    episode = await of_alice(scene, key, run=RUN)
    assert episode.opened["run_base_url"] == f"{scene.url}/runs/{RUN}/v1"
    status, answer = await asked(
        scene,
        "POST",
        f"/runs/{RUN}/v1/chat/completions",
        episode.opened["api_key"],
        HELLO,
    )
    assert (status, "has no weights to sample from" in answer["error"]["message"]) == (503, True)


async def test_a_call_under_the_runs_path_is_a_node_of_the_keys_session(scene: LiveService) -> None:
    async with closing(await scene.client(halteres_run=RUN)) as client:
        training = await trainer(client)
        await training.save_weights_and_get_sampling_client()
        episode = await opened(scene, run=RUN)
        for path in ("v1/chat/completions", "v1/messages"):
            status, _ = await asked(
                scene, "POST", f"/runs/{RUN}/{path}", episode.opened["api_key"], HELLO
            )
            assert status == 200
        nodes = (await episode.view())["nodes"]
        assert [node["dialect"] for node in nodes] == ["v1/chat/completions", "v1/messages"]


async def test_the_operators_key_is_asked_for_by_the_control_plane(
    keyed: tuple[LiveService, str], tmp_path: Path
) -> None:
    """Trap 12: another tenant's key does not see the session either."""
    scene, key = keyed
    bob = KeyFile(tmp_path).create("bob").text
    episode = await of_alice(scene, key)
    paths = [("POST", "/gateway/sessions", None), ("GET", f"/gateway/sessions/{episode.id}", 404)]
    paths += [
        ("GET", f"/gateway/sessions/{episode.id}/sequences", 404),
        ("POST", f"/gateway/sessions/{episode.id}/reward", 404),
    ]
    for method, path, of_bob in paths:
        assert (await asked(scene, method, path, None))[0] == 401
        assert (await asked(scene, method, path, "any"))[0] == 401
        assert (await asked(scene, method, path, episode.opened["api_key"]))[0] == 403
        if of_bob is not None:
            assert (await asked(scene, method, path, bob))[0] == of_bob
    assert (await asked(scene, "GET", f"/gateway/sessions/{episode.id}", key))[0] == 200


@pytest.mark.parametrize("given", [None, "EMPTY", "x", "sk-ant-api03", "hs-x", "tml-0-0"])
async def test_any_string_is_a_key_where_the_path_names_the_session(
    keyed: tuple[LiveService, str], given: str | None
) -> None:
    """Trap 15."""
    scene, key = keyed
    episode = await of_alice(scene, key)
    path = f"{episode.path}/v1/chat/completions"
    assert (await asked(scene, "POST", path, given, HELLO))[0] == 200
    assert (await asked(scene, "GET", f"{episode.path}/v1/models", given))[0] == 200


async def test_a_session_ends_with_its_owners_last_key(
    keyed: tuple[LiveService, str], tmp_path: Path
) -> None:
    scene, key = keyed
    episode = await of_alice(scene, key)
    keys = KeyFile(tmp_path)
    keys.create("alice", tenant="alice")
    path = f"{episode.path}/v1/chat/completions"
    keys.revoke(keys.read()[0].id)
    assert (await asked(scene, "POST", path, "any", HELLO))[0] == 200
    keys.revoke(keys.read()[1].id)
    assert (await asked(scene, "POST", path, "any", HELLO))[0] == 401
    assert (await asked(scene, "POST", path, episode.opened["api_key"], HELLO))[0] == 401


async def test_a_session_that_is_not_there_says_no_more_than_any_path(
    keyed: tuple[LiveService, str], tmp_path: Path
) -> None:
    scene, key = keyed
    for given, expected in ((None, 401), ("x", 401), ("hs-x", 401), (key, 404)):
        status, _ = await asked(scene, "POST", "/g/s-none/v1/chat/completions", given, HELLO)
        assert status == expected
    async with serving(tmp_path / "open") as scene:
        status, answer = await scene.ask("/g/s-none/v1/messages", **HELLO)
        assert (status, answer["error"]["type"]) == (404, "not_found_error")


async def test_the_control_plane_of_an_open_service_follows_the_rules_of_every_open_route(
    scene: LiveService,
) -> None:
    episode = await opened(scene)
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        for path in ("/gateway/sessions", f"{episode.path}/v1/chat/completions"):
            async with scene.http.post(
                f"{scene.url}{path}", json=HELLO, headers=headers
            ) as response:
                assert response.status == 403


async def test_a_reward_ends_a_session_once_and_a_late_one_is_refused_with_a_sentence(
    scene: LiveService,
) -> None:
    episode = await opened(scene)
    await episode.chat([user("Hello.")])
    assert (await episode.reward(reward=0.25, done=False))["state"] == "open"
    await episode.chat([user("Hello.")])
    found = await episode.reward(rewards={"right": 1.0, "short": 0.5}, turn_rewards=[0.5, 0.5])
    assert (found["state"], found["reward"]) == ("scored", 1.5)
    again = {"rewards": {"right": 1.0, "short": 0.5}, "turn_rewards": [0.5, 0.5]}
    assert await episode.reward(**again) == found
    status, refusal = await scene.ask(f"/gateway/sessions/{episode.id}/reward", reward=2.0)
    assert (status, "too late" in refusal["detail"]) == (410, True)
    status, refusal = await episode.post("/v1/chat/completions", HELLO)
    assert (status, refusal["error"]["code"]) == (410, "session_over")
    assert [turn["reward"] for turn in (await episode.sequences())["turns"]] == [0.5, 0.5]


async def test_time_ends_a_session_without_a_reward(scene: LiveService) -> None:
    episode = await opened(scene, ttl_s=60)
    await episode.chat([user("Hello.")])
    await scene.gateway.tick(steady_time() + 59)
    assert (await episode.view())["state"] == "open"
    await scene.gateway.tick(steady_time() + 61)
    view = await episode.view()
    assert (view["state"], view["failure"]["code"]) == ("expired", "session_expired")
    status, refusal = await scene.ask(f"/gateway/sessions/{episode.id}/reward", reward=1.0)
    assert (status, "Its time was over after 60 s" in refusal["detail"]) == (410, True)
    assert len((await episode.sequences())["sequences"]) == 1
    await scene.gateway.tick(steady_time() + 25 * 3600)
    assert (await scene.get(f"/gateway/sessions/{episode.id}"))[0] == 404
    await scene.service.reap(steady_time() + 26 * 3600)
    assert scene.rows("SELECT id FROM requests WHERE kind = 'gateway'") == []


async def test_a_journal_that_has_grown_too_large_keeps_what_is_over_for_minutes(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Options(journal_bytes=1)) as scene:
        over, under_way = [await opened(scene) for _ in range(2)]
        for one in (over, under_way):
            await one.chat([user("Hello.")])
        await over.reward(reward=1.0)
        await scene.gateway.tick(steady_time() + 590)
        assert (await over.view())["state"] == "scored"
        await scene.gateway.tick(steady_time() + 690)
        assert (await scene.get(f"/gateway/sessions/{over.id}"))[0] == 404
        await scene.service.reap(steady_time() + 700)
        assert len((await under_way.view())["nodes"]) == 1


async def test_calls_of_a_session_outlive_other_requests_in_the_journal(scene: LiveService) -> None:
    episode = await opened(scene)
    await episode.chat([user("Hello.")])
    await scene.service.reap(steady_time() + 5 * 3600)
    assert len(scene.rows("SELECT id FROM requests WHERE kind = 'gateway'")) == 1


async def test_an_error_is_a_typed_failed_rollout_and_so_is_an_episode_without_a_turn(
    scene: LiveService,
) -> None:
    episode = await opened(scene)
    await episode.chat([user("Hello.")])
    found = await episode.reward(error="The repository does not build.", code="build_failed")
    assert found["failure"] == {"code": "build_failed", "why": "The repository does not build."}
    silent = await opened(scene)
    found = await silent.reward(rewards={"right": 1.0})
    assert (found["state"], found["failure"]["code"]) == ("failed", "nothing_sampled")
    assert found["reward"] is None
    assert await silent.reward(rewards={"right": 1.0}) == found
    status, refusal = await scene.ask(f"/gateway/sessions/{silent.id}/reward", reward=0.5)
    assert (status, "It failed (nothing_sampled)" in refusal["detail"]) == (410, True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "Send one of reward, rewards and error"),
        ({"reward": 1.0, "error": "x"}, "Send one of reward, rewards and error"),
        ({"reward": 1.0, "turn_rewards": [1.0, 1.0]}, "1 turns that are trained on"),
        ({"score": 1.0}, "`score` is no field"),
        ({"rewards": {"a": 1e400}}, "not JSON"),
    ],
)
async def test_a_reward_that_says_nothing_or_two_things_is_refused(
    scene: LiveService, body: dict[str, Any], words: str
) -> None:
    episode = await opened(scene)
    await episode.chat([user("Hello.")])
    status, refusal = await scene.ask(f"/gateway/sessions/{episode.id}/reward", **body)
    assert (status, words in refusal["detail"]) == (400, True), refusal
    assert (await episode.view())["state"] == "open"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"ttl_s": 0.5}, "ttl_s"),
        ({"ttl_s": 8 * 86400}, "ttl_s"),
        ({"group": "a b", "group_size": 2}, "no blanks"),
        ({"group": "g", "group_size": 2}, "--trajectory-server"),
        ({"group_size": 4}, "`group_size` came without a `group`"),
        ({"group_deadline_s": 60}, "`group_deadline_s` came without a `group`"),
        (
            {"group": "g", "group_size": 2, "sampling": {"temperature": 0}},
            "its `temperature` is 0",
        ),
        ({"sampling": {"temperature": -1}}, "0 to 100"),
        ({"sampling": {"seed": -1}}, "0 to 2**31 - 1"),
        ({"sampling": {"seed": 2**31}}, "0 to 2**31 - 1"),
        ({"sampling": {"top_p": 0.5}}, "top_p"),
        ({"tags": []}, "`tags` is no field"),
        ({"metadata": {"x": "y" * 70_000}}, "large"),
    ],
)
async def test_what_a_session_cannot_be_opened_with_is_refused_in_a_sentence(
    scene: LiveService, body: dict[str, Any], words: str
) -> None:
    status, refusal = await scene.ask("/gateway/sessions", **body)
    assert (status in (400, 413), words in refusal["detail"]) == (True, True), refusal


async def test_of_two_rewards_at_once_one_counts(scene: LiveService) -> None:
    episode = await opened(scene)
    for _ in range(3):
        await episode.chat([user("Hello.")])
    path = f"/gateway/sessions/{episode.id}/reward"
    answers = await asyncio.gather(*(scene.ask(path, reward=float(one)) for one in range(4)))
    assert sorted(status for status, _ in answers) == [200, 410, 410, 410]
    [won] = [answer["reward"] for status, answer in answers if status == 200]
    assert (await episode.view())["reward"] == won


async def test_a_tenant_has_so_many_sessions_open(tmp_path: Path) -> None:
    limits = Allowances(default=Limits(gateway_sessions=2))
    async with serving(tmp_path, Options(limits=limits)) as scene:
        first, _ = [await opened(scene, ttl_s=60) for _ in range(2)]
        status, refusal = await scene.ask("/gateway/sessions")
        assert (status, "2 is the limit" in refusal["detail"]) == (400, True)
        await first.reward(error="It crashed.")
        await opened(scene)


async def test_a_sessions_secrets_are_not_kept_and_not_told_again(scene: LiveService) -> None:
    episode = await opened(scene)
    key = episode.opened["api_key"]
    [row] = scene.rows("SELECT * FROM gateway_sessions")
    assert key not in str(row)
    assert key not in str([await episode.view(), await episode.sequences()])
    async with scene.http.post(f"{scene.url}{episode.path}/v1/nothing", json={}) as response:
        assert (response.status, episode.id in await response.text()) == (404, False)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "gpt-4o"}, 404, "no model 'gpt-4o'"),
        ({"run": "nowhere", "pin_policy": True}, 404, "There is no run 'nowhere'"),
        ({"run": "nowhere"}, 404, "There is no run 'nowhere'"),
        ({"run": "nowhere", "model": "gpt-4o"}, 404, "There is no run 'nowhere'"),
        ({"run": ""}, 400, "has no run"),
        ({"pin_policy": 3}, 400, "has no run"),
    ],
)
async def test_what_cannot_be_sampled_from_is_refused_when_the_session_is_opened(
    scene: LiveService, body: dict[str, Any], status: int, words: str
) -> None:
    found, answer = await scene.ask("/gateway/sessions", task="t", **body)
    assert found == status
    assert words in json.dumps(answer)


async def test_a_run_that_is_not_there_is_refused_with_those_that_are(scene: LiveService) -> None:
    """One whose trainer is there, and has published nothing yet, is no such run."""
    status, refusal = await scene.ask("/gateway/sessions", run=RUN)
    assert (status, "No trainer has a session here" in refusal["detail"]) == (404, True)
    async with closing(await scene.client(halteres_run=RUN)):
        await opened(scene, run=RUN)
        status, refusal = await scene.ask("/gateway/sessions", run="r71")
        assert (status, "The runs here are r17. Did you mean 'r17'?" in refusal["detail"]) == (
            404,
            True,
        )
        status, refusal = await scene.ask("/gateway/sessions", run=RUN, pin_policy=True)
        assert (status, "has no weights to sample from" in refusal["detail"]) == (503, True)


async def test_a_reward_that_was_not_the_last_is_named_at_the_sessions_end(
    scene: LiveService,
) -> None:
    episode = await opened(scene, ttl_s=60)
    await episode.chat([user("Go.")])
    await episode.reward(reward=0.5, done=False)
    await scene.gateway.tick(steady_time() + 61)
    view = await episode.view()
    assert view["state"] == "expired"
    assert "`done`" in view["failure"]["why"]


async def test_a_session_of_shaped_answers_alone_fails_with_what_to_do(scene: LiveService) -> None:
    episode = await opened(scene)
    await episode.chat([user("Go.")], presence_penalty=1.0)
    ended = await episode.reward(reward=1.0)
    assert ended["state"] == "failed"
    assert "train_shaped" in ended["failure"]["why"]
