"""Serving on the loopback only: the socket, and who may talk through it."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import halteres
from halteres.access_policy import AccessPolicy
from halteres.errors import Conflict, InvalidConfig
from halteres.loopback import (
    MOST_HEAD_BYTES,
    LoopErrors,
    Server,
    TooLarge,
    TooSlow,
    body_within,
    is_foreign,
    open_listener,
    url_of,
    while_connected,
)


def is_refused(**headers: str) -> bool:
    return is_foreign(Headers({"host": "127.0.0.1", **headers}))


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"]
)
def test_requests_that_name_this_machine_pass(host: str) -> None:
    assert not is_refused(host=host)
    assert not is_refused(origin=f"http://{host}")


@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "",
        "[",
    ],
)
def test_requests_that_name_another_machine_are_refused(name: str) -> None:
    assert is_refused(host=name)
    assert is_refused(origin=f"http://{name}")


def test_a_page_without_an_origin_of_its_own_is_refused() -> None:
    assert is_refused(origin="null")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1, evil.example",
        "evil, trainer",
        "localhost,localhost",
        "evil@127.0.0.1",
        "127.0.0.1/evil",
        "127.0.0.1#evil",
        "127.0.0.1:80:80",
        "127.0.0.1:http",
        "127.0.0.1 evil",
        "\t127.0.0.1",
        "[::1",
        "::1",
    ],
)
def test_a_host_header_that_names_more_than_one_host_and_its_port_is_refused(host: str) -> None:
    assert is_refused(host=host)
    for policy in (AccessPolicy(), AccessPolicy(any_address=True)):
        assert policy.refusal([(b"host", host.encode())]) is not None


def test_a_second_host_header_is_refused() -> None:
    assert is_foreign(Headers(raw=[(b"host", b"127.0.0.1"), (b"host", b"evil.example")]))


def test_an_address_that_another_sites_page_embeds_is_refused_and_a_link_to_it_is_not() -> None:
    for site in ("cross-site", "Cross-Site", "cross-site, none", "elsewhere"):
        assert is_refused(**{"sec-fetch-site": site})
        assert is_refused(
            **{"sec-fetch-site": site, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
        )
        assert is_refused(
            **{"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
        )
    for site in ("none", "same-origin", "same-site"):
        assert not is_refused(**{"sec-fetch-site": site})
    followed = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert not is_refused(**followed)
    assert is_refused(**followed, origin="http://evil.example")


def test_a_new_listener_is_on_the_loopback_and_known_as_tcp() -> None:
    with open_listener(0) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
        assert bound.proto == socket.IPPROTO_TCP
        socket.create_connection(bound.getsockname(), timeout=5).close()


def test_an_inherited_listener_is_taken_as_it_is() -> None:
    with open_listener(0) as bound, open_listener(1, os.dup(bound.fileno())) as inherited:
        assert inherited.getsockname() == bound.getsockname()
        assert inherited.proto == socket.IPPROTO_TCP


def test_a_busy_port_is_a_sentence() -> None:
    with open_listener(0) as busy, pytest.raises(Conflict, match=r"cannot be used\..*--port"):
        open_listener(busy.getsockname()[1])


def test_a_descriptor_that_is_no_socket_of_the_loopback_is_refused_with_a_sentence() -> None:
    reading, writing = os.pipe()
    with pytest.raises(InvalidConfig, match="cannot be listened on"):
        open_listener(0, reading)
    os.close(reading)
    os.close(writing)
    everywhere = socket.create_server(("", 0))
    with pytest.raises(InvalidConfig, match=r"stays on 127\.0\.0\.1"):
        open_listener(0, everywhere.detach())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_that_others_reach_is_refused_unless_it_may_be(host: str) -> None:
    with pytest.raises(InvalidConfig, match=r"no address of the loopback.*stays on"):
        open_listener(0, host=host)


def test_who_may_listens_where_it_likes_and_says_where_it_answers_this_machine() -> None:
    with open_listener(0, host="0.0.0.0", beyond=True) as bound:
        assert bound.getsockname()[0] == "0.0.0.0"
        assert url_of(bound, "https") == f"https://127.0.0.1:{bound.getsockname()[1]}"
        with open_listener(1, os.dup(bound.fileno()), beyond=True) as inherited:
            assert inherited.getsockname() == bound.getsockname()


def test_this_machine_by_name_is_its_loopback() -> None:
    with open_listener(0, host="localhost") as bound:
        assert url_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
    with pytest.raises(InvalidConfig, match="is no address"):
        open_listener(0, host="no such name")
    with pytest.raises(Conflict, match=r"of 192\.0\.2\.1 cannot be used"):
        open_listener(0, host="192.0.2.1", beyond=True)


async def test_a_request_that_tells_two_lengths_is_refused_and_nothing_behind_it_is_read() -> None:
    """A proxy before the server may have believed the other one: what follows could be somebody
    else's request.
    """
    served = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        served.append(scope["path"])
        await Response()(scope, receive, send)

    with open_listener(0) as bound:
        server = Server(
            uvicorn.Config(app, http="h11", lifespan="off", loop="none", log_config=None)
        )
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            lengths = b"Host: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(
                b"POST /first HTTP/1.1\r\n"
                + lengths
                + b"0\r\n\r\nGET /second HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            )
            answer = await reader.read()
            writer.close()
            server.end()
            await serving
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert served == []


CROWDED = """
import asyncio, logging, resource, sys
import uvicorn
from starlette.responses import Response
from halteres.loopback import Server, open_listener
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
logging.basicConfig(stream=sys.stderr)
config = uvicorn.Config(Response("here"), lifespan="off", ws="none", log_config=None)
bound = open_listener(0)
print(bound.getsockname()[1], flush=True)
asyncio.run(Server(config).serve(sockets=[bound]))
"""


def test_a_server_without_descriptors_says_so_once_and_goes_on_when_some_are_free() -> None:
    """asyncio would log 4 MB a second."""
    with subprocess.Popen(
        [sys.executable, "-c", CROWDED], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            port = int(process.stdout.readline())
            crowd = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(60)]
            said = process.stderr.readline()
            assert b"cannot be accepted" in said
            for one in crowd:
                one.close()
            with socket.create_connection(("127.0.0.1", port), timeout=20) as asking:
                asking.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert b"200 OK" in asking.recv(1024)
        finally:
            process.kill()
        assert process.stderr.read() == b""


def test_what_else_goes_wrong_outside_of_requests_is_logged_as_asyncio_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.new_event_loop()
    handler = LoopErrors(clock=lambda: 0.0)
    for exception in (OSError(errno.EPIPE, "Broken pipe"), ValueError("a bug")):
        handler(loop, {"message": "Something failed.", "exception": exception})
    assert [record.name for record in caplog.records] == ["asyncio", "asyncio"]
    loop.close()


def request_of(*parts: bytes, then: asyncio.Event | None = None) -> Request:
    """A request whose body comes in these parts; with an event, the rest of it is waited for."""
    left = list(parts)

    async def receive() -> Message:
        if not left and then is not None:
            await then.wait()
        if not left:
            return {"type": "http.disconnect"}
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left) or then is not None}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_a_body_is_read_whole_within_its_bounds() -> None:
    assert await body_within(request_of(b"ab", b"cd"), 4) == b"abcd"
    with pytest.raises(TooLarge):
        await body_within(request_of(b"ab", b"cde"), 4)


@pytest.mark.parametrize("bounds", [{"stall_s": 0.02}, {"stall_s": 5.0, "deadline_s": 0.02}])
async def test_a_body_that_stops_or_trickles_is_refused(bounds: dict[str, float]) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(TooSlow):
            await body_within(request_of(b"ab", then=asyncio.Event()), 4, **bounds)


async def test_work_ends_with_its_client_and_its_result_is_the_clients() -> None:
    begun, ended, stays = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async def quick() -> str:
        return "done"

    async with asyncio.timeout(5):
        with pytest.raises(ClientDisconnect):
            await while_connected(request_of(), work())
        assert begun.is_set() and ended.is_set()
        assert await while_connected(request_of(then=stays), quick()) == "done"


def test_bodies_are_read_within_bounds_alone() -> None:
    """Starlette's own readers know neither a size nor a time."""
    source = Path(halteres.__file__).parent
    readers = [f"request.{name}()" for name in ("body", "stream", "json", "form")]
    found = {
        file.relative_to(source).as_posix()
        for file in source.rglob("*.py")
        if any(reader in file.read_text(encoding="utf-8") for reader in readers)
    }
    assert found == {"loopback.py", "agent/trial/relay.py"}, (
        "the relay is aiohttp's, and has a size of its own"
    )


