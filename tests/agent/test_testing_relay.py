"""The relay between a tested environment and an endpoint: choices, retries, limits, the key."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from halteres.agent.trial import folder, tester
from halteres.agent.trial import relay as relays
from halteres.agent.trial.folder import keys_for
from halteres.agent.trial.outcome import Ended
from halteres.agent.trial.relay import Destination, Relay, Traffic, relaying
from halteres.agent.trial.request import Request, TestedModel
from halteres.config import environ
from halteres.config.program import EnvironmentProgram

from .openrouter import KEY, OpenRouter, openrouter

MESSAGES = [{"role": "user", "content": "Is it so?"}]


@dataclass
class Door:
    """A door of a relay, knocked at as an environment would."""

    address: str
    traffic: Traffic
    client: aiohttp.ClientSession
    endpoint: OpenRouter

    async def chat(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer. The environment's own key is sent, and goes no further."""
        headers = {"Authorization": "Bearer x"}
        asked = {"model": "whatever", "messages": MESSAGES, **body}
        async with self.client.post(
            f"{self.address}/chat/completions", json=asked, headers=headers
        ) as reply:
            text = await reply.text()
            assert KEY not in text
            return reply.status, json.loads(text)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "FIRST_WAIT_S", 0.01)


@asynccontextmanager
async def door(model: str, **limits: Any) -> AsyncIterator[Door]:
    values: dict[str, Any] = {
        "ends_at": time.monotonic() + 20,
        "budget": 1000,
        "key": KEY,
        **limits,
    }
    async with (
        asyncio.timeout(20),
        openrouter() as endpoint,
        relaying() as relay,
        aiohttp.ClientSession() as client,
    ):
        address, upstream = relay.open(Destination(base_url=endpoint.url, model=model, **values))
        yield Door(address, upstream.traffic, client, endpoint)


async def test_choices_that_an_endpoint_leaves_out_are_asked_for_each_with_a_seed_of_its_own() -> (
    None
):
    async with door("good/one") as it:
        status, answer = await it.chat(n=4, seed=7)
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["completion_tokens"] == 20
        asked = [(body["n"], body["seed"]) for body in it.endpoint.requests]
        assert (asked[0], sorted(asked[1:])) == ((4, 7), [(1, 8), (1, 9), (1, 10)])
        await it.chat(n=3, seed=1)
        asked = [(body["n"], body["seed"]) for body in it.endpoint.requests[4:]]
        assert sorted(asked) == [(1, 1), (1, 2), (1, 3)], "it has learnt that n is ignored"
        assert (it.traffic.requested, it.traffic.completions, it.traffic.tokens) == (7, 7, 35)


async def test_an_endpoint_that_gives_all_choices_at_once_is_asked_once() -> None:
    async with door("good/one") as it:
        it.endpoint.honours_n = True
        _, answer = await it.chat(n=5)
        assert (len(answer["choices"]), len(it.endpoint.requests)) == (5, 1)


async def test_an_endpoint_that_refuses_several_choices_is_asked_for_one_at_a_time() -> None:
    async with door("single/one") as it:
        first, second = await asyncio.gather(it.chat(n=3), it.chat(n=2))
        assert [(status, len(answer["choices"])) for status, answer in (first, second)] == [
            (200, 3),
            (200, 2),
        ]


async def test_the_models_own_name_and_the_tests_limits_replace_what_the_environment_says() -> None:
    async with door("cut/one", max_tokens=16, temperature=0.5) as it:
        await it.chat(max_tokens=900, temperature=2, stream=True)
        (body,) = it.endpoint.requests
        assert (body["model"], body["max_tokens"], body["temperature"], "stream" in body) == (
            "cut/one",
            16,
            0.5,
            False,
        )
        assert it.traffic.truncated == 1


async def test_a_busy_endpoint_is_asked_again() -> None:
    async with door("busy/one") as it:
        status, _ = await it.chat()
        assert (status, len(it.endpoint.requests), it.traffic.last_error) == (200, 2, "")


async def test_a_failing_endpoint_is_asked_again_for_the_environment_and_then_no_more() -> None:
    async with door("bad/one") as it:
        status, answer = await it.chat()
        assert status == relays.GIVEN_UP
        assert "answered 500" in answer["error"]["message"]
        assert len(it.endpoint.requests) == relays.ATTEMPTS
        for _ in range(5):
            await it.chat()
        limit = relays.ATTEMPTS * relays.GIVEN_UP_AFTER
        assert len(it.endpoint.requests) == limit, (
            "after some failures in a row nothing is sent any more"
        )
        assert it.traffic.over == "model"


@pytest.mark.parametrize(
    ("model", "key", "status"), [("broke/one", KEY, 402), ("good/one", "sk-another-key", 401)]
)
async def test_without_money_or_with_a_wrong_key_an_endpoint_is_asked_once(
    model: str, key: str, status: int
) -> None:
    async with door(model, key=key) as it:
        for _ in range(3):
            assert (await it.chat())[0] == status
        assert len(it.endpoint.requests) == 1
        assert key not in it.traffic.last_error
        assert "***" in it.traffic.last_error


