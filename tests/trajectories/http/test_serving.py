"""The server as operators start it: its commands, its first line, its patience with connections."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
import requests
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from halteres.loopback import open_listener
from halteres.trajectories import server
from trajectories.scenes import TRAINER, group

LARGE, VERY_LARGE = 64 * 1024, 512 * 1024
"""Bytes of bodies: uvicorn stops reading a connection that holds more than the first."""

TOKEN = "correct-horse-battery"
RUN_API = ("-c", "import sys; from halteres.trajectories.__main__ import run_api; sys.exit(run_api())")


@contextmanager
def started(
    folder: Path, *words: str, command: tuple[str, ...] = ("-m", "halteres.trajectories")
) -> Iterator[list[str]]:
    """A server on a free port; gives the lines it begins with, the last of which names its URL."""
    environment = {**os.environ, "HALTERES_HOME": str(folder), "HALTERES_TRAJECTORY_TOKEN": TOKEN}
    process = subprocess.Popen(
        [sys.executable, *command, "--port", "0", *words], stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        assert process.stdout
        lines: list[str] = []
        while "answers on" not in (lines or [""])[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended"
        yield lines
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout:
            process.stdout.close()


def url_in(line: str) -> str:
    return line.split(" answers on ")[1].split(": ")[0]


def with_login(url: str) -> str:
    return url.replace("http://", f"http://x:{TOKEN}@")


def ended(folder: Path, *words: str, command: tuple[str, ...] = ("-m", "halteres.trajectories")) -> tuple[int, str]:
    """Exit code and stderr of a server that does not start."""
    found = subprocess.run(
        [sys.executable, *command, "--port", "0", *words],
        env={**os.environ, "HALTERES_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return found.returncode, found.stderr


def test_old_clients_reach_a_server_with_a_token_by_its_url_alone(tmp_path: Path) -> None:
    """aiohttp as atroposlib 0.4.0 calls it (a GET with a JSON body among them), requests as its trainers do."""

    async def environment(url: str) -> tuple[int, int]:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/status-env", json={"env_id": 0}) as answer:
                polled = answer.status
            async with session.post(f"{url}/scored_data", data=json.dumps(group()).encode()) as answer:
                return polled, answer.status

    with started(tmp_path) as lines:
        url = url_in(lines[-1])
        assert asyncio.run(environment(with_login(url))) == (200, 200)
        assert requests.post(f"{with_login(url)}/register", json=TRAINER, timeout=10).status_code == 200
        assert requests.get(f"{with_login(url)}/info", timeout=10).json()["batch_size"] == 4
        assert requests.get(f"{url}/info", timeout=10).status_code == 401
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        status = requests.get(f"{url}/status", headers=bearer, timeout=10).json()
        assert status == {"current_step": 0, "queue_size": 1}
    with started(tmp_path) as lines:
        assert lines[-1].endswith(": 1 groups wait, step 0.\n"), "it says what waits, in the default database"


def test_run_api_is_the_original_s_command(tmp_path: Path) -> None:
    with started(tmp_path, "--reload", "--host", "127.0.0.1", command=RUN_API) as lines:
        reload, here, file, answers = lines
    assert "--reload is of no use here" in reload
    assert file == f"The queue is in {tmp_path}/trajectories.sqlite, a new file.\n"
    assert "Only this machine is served" in here and "--host 0.0.0.0" in here
    assert answers.startswith("The trajectory server answers on http://127.0.0.1:")
    assert answers.endswith("0 groups wait, no trainer yet.\n")


@pytest.mark.parametrize("command", [RUN_API, ("-m", "halteres", "serve", "trajectories")])
def test_beyond_this_machine_it_wants_a_token_or_to_be_told(tmp_path: Path, command: tuple[str, ...]) -> None:
    code, said = ended(tmp_path, "--host", "0.0.0.0", command=command)
    assert code == 1
    assert said.startswith("error: 0.0.0.0 is no address of the loopback.")
    assert "--token-file" in said and "HALTERES_TRAJECTORY_TOKEN" in said and "--insecure" in said


async def test_many_requests_of_one_connection_are_not_counted_together(connections: str) -> None:
    ask = b"POST / HTTP/1.1\r\nContent-Length: 60000\r\n\r\n" + b"x" * 60000
    said = await exchanged(connections, ask * 2 + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert said.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("size", [LARGE - 1, LARGE, LARGE + 1, VERY_LARGE, VERY_LARGE + 1, 5 * VERY_LARGE])
async def test_a_body_arrives_whole_however_large(connections: str, size: int) -> None:
    head = b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size
    assert (await exchanged(connections, head + b"x" * size)).endswith(b"\r\n\r\n%d" % size)
    chunks = b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(size // 65536))
    head = b"POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    said = await exchanged(connections, head + chunks + b"0\r\n\r\n")
    assert said.endswith(b"\r\n\r\n%d" % (size // 65536 * 65536))


@pytest.mark.parametrize("size", [2 * LARGE, 3 * VERY_LARGE])
async def test_a_large_body_that_nobody_reads_is_let_pass(connections: str, size: int) -> None:
    ask = b"POST /unread HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    said = await exchanged(connections, ask * 2 + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert re.findall(rb"\r\n\r\n(unread|\d+)", said) == [b"unread", b"unread", b"0"]


async def test_large_bodies_of_pipelined_requests_keep_their_order(connections: str) -> None:
    sizes = [LARGE + 1, 3, 3 * VERY_LARGE, 2 * LARGE, LARGE, 2 * VERY_LARGE]
    asked = (b"POST /slow HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size for size in sizes)
    said = await exchanged(connections, b"".join(asked) + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert re.findall(rb"\r\n\r\n(\d+)", said) == [b"%d" % size for size in [*sizes, 0]]


@pytest.mark.parametrize("size", [2 * LARGE, 2 * VERY_LARGE])
@pytest.mark.parametrize("path", [b"/late", b"/held"])
async def test_a_pipelined_body_keeps_its_beginning(connections: str, path: bytes, size: int) -> None:
    """Whoever reads or waits for a message resumes the connection, and the body behind may have no place yet."""
    body = random.Random(size).randbytes(size)
    for first in (b"", b"abc"):
        asked = b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (path, len(first)) + first
        asked += b"POST /checksum HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size + body
        said = await exchanged(connections, asked + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert re.findall(rb"\r\n\r\n(\d+)", said) == [b"%d" % len(first), b"%d" % zlib.crc32(body), b"0"]


@pytest.mark.parametrize("size", [7, 2 * LARGE, 2 * VERY_LARGE])
async def test_what_comes_behind_the_last_request_harms_nobody(connections: str, size: int) -> None:
    """Also where a large body came before: the parser behind it is as lenient as the first."""
    asked = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    asked += b"GET / HTTP/1.1\r\nConnection: close\r\n\r\nGET /unread HTTP/1.1\r\n\r\n"
    assert re.findall(rb"\r\n\r\n(unread|\d+)", await exchanged(connections, asked)) == [b"%d" % size, b"0"]


@pytest.mark.parametrize("size", [3, 2 * LARGE, 2 * VERY_LARGE])
async def test_a_client_that_waits_to_be_told_to_go_on_is_told(connections: str, size: int) -> None:
    head = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(connections))
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"x" * size)
        assert (await reader.read()).endswith(b"\r\n\r\n%d" % size)
        writer.close()


@pytest.mark.parametrize("size", [2 * LARGE, 2 * VERY_LARGE])
@pytest.mark.parametrize("sent", [0, LARGE, LARGE + 5])
async def test_whoever_waits_for_a_body_is_told_that_its_client_is_gone(
    connections: str, sent: int, size: int, gone: asyncio.Event
) -> None:
    async with asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", int(connections))
        writer.write(b"POST /slow HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size + b"x" * sent)
        await writer.drain()
        writer.close()
        await gone.wait()


@pytest.fixture
def gone() -> asyncio.Event:
    """Set when a body will not come any more."""
    return asyncio.Event()


@pytest.fixture
async def connections(gone: asyncio.Event) -> AsyncIterator[str]:
    """A server's connections over an app that counts the bytes of a body, or sums them up; gives their port.

    It reads a body late at /slow, answers late at /late, and at /held waits meanwhile for the client to go.
    """

    async def body_of(scope: Scope, receive: Receive) -> bytes:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body, more = body + message.get("body", b""), message.get("more_body", False)
        return body

    async def answer_of(scope: Scope, receive: Receive) -> str:
        if scope["path"] == "/unread":
            return "unread"
        body = await body_of(scope, receive)
        if scope["path"] == "/late":
            await asyncio.sleep(0.02)
        elif scope["path"] == "/held":
            with suppress(TimeoutError):
                await asyncio.wait_for(receive(), 0.02)
        return str(zlib.crc32(body) if scope["path"] == "/checksum" else len(body))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(0.02)
        try:
            said = await answer_of(scope, receive)
        except ClientDisconnect:
            gone.set()
        else:
            await PlainTextResponse(said)(scope, receive, send)

    with open_listener(0) as listening:
        running = uvicorn.Server(uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None))
        task = asyncio.create_task(running.serve([listening]))
        yield str(listening.getsockname()[1])
        running.should_exit = True
        await task


async def exchanged(port: str, sent: bytes) -> bytes:
    """Everything a server says until it closes the connection."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(sent)
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_nobody_chooses_who_they_are() -> None:
    """The client's address decides whether replies are compressed; a header that anybody can send does not."""
    seen = list[tuple[str, int]]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"])

    config = server._config(app)  # pyright: ignore[reportPrivateUsage]
    config.load()
    headers = [(b"x-forwarded-for", b"10.1.2.3"), (b"x-forwarded-proto", b"https")]
    scope = {"type": "http", "client": ("127.0.0.1", 4), "scheme": "http", "headers": headers}
    await config.loaded_app(scope, None, None)  # type: ignore[arg-type]
    assert (seen, scope["scheme"]) == ([("127.0.0.1", 4)], "http")