async def reading(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer once the body was read, or nothing more of it comes."""
    while (await receive()).get("more_body"):
        pass
    await Response()(scope, receive, send)


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without a look at the body."""
    await Response(status_code=401)(scope, receive, send)


async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
    """Begin an answer, and end it with the body."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.body", "body": b"ended"})


async def answers_to(
    sent: list[bytes], app: ASGIApp = reading, first_answer: bytes = b""
) -> tuple[bytes, list[str]]:
    """What a server of any configuration answers to these pieces, and the paths that its app saw;
    after the first piece this much of an answer is waited for.
    """
    served = list[str]()

    async def seen(scope: Scope, receive: Receive, send: Send) -> None:
        served.append(scope["path"])
        await app(scope, receive, send)

    with open_listener(0) as bound:
        server = Server(uvicorn.Config(seen, lifespan="off", loop="none", log_config=None))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        answer = b""
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            for piece in sent:
                writer.write(piece)
                await writer.drain()
                if first_answer and not answer:
                    answer = await reader.readuntil(first_answer)
            writer.write_eof()
            answer += await reader.read()
            writer.close()
            server.end()
            await serving
    return answer, served


HOST_LINE = b"Host: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /first HTTP/1.1\r\n" + HOST_LINE + b"X: a\r\n Content-Length: 5\r\n\r\n",
        b"GET /first HTTP/1.1\r\n" + HOST_LINE + b"X: a\r\n\tb\r\n\r\n",
        b"GET /first HTTP/1.1\n" + HOST_LINE + b"\r\n",
        b"GET /first HTTP/1.1\r\n" + HOST_LINE + b"X: a\nContent-Length: 5\r\n\r\n",
        b"GET /first HTTP/1.1\r\n" + HOST_LINE + b"\n",
        b"GET /first HTTP/1.1\nHost: 127.0.0.1\n\n",
    ],
)
@pytest.mark.parametrize(
    "before", [b"", b"POST /zero HTTP/1.1\r\n" + HOST_LINE + b"Content-Length: 3\r\n\r\na\nb"]
)
@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_head_with_folded_lines_or_bare_line_feeds_is_refused_and_nothing_behind_it_is_read(
    head: bytes, before: bytes, is_cut: bool
) -> None:
    """A proxy before the server may have read it as other headers, or as the end of the head."""
    whole = before + head
    if is_cut:
        pieces = [whole[at : at + 1] for at in range(len(whole))]
    else:
        pieces = [whole + b"GET /second HTTP/1.1\r\n" + HOST_LINE + b"\r\n"]
    answer, served = await answers_to(pieces)
    assert answer.count(b"HTTP/1.1 400 ") == 1
    assert answer.count(b"HTTP/1.1 200 ") == len(served)
    assert served == (["/zero"] if before else [])


@pytest.mark.parametrize("size", [1, 3, 10_000])
async def test_requests_in_a_row_are_read_however_they_are_cut_and_bodies_hold_any_bytes(
    size: int,
) -> None:
    body = b"a\n b\r\n\tc\r"
    with_length = (
        b"POST /one HTTP/1.1\r\n" + HOST_LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    chunked = b"POST /two HTTP/1.1\r\n" + HOST_LINE + b"Transfer-Encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    whole = (
        with_length
        + chunked
        + b"GET /three HTTP/1.1\r\n"
        + HOST_LINE
        + b"Connection: close\r\n\r\n"
    )
    answer, served = await answers_to([whole[at : at + size] for at in range(0, len(whole), size)])
    assert served == ["/one", "/two", "/three"]
    assert answer.count(b"HTTP/1.1 200 ") == 3


CHUNKED = b"POST /first HTTP/1.1\r\n" + HOST_LINE + b"Transfer-Encoding: chunked\r\n\r\n"
NO_CHUNKS = [
    b"0x2\r\nab\r\n0\r\n\r\n",
    b"-2\r\nab\r\n0\r\n\r\n",
    b"1;" + b"a" * MOST_HEAD_BYTES,
    b"2\r\nabc\r\n0\r\n\r\n",
    b"\r\n",
]


@pytest.mark.parametrize("body", NO_CHUNKS)
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    ("app", "begun"), [(reading, b""), (refusing, b"\r\n\r\n"), (streaming, b"begun")]
)
async def test_a_chunked_body_that_cannot_be_read_is_refused_with_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, app: ASGIApp, begun: bytes, is_cut: bool, body: bytes
) -> None:
    """Where the app has begun to answer, that stays its one answer."""
    pieces = [CHUNKED, body] if is_cut else [CHUNKED + body]
    answer, served = await answers_to(pieces, app, begun if is_cut else b"")
    assert served == ["/first"]
    assert answer.count(b"HTTP/1.1 ") == 1
    if begun and is_cut:
        assert b"HTTP/1.1 400 " not in answer and b"ended" not in answer
    else:
        assert answer.startswith(b"HTTP/1.1 400 ")
    lines = [record for record in caplog.records if record.name != "asyncio" or record.exc_info]
    assert len(lines) <= 1
    assert all(record.exc_info is None for record in lines)


def test_every_server_is_of_the_one_class_that_reads_strictly() -> None:
    source = Path(halteres.__file__).parent
    found = {
        file.relative_to(source).as_posix()
        for file in source.rglob("*.py")
        if re.search(r"uvicorn\.(Server|run)\b", file.read_text(encoding="utf-8"))
    }
    assert found == {"loopback.py"}
