"""Malformed requests, by the thousand: a 4xx or a typed failure, never a 5xx, never a dead engine, never a hang.

Each case starts from a request that is right and spoils it; the spoilers are drawn by a seed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard
from contract.requirements import proves

from halteres.models import TINY

from .scenes import Scene
from .test_order import pass_body, passed

SEED = 7
ROUNDS = 12
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


def requests(model: str, sampler: str, session: str) -> dict[str, dict[str, Any]]:
    """A right body for every route that takes one; paths may hold the tricks as well."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    datum = {
        "model_input": prompt,
        "loss_fn_inputs": {
            "target_tokens": {"data": [6, 7], "dtype": "int64", "shape": [2]},
            "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
        },
    }
    inputs = {"data": [datum], "loss_fn": "cross_entropy"}
    graph = {
        "format": 1,
        "nodes": [{"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}}],
    }
    return {
        "client/config": {"sdk_version": "0.38.0"},
        "client/dynamic_config": {},
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "x"},
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 900, "base_model": TINY, "lora_config": {"rank": 4}},
        "get_info": {"model_id": model},
        "forward_backward": {"model_id": model, "seq_id": 900, "forward_backward_input": inputs},
        "forward": {"model_id": model, "seq_id": 900, "forward_input": inputs},
        "optim_step": {"model_id": model, "seq_id": 900, "adam_params": {"learning_rate": 1e-4, "beta1": 0.9}},
        "save_weights": {"model_id": model, "seq_id": 900, "path": "a", "ttl_seconds": 7200, "overwrite": True},
        "load_weights": {"model_id": model, "seq_id": 900, "path": f"tinker://{model}/weights/a", "optimizer": True},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 900, "path": "b", "kind": "snapshot"},
        "save_weights_external": {"model_id": model, "seq_id": 900, "path": "c", "age_encryption_recipients": ["x"]},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 900, "base_model": TINY},
        "join_sampling_session": {"sampling_session_id": sampler},
        "asample": {
            "sampling_session_id": sampler,
            "seq_id": 900,
            "num_samples": 1,
            "prompt": prompt,
            "sampling_params": {"max_tokens": 2, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": 3, "top_p": 1},
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
            "target_prompt_logprobs": {"data": [6], "dtype": "int64", "shape": [1, 1]},
            "prompt_alt_tokens_k": 1,
        },
        "retrieve_future": {"request_id": "x", "allow_metadata_only": True},
        "retrieve_futures": {"target": {"type": "sampling_session", "sampling_session_id": sampler}, "timeout": 0},
        "cancel_future": {"request_id": "x"},
        "create_custom_loss": {
            "session_id": session,
            "custom_loss_seq_id": 900,
            "name": "l",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": graph,
        },
        "telemetry": {"events": []},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/a"},
        "copy_weights": {"source_path": f"tinker://{model}/weights/a", "session_id": session, "model_seq_id": 901},
        "sessions/search": {"user_metadata": {"a": "b"}, "limit": 3},
    }  # fmt: skip


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
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


async def settled(scene: Scene, answer: Any) -> None:
    """A future that was given is kept, or waits for its turn; a later request must not be stuck behind it."""
    if isinstance(answer, dict) and isinstance(answer.get("request_id"), str):
        status, outcome = await scene.post("retrieve_future", {"request_id": answer["request_id"]})
        assert status in (200, 408, 410), outcome
        if isinstance(outcome, dict) and "error" in outcome:
            assert outcome["category"] in ("user", "server")
            assert "error id" not in outcome["error"], outcome


@proves("wire:nothing-breaks-it")
async def test_spoiled_json_is_refused_or_fails_typed_on_every_route(scene: Scene) -> None:
    chance = random.Random(SEED)
    scene.service.futures.poll_s = 0.2
    session = await scene.session()
    sampler = (
        await scene.post(
            "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": TINY}
        )
    )[1]
    seq = 1000
    for round_ in range(ROUNDS):
        model = await scene.model(session, round_)
        for route, body in requests(model, sampler["sampling_session_id"], session).items():
            seq += 1
            broken = spoiled(body, chance)
            if isinstance(broken.get("seq_id"), int) and broken["seq_id"] == 900:
                broken["seq_id"] = seq if route == "asample" else 1
            sent = json.dumps(broken).encode()
            status, answer = await scene.post(route, sent, **{"Content-Type": "application/json"})
            assert status < 500, (SEED, route, broken, answer)
            if status >= 400:
                assert answer["detail"], (route, broken)
            await settled(scene, answer)
    assert await alive(scene)


