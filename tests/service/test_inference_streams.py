"""Streams that end otherwise than well: a client that leaves, an engine that dies, an error under
way.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from deadlines import until

from halteres.engine.protocol import EngineGone, ModelInfo, Piece, TopK
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.errors import ServerError
from halteres.service.inference import http as routed
from halteres.service.inference.answering import merged
from halteres.service.sampling.samples import without

from .inference_fixtures import events, read
from .live_service import LiveService

BODY: dict[str, Any] = {
    "prompt": "What is 17 + 25?",
    "max_tokens": 30,
    "seed": 3,
    "ignore_eos": True,
}
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", BODY),
    ("/v1/completions", BODY | {"prompt": ["a", "b", "c"]}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "n": 2},
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "max_tokens": 30},
    ),
    ("/v1/responses", {"input": "Hi", "ignore_eos": True, "max_output_tokens": 30}),
    ("/generate", {"text": "Hi", "sampling_params": {"ignore_eos": True}}),
    ("/generate", {"prompt": "Hi", "ignore_eos": True}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_client_that_leaves_a_stream_frees_its_rows(
    scene: LiveService, path: str, body: dict[str, Any]
) -> None:
    held = scene.engine.block("piece")
    response = asyncio.create_task(
        scene.http.post(f"{scene.url}{path}", json={**body, "stream": True})
    )
    await held.inside()
    assert scene.engine.under_way["stream"] >= 1
    response.cancel()
    await asyncio.gather(response, return_exceptions=True)
    await until(lambda: scene.engine.under_way["stream"] == 0)
    await until(
        lambda: not scene.rows(
            "SELECT id FROM requests WHERE kind = 'generate' AND state = 'accepted'"
        )
    )
    assert scene.rows("SELECT DISTINCT state FROM requests WHERE kind = 'generate'") == [
        ("failed_user",)
    ]


async def test_a_client_that_leaves_after_the_first_pieces_frees_its_rows(
    scene: LiveService,
) -> None:
    scene.engine.latency_s["piece"] = 0.01
    async with scene.http.post(
        f"{scene.url}/v1/completions", json={**BODY, "max_tokens": 900, "stream": True}
    ) as told:
        first = read(await told.content.readline())
        assert first["choices"][0]["index"] == 0
        assert scene.engine.under_way["stream"] == 1
        told.close()
    await until(lambda: scene.engine.under_way["stream"] == 0)


@asynccontextmanager
async def unread(scene: LiveService) -> AsyncIterator[None]:
    """A client that has asked for 600 long sequences, and reads nothing, while the block runs."""
    body = json.dumps({**BODY, "max_tokens": 4, "n": 600, "logprobs": 60, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(
            client, ("127.0.0.1", int(scene.url.rpartition(":")[2]))
        )
        await asyncio.get_running_loop().sock_sendall(client, head.encode() + body)
        await until(lambda: scene.engine.calls["stream"] == 1)
        yield


async def test_a_stream_that_nobody_reads_keeps_no_place_in_the_engine(scene: LiveService) -> None:
    async with unread(scene), asyncio.timeout(20):
        status, _ = await scene.ask("/v1/completions", **{**BODY, "max_tokens": 1}, n=600)
        assert status == 200


async def test_a_stream_that_nobody_reads_ends(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routed, "UNREAD_S", 0.05)
    async with unread(scene):
        await until(lambda: "has read nothing" in caplog.text)
        await until(
            lambda: scene.rows("SELECT state FROM requests WHERE kind = 'generate'")
            == [("failed_user",)]
        )


async def test_a_client_that_leaves_before_a_whole_answer_frees_its_rows(
    scene: LiveService,
) -> None:
    held = scene.engine.block("sample")
    response = asyncio.create_task(scene.ask("/v1/completions", **BODY))
    await held.inside()
    assert scene.engine.under_way["sample"] == 1
    response.cancel()
    with pytest.raises(asyncio.CancelledError):
        await response
    await until(lambda: scene.engine.under_way["sample"] == 0)


async def test_an_engine_that_dies_under_a_stream_is_followed_by_one_that_goes_on(
    scene: LiveService,
) -> None:
    _, whole = await scene.ask("/v1/completions", **BODY, logprobs=2, n=2)
    dying = scene.engine
    dying.latency_s["piece"] = 0.005
    body = {**BODY, "logprobs": 2, "n": 2, "stream": True, "return_token_ids": True}
    async with scene.http.post(f"{scene.url}/v1/completions", json=body) as response:
        lines = [await response.content.readline()]
        await scene.host.die()
        lines += [line async for line in response.content]
    chunks = [read(line) for line in lines if line.startswith(b"data: ")]
    assert chunks.pop() == "[DONE]"
    assert scene.engine is not dying
    assert scene.engine.calls["stream"] == 1
    for choice in whole["choices"]:
        pieces = [
            chunk["choices"][0]
            for chunk in chunks
            if chunk["choices"][0]["index"] == choice["index"]
        ]
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        told = [value for piece in pieces for value in piece["logprobs"]["top_logprobs"]]
        assert told == choice["logprobs"]["top_logprobs"]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]


async def test_a_stream_of_an_engine_that_is_not_exact_ends_with_it_rather_than_in_another_draw(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def inexact(engine: ScriptedEngine) -> ModelInfo:
        return msgspec.structs.replace(engine._info, exact=False)

    monkeypatch.setattr(ScriptedEngine, "info", inexact)
    scene.engine.latency_s["piece"] = 0.005
    async with scene.http.post(
        f"{scene.url}/v1/completions", json={**BODY, "stream": True}
    ) as response:
        await response.content.readline()
        await scene.host.die()
        last = [line async for line in response.content]
    assert "would not write the same tokens" in b"".join(last).decode()
    assert scene.engine.calls["stream"] == 0


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_an_error_before_the_first_piece_has_a_status(
    scene: LiveService, path: str, body: dict[str, Any]
) -> None:
    scene.engine.fail_next("stream", ServerError("The device is lost."), times=3)
    status, refusal = await scene.ask(path, **body, stream=True)
    assert (status, "The device is lost" in str(refusal)) == (500, True)


@pytest.mark.parametrize(("path", "body"), PATHS[:6])
async def test_an_error_under_way_is_told_in_band(
    scene: LiveService, path: str, body: dict[str, Any]
) -> None:
    fail_under_way(scene)
    told = await events(scene, path, **body)
    assert "The device is lost" in str(told[-1] if told[-1] != "[DONE]" else told[-2])
    assert len(told) > 2


def fail_under_way(scene: LiveService) -> None:
    """Every stream fails after its eighth piece: of the first ones, some are no whole character
    yet.
    """
    engine = scene.engine
    stream = engine.stream

    async def failing(*arguments: Any) -> Any:
        count = 0
        async for piece in stream(*arguments):
            yield piece
            count += 1
            if count == 8:
                raise ServerError("The device is lost.")

    engine.stream = failing  # type: ignore[method-assign]


async def test_engines_that_keep_dying_end_the_stream_with_a_reason(scene: LiveService) -> None:
    async def dying(*_: Any) -> Any:
        scene.host.restarts += 1
        raise EngineGone("The engine is gone.")
        yield

    scene.engine.stream = dying  # type: ignore[method-assign]
    status, refusal = await scene.ask("/v1/completions", **BODY, stream=True)
    assert (status, "died 3 times" in refusal["error"]["message"]) == (500, True)


async def test_overload_is_a_429_in_the_shape_of_the_route(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halteres.service.limits import Overloaded

    def full(_: Any, tenant: str) -> None:
        raise Overloaded("Too much is under way.")

    monkeypatch.setattr(type(scene.service.samples), "refuse_if_full", full)
    status, refusal = await scene.ask("/v1/completions", **BODY)
    assert (status, refusal["error"]["type"]) == (429, "rate_limit_error")
    status, refusal = await scene.ask("/v1/messages", **PATHS[3][1])
    assert (status, refusal["type"], refusal["error"]["type"]) == (429, "error", "rate_limit_error")


def test_what_was_told_is_cut_from_a_piece_with_its_likeliest_tokens() -> None:
    top = TopK(k=2, length=3, ids=bytes(range(24)), logprobs=bytes(range(24)))
    piece = Piece(
        sample=1,
        tokens=bytes(range(12)),
        logprobs=bytes(range(12)),
        version=4,
        top=top,
        stop_reason="stop",
    )
    assert without(piece, 0) is piece
    assert without(piece, 3) is None
    rest = without(piece, 1)
    assert rest is not None
    assert (rest.tokens, rest.logprobs, rest.stop_reason) == (
        bytes(range(4, 12)),
        bytes(range(4, 12)),
        "stop",
    )
    assert rest.top == TopK(k=2, length=2, ids=bytes(range(8, 24)), logprobs=bytes(range(8, 24)))


async def test_merged_streams_end_together() -> None:
    ended: list[int] = []

    async def counting(name: int, fails: bool = False) -> Any:
        try:
            for number in range(3):
                yield number
            if fails:
                raise ServerError("This one fails.")
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    with pytest.raises(ServerError):
        async for _ in merged([counting(0), counting(1, fails=True), counting(2)]):
            pass
    assert sorted(ended) == [0, 1, 2]