async def test_an_error_told_with_status_200_is_an_error() -> None:
    async with door("masked/one") as it:
        status, answer = await it.chat()
        assert status == relays.GIVEN_UP
        assert "Provider returned error" in answer["error"]["message"]


async def test_a_key_that_an_endpoint_quotes_does_not_reach_the_environment() -> None:
    async with door("leaky/one") as it:
        _, answer = await it.chat()
        assert answer["choices"][0]["message"]["content"].endswith("you are Bearer ***")


async def test_the_budget_bounds_what_an_environment_can_spend() -> None:
    async with door("good/one", budget=3) as it:
        statuses = [(await it.chat(n=2))[0] for _ in range(3)]
        assert statuses == [200, relays.GIVEN_UP, relays.GIVEN_UP]
        assert it.traffic.completions == 2


async def test_no_answer_is_waited_for_beyond_the_deadline() -> None:
    async with door("slow/one", ends_at=time.monotonic() + 0.3) as it:
        status, answer = await it.chat()
        assert (status, "no answer in time" in answer["error"]["message"]) == (
            relays.GIVEN_UP,
            True,
        )


async def test_who_hangs_up_takes_back_what_was_asked() -> None:
    async with door("slow/one") as it:
        asking = asyncio.create_task(it.chat())
        await it.endpoint.asked_slow.wait()
        assert it.traffic.in_flight == 1
        asking.cancel()
        await it.endpoint.hung_up.wait()


async def test_only_a_doors_name_opens_it_and_only_completions_go_through() -> None:
    async with door("good/one") as it:
        root = it.address.rsplit("/", 2)[0]
        for url in (f"{root}/guess/v1/chat/completions", f"{it.address}/keys"):
            async with it.client.post(url, json={}) as reply:
                assert reply.status == 404
        async with it.client.post(f"{it.address}/chat/completions", data=b"no JSON") as reply:
            assert reply.status == 400
        assert not it.endpoint.requests


def request_for(model: TestedModel, folder: Path, service: tuple[str, ...] = ()) -> Request:
    """A test of one model with an environment that nobody starts."""
    program = EnvironmentProgram(
        name="e", path=Path("e.py"), interpreter="python", working_directory=folder
    )
    return Request(
        draft="d",
        program=program,
        env={},
        num_steps=1,
        group_size=2,
        models=(model,),
        base_model="m",
        created_at=0.0,
        service=service,
    )


async def test_a_model_of_a_service_that_has_keys_is_asked_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tester is handed that key alone; a model of an endpoint needs the endpoint's."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-service")
    seen: list[Destination] = []

    def opened(_: Relay, to: Destination) -> tuple[str, None]:
        seen.append(to)
        return "http://relay", None

    async def test_model(self: tester.Tester, one: TestedModel, *_: Any) -> None:
        self._end(one, Ended())

    monkeypatch.setattr(Relay, "open", opened)
    monkeypatch.setattr(tester.Tester, "_test_model", test_model)
    common: dict[str, Any] = {
        "name": "m",
        "base": "m",
        "tokenizer": "",
        "stem": "m",
        "wandb_run": "w",
    }
    local = TestedModel(model="local:m", scale="local", service_url="http://127.0.0.1:9", **common)
    request = request_for(local, tmp_path)
    await tester.Tester(folder.TestFolder(tmp_path), request).run()
    assert [(to.base_url, to.key) for to in seen] == [
        (f"http://127.0.0.1:9/runs/{tmp_path.name}/v1", "tml-of-the-service")
    ]
    assert keys_for(request) == ["TINKER_API_KEY"]
    remote = TestedModel(model="m", scale="custom", **common)
    assert "TINKER_API_KEY" not in keys_for(msgspec.structs.replace(request, models=(remote,)))


async def test_the_key_of_a_services_sampler_goes_to_the_tester_and_not_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tester starts the service; whatever the variable is called."""
    monkeypatch.setattr(environ, "_held_back", set[str]())
    monkeypatch.setenv("GPU2_KEY", "hunter2222")
    monkeypatch.setenv("GPU3", "hunter3333")
    given = dict[str, str]()

    def detach(*taken: Any) -> None:
        given.update(taken[3])

    monkeypatch.setattr(folder, "detach", detach)
    one = TestedModel(model="local:m", scale="local", name="m", base="m", tokenizer="", stem="m")
    request = request_for(one, tmp_path, ("--samplers", "http://a:1 GPU2_KEY,http://b:1 GPU3"))
    folder.start(request)
    assert (given["GPU2_KEY"], given["GPU3"]) == ("hunter2222", "hunter3333")
    tester.Tester(folder.TestFolder(tmp_path), request)
    environment = environ.with_keys()
    assert not {"GPU2_KEY", "GPU3"} & environment.keys()
