"""Rubbish on every route, tricks in paths, inference that nobody means: a 4xx, never a 5xx, never a
dead engine.

`test_wire_fuzz` has the Tinker API's own bodies, spoiled.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from contract.requirements import proves

from halteres.models import TINY

from .live_service import LiveService
from .test_order import passed

SEED = 7
WAIT_S = 60
PROTOBUF = "application/x-protobuf"
NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, -0.0, "", "x" * 5000, "../../etc/passwd", "\x00",
    "\ud7ff", "tinker://a/weights/../../x", "tinker://%2e%2e/weights/x", [], [[]], {}, {"a": {"b": {}}}, [None],
    ["a", 1, None],
)  # fmt: skip
RAW = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe",
    b'{"a":NaN}',
    b'{"seq_id":1e999}',
    b"[" * 50_000,
    b'{"a":' * 20_000,
    b"\x00" * 64,
)

ROUTES = (
    *(
        "client/config",
        "client/dynamic_config",
        "create_session",
        "session_heartbeat",
        "telemetry",
        "sessions/search",
    ),
    *(
        "create_model",
        "get_info",
        "forward_backward",
        "forward",
        "optim_step",
        "create_custom_loss",
        "unload_model",
    ),
    *("save_weights", "load_weights", "save_weights_for_sampler", "save_weights_external"),
    *(
        "create_sampling_session",
        "join_sampling_session",
        "asample",
        "weights_info",
        "copy_weights",
    ),
    *("retrieve_future", "cancel_future"),
)
"""All that take a body; `test_wire_fuzz` spoils right ones."""


def spoiled(body: Any, chance: random.Random) -> Any:
    """The body with one of its values made nasty, or gone."""
    spoilt = copy.deepcopy(body)
    places = [*_places(spoilt), (spoilt, "unknown")]
    holder, key = chance.choice(places)
    if chance.random() < 0.2 and isinstance(holder, dict):
        holder.pop(key, None)
    else:
        holder[key] = copy.deepcopy(chance.choice(NASTY))
    return spoilt


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield value, key
        yield from _places(item)


async def test_raw_rubbish_is_refused_on_every_route(scene: LiveService) -> None:
    for route in ROUTES:
        for content_type in ("application/json", PROTOBUF, "text/plain", "multipart/form-data"):
            for body in RAW:
                status, answer = await scene.post(route, body, **{"Content-Type": content_type})
                assert status < 500, (route, content_type, body[:20], answer)
    assert await alive(scene)


PATHS = (
    "..",
    ".",
    "a%2Fb",
    "%2e%2e%2f%2e%2e",
    "%00",
    "a" * 3000,
    "weights",
    "é",
    "a;b",
    "a?b",
    "//",
    " ",
)
RESTS = (
    ("GET", "training_runs/{0}"),
    ("GET", "training_runs/{0}/checkpoints"),
    ("DELETE", "training_runs/{0}/checkpoints/weights/{0}"),
    ("DELETE", "training_runs/x/checkpoints/{0}/{0}"),
    ("POST", "training_runs/{0}/checkpoints/weights/{0}/publish"),
    ("PUT", "training_runs/{0}/checkpoints/weights/{0}/ttl"),
    ("GET", "training_runs/{0}/checkpoints/external_weights/{0}/external_weights_urls"),
    ("GET", "training_runs/{0}/checkpoints/weights/{0}/archive"),
    ("GET", "sessions/{0}"),
    ("GET", "sessions/{0}/trace_export"),
    ("PUT", "sessions/{0}/project"),
    ("POST", "sessions/{0}/finish"),
    ("GET", "samplers/{0}"),
    ("GET", "checkpoints?limit={0}&offset={0}"),
    ("GET", "training_runs?limit={0}"),
    ("GET", "audit?day={0}"),
)


@proves("id:path")
async def test_tricks_in_paths_and_queries_are_refused(scene: LiveService) -> None:
    for method, path in RESTS:
        for trick in PATHS:
            url = f"{scene.url}/api/v1/{path.format(trick)}"
            async with scene.http.request(
                method, url, json={} if method in ("POST", "PUT") else None
            ) as response:
                assert response.status < 500, (method, path, trick, await response.text())
    for address in ("../../../etc/passwd", "%2e%2e/keys.json", "x/y/z"):
        async with scene.http.get(f"{scene.url}/halteres/v1/files/{address}") as response:
            assert 400 <= response.status < 500
    assert await alive(scene)


INFERENCE = (
    "v1/completions",
    "v1/chat/completions",
    "v1/responses",
    "generate",
    "oai/api/v1/chat/completions",
    "anthropic/api/v1/messages",
)


async def test_spoiled_inference_requests_are_refused(scene: LiveService) -> None:
    chance = random.Random(SEED)
    message = [{"role": "user", "content": "hi"}]
    right = {
        "model": TINY, "prompt": "a", "input": "a", "messages": message, "max_tokens": 2, "n": 1, "temperature": 1.0, "top_p": 1.0,
        "seed": 1, "stop": ["x"], "logprobs": 1, "stream": False, "text": "a", "sampling_params": {"max_new_tokens": 2},
    }  # fmt: skip
    for route in INFERENCE:
        for _ in range(40):
            sent = json.dumps(spoiled(right, chance)).encode()
            async with scene.http.post(f"{scene.url}/{route}", data=sent) as response:
                assert response.status < 500, (SEED, route, sent, await response.text())
        for body in RAW:
            async with scene.http.post(f"{scene.url}/{route}", data=body) as response:
                assert response.status < 500, (route, body[:20])
    assert await alive(scene)


@proves("lora:absurd")
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]},
        {"messages": [{"role": "user", "content": [{"type": {}}]}]},
        {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"self": 1}},
    ],
)
async def test_parts_and_arguments_of_no_known_type_are_refused(
    scene: LiveService, body: dict[str, Any]
) -> None:
    assert (await scene.ask("/v1/chat/completions", **body))[0] == 400


async def test_an_sdk_whose_version_is_no_number_anybody_counts_to_is_another_client(
    scene: LiveService,
) -> None:
    headers = {"User-Agent": f"AsyncTinker/Python {'9' * 5000}.1.1"}
    async with scene.http.get(f"{scene.url}/api/v1/checkpoints", headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize("rank", [0, -1, 10**9, 2**62])
async def test_absurd_ranks_fail_typed(scene: LiveService, rank: int) -> None:
    body = {
        "session_id": await scene.session(),
        "model_seq_id": 0,
        "base_model": TINY,
        "lora_config": {"rank": rank},
    }
    status, answer = await scene.post("create_model", body)
    outcome = (
        await scene.redeem(answer["request_id"]) if status == 200 else {"error": answer["detail"]}
    )
    assert (status, outcome.get("category", "user")) in ((200, "user"), (400, "user"))
    assert "rank" in outcome["error"]


async def alive(scene: LiveService) -> bool:
    """The engine answers another client's request."""
    async with asyncio.timeout(WAIT_S):
        return isinstance(await scene.redeem(await passed(scene, await scene.model(), 1)), bytes)
