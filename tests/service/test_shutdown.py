"""A service that is told to end: answers under way end at once, with a reason, and the log stays
quiet.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from deadlines import until

from halteres.service.inference.http import ServiceEnds, Shutdown

from .live_service import LiveService
from .test_inference_streams import BODY, PATHS
from .test_process import WAIT_S, running

ENDS = "The service ends."


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_stream_under_way_ends_with_an_event_that_says_so(
    scene: LiveService, path: str, body: dict[str, Any]
) -> None:
    scene.engine.latency_s["piece"] = 0.005
    async with scene.http.post(f"{scene.url}{path}", json={**body, "stream": True}) as told:
        assert told.status == 200
        await told.content.readline()
        scene.engine.block("piece")
        scene.server.end()
        rest = (await told.content.read()).decode()
    assert ENDS in rest
    assert scene.engine.under_way["stream"] == 0


@pytest.mark.parametrize(("call", "more"), [("piece", {"stream": True}), ("sample", {})])
async def test_what_has_not_begun_is_refused_with_503(
    scene: LiveService, call: str, more: dict[str, Any]
) -> None:
    held = scene.engine.block(call)
    asking = asyncio.create_task(scene.ask("/v1/completions", **BODY, **more))
    await held.inside()
    scene.server.end()
    status, refusal = await asking
    assert (status, refusal["error"]["message"].startswith(ENDS)) == (503, True)


async def test_a_block_with_a_deadline_of_its_own_keeps_its_own_error() -> None:
    shutdown = Shutdown()
    with pytest.raises(TimeoutError):
        async with shutdown.cuts_short():
            raise TimeoutError
    shutdown.begin()
    shutdown.begin()
    with pytest.raises(ServiceEnds):
        async with shutdown.cuts_short():
            await asyncio.Event().wait()


@pytest.mark.runs
async def test_sigterm_under_a_stream_ends_the_process_without_a_traceback(tmp_path: Path) -> None:
    """A stream whose client reads nothing is no reason to wait either."""
    with running(tmp_path) as process:
        async with asyncio.timeout(WAIT_S), aiohttp.ClientSession(process.url) as http:
            body = {"prompt": "1", "max_tokens": 1000, "n": 256, "stream": True, "ignore_eos": True}
            async with (
                http.post("/v1/completions", json=body) as told,
                http.post("/v1/completions", json=body),
            ):
                await told.content.readline()
                process.popen.send_signal(signal.SIGTERM)
                assert b"[DONE]" in await told.content.read()
        _, said = await asyncio.to_thread(process.popen.communicate, timeout=WAIT_S)
    assert "Traceback" not in said
    assert "Exception in ASGI" not in said


@pytest.mark.parametrize("path", ["/v1/completions", "/api/v1/create_session", "/generate"])
async def test_a_client_that_leaves_while_its_body_is_read_ends_quietly(
    scene: LiveService, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = urlsplit(scene.url)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: 100\r\n\r\n{{".encode()
    )
    await writer.drain()
    await until(lambda: scene.server.server_state.tasks)
    writer.close()
    await until(lambda: not scene.server.server_state.tasks)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_bad_requests_are_not_a_line_of_the_log_each(
    scene: LiveService, caplog: pytest.LogCaptureFixture
) -> None:
    where = urlsplit(scene.url)
    for _ in range(5):
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"400" in await reader.read()
        writer.close()
    assert len([record for record in caplog.records if "Invalid HTTP" in record.getMessage()]) <= 1