async def test_raw_rubbish_is_refused_on_every_route(scene: Scene) -> None:
    model, session = await scene.model(), await scene.session()
    for route in requests(model, "x", session):
        for content_type in ("application/json", PROTOBUF, "text/plain", "multipart/form-data"):
            for body in RAW:
                status, answer = await scene.post(route, body, **{"Content-Type": content_type})
                assert status < 500, (route, content_type, body[:20], answer)
    assert await alive(scene)


@proves("wire:zstd")
async def test_spoiled_protobuf_and_zstd_are_refused_or_fail_typed(scene: Scene) -> None:
    chance = random.Random(SEED)
    scene.service.futures.poll_s = 0.05  # those behind the first gap in the numbers wait for their turn
    model = await scene.model()
    for seq in range(1, 200):
        whole = pass_body(model, seq)
        sent, headers = _spoiled_bytes(whole, chance)
        status, answer = await scene.post("forward_backward", sent, **{"Content-Type": PROTOBUF, **headers})
        assert status < 500, (SEED, seq, answer)
        await settled(scene, answer)
    bomb = zstandard.ZstdCompressor().compress(bytes(600 * 2**20))
    status, answer = await scene.post(
        "forward_backward", bomb, **{"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    )
    assert status in (400, 413)
    assert "too large" in answer["detail"]
    assert await alive(scene)


def _spoiled_bytes(whole: bytes, chance: random.Random) -> tuple[bytes, dict[str, str]]:
    how = chance.randrange(5)
    if how == 0:
        return whole[: chance.randrange(len(whole))], {}
    if how == 1:
        place = chance.randrange(len(whole))
        return whole[:place] + bytes([chance.randrange(256)]) + whole[place + 1 :], {}
    if how == 2:
        return chance.randbytes(chance.randrange(1, 300)), {}
    packed = zstandard.ZstdCompressor().compress(whole)
    if how == 3:
        return packed[: chance.randrange(1, len(packed))], {"Content-Encoding": "zstd"}
    return chance.randbytes(50), {"Content-Encoding": chance.choice(["zstd", "gzip", "br", "x"])}


PATHS = ("..", ".", "a%2Fb", "%2e%2e%2f%2e%2e", "%00", "a" * 3000, "weights", "é", "a;b", "a?b", "//", " ")
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
async def test_tricks_in_paths_and_queries_are_refused(scene: Scene) -> None:
    for method, path in RESTS:
        for trick in PATHS:
            url = f"{scene.url}/api/v1/{path.format(trick)}"
            async with scene.http.request(method, url, json={} if method in ("POST", "PUT") else None) as response:
                assert response.status < 500, (method, path, trick, await response.text())
    for address in ("../../../etc/passwd", "%2e%2e/keys.json", "x/y/z"):
        async with scene.http.get(f"{scene.url}/halteres/v1/files/{address}") as response:
            assert 400 <= response.status < 500
    assert await alive(scene)


INFERENCE = (
    "v1/completions",
    "v1/chat/completions",
    "generate",
    "oai/api/v1/chat/completions",
    "anthropic/api/v1/messages",
)


async def test_spoiled_inference_requests_are_refused(scene: Scene) -> None:
    chance = random.Random(SEED)
    message = [{"role": "user", "content": "hi"}]
    right = {
        "model": TINY, "prompt": "a", "messages": message, "max_tokens": 2, "n": 1, "temperature": 1.0, "top_p": 1.0,
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
async def test_parts_and_arguments_of_no_known_type_are_refused(scene: Scene, body: dict[str, Any]) -> None:
    assert (await scene.ask("/v1/chat/completions", **body))[0] == 400


async def test_an_sdk_whose_version_is_no_number_anybody_counts_to_is_another_client(scene: Scene) -> None:
    headers = {"User-Agent": f"AsyncTinker/Python {'9' * 5000}.1.1"}
    async with scene.http.get(f"{scene.url}/api/v1/checkpoints", headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize("rank", [0, -1, 10**9, 2**62])
async def test_absurd_ranks_fail_typed(scene: Scene, rank: int) -> None:
    body = {"session_id": await scene.session(), "model_seq_id": 0, "base_model": TINY, "lora_config": {"rank": rank}}
    status, answer = await scene.post("create_model", body)
    outcome = await scene.redeem(answer["request_id"]) if status == 200 else {"error": answer["detail"]}
    assert (status, outcome.get("category", "user")) in ((200, "user"), (400, "user"))
    assert "rank" in outcome["error"]


async def alive(scene: Scene) -> bool:
    """The engine answers another client's request."""
    async with asyncio.timeout(WAIT_S):
        return isinstance(await scene.redeem(await passed(scene, await scene.model(), 1)), bytes)
