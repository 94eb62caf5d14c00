"""Bodies are bounded: each in bytes and time, all together in bytes."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from starlette.requests import Request

from halteres.trajectories.options import Options
from halteres.trajectories.routes.bodies import Bodies, TooSlow
from halteres.trajectories.wire.encoding import BadBody, TooLarge
from trajectories.scenes import Scene, opened


class Sender:
    """A client whose chunks come when told."""

    def __init__(self, **headers: str) -> None:
        self._headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self._chunks: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    def send(self, chunk: bytes, *, more: bool = False) -> Sender:
        self._chunks.put_nowait({"type": "http.request", "body": chunk, "more_body": more})
        return self

    @property
    def request(self) -> Request:
        return Request({"type": "http", "method": "POST", "headers": self._headers}, self._chunks.get)


def sender(size: int) -> Sender:
    """One that says how much it sends."""
    return Sender(content_length=str(size))


async def read(bodies: Bodies, sent: Sender) -> bytes:
    async with bodies.of(sent.request) as body:
        return body


async def test_a_body_is_whole_and_let_go_of() -> None:
    bodies = Bodies(largest=100)
    assert await read(bodies, sender(4).send(b"ab", more=True).send(b"cd")) == b"abcd"
    assert await read(bodies, Sender(transfer_encoding="chunked").send(b"ab")) == b"ab"
    assert await read(bodies, Sender().send(b"")) == b""
    assert bodies.held == 0


@pytest.mark.parametrize("declared", ["101", "9" * 30, "9" * 5000])
async def test_a_body_that_says_it_is_too_large_is_not_read(declared: str) -> None:
    bodies = Bodies(largest=100)
    with pytest.raises(TooLarge, match="larger than 100 bytes"):
        await read(bodies, Sender(content_length=declared))
    assert bodies.held == 0


async def test_a_body_that_becomes_too_large_is_not_read_to_its_end() -> None:
    bodies = Bodies(largest=100)
    with pytest.raises(TooLarge):
        await read(bodies, Sender(transfer_encoding="chunked").send(b"x" * 60, more=True).send(b"x" * 60, more=True))
    with pytest.raises(TooLarge, match="when inflated"):
        await read(bodies, Sender(content_encoding="gzip").send(gzip.compress(b"0" * 101)))
    assert bodies.held == 0


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "identity"])
async def test_content_encodings_that_are_understood(encoding: str) -> None:
    body = b"abc" if encoding == "identity" else gzip.compress(b"abc")
    assert await read(Bodies(largest=100), Sender(content_encoding=encoding).send(body)) == b"abc"


async def test_another_content_encoding_is_told() -> None:
    with pytest.raises(BadBody, match="Send it as gzip, or plain"):
        await read(Bodies(largest=100), Sender(content_encoding="br").send(b"abc"))


async def test_a_body_that_trickles_is_given_up() -> None:
    bodies = Bodies(largest=100, deadline_s=0.05)
    with pytest.raises(TooSlow, match=r"within 0\.05 s"):
        await read(bodies, sender(10).send(b"x", more=True))
    assert bodies.held == 0


async def test_beyond_the_bound_later_bodies_wait_in_order() -> None:
    bodies, order = Bodies(largest=100, at_once=100), list[str]()
    first, second, third = sender(60), sender(60).send(b"2"), sender(10).send(b"3")

    async def follow(name: str, sent: Sender) -> None:
        async with bodies.of(sent.request):
            order.append(name)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks, bodies.of(first.send(b"1").request):
        tasks.create_task(follow("second", second))
        tasks.create_task(follow("third", third))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (bodies.held, order) == (60, []), "the third is small enough, but the second was there before it"
    assert (order, bodies.held) == (["second", "third"], 0)


async def test_what_a_body_is_inflated_to_counts_too() -> None:
    bodies = Bodies(largest=1000)
    packed = gzip.compress(b"0" * 900)
    sent = Sender(content_encoding="gzip", content_length=str(len(packed))).send(packed)
    async with bodies.of(sent.request) as body:
        assert bodies.held == len(packed) + len(body)
    assert bodies.held == 0


async def test_a_request_that_is_given_up_while_it_waits_leaves_no_hole() -> None:
    bodies = Bodies(largest=100, at_once=100)
    async with asyncio.timeout(5), AsyncExitStack() as held:
        await held.enter_async_context(bodies.of(sender(90).send(b"1").request))
        waiting = [asyncio.create_task(read(bodies, sender(50).send(b"2"))) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await held.aclose()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert waiting[0].cancelled() and [each.result() for each in waiting[1:]] == [b"2", b"2"]
    assert bodies.held == 0


@pytest.fixture
async def narrow(tmp_path: object) -> AsyncIterator[Scene]:
    """A server that takes small bodies only."""
    async with opened(tmp_path / "queue.sqlite", options=Options(database="", max_body=1024)) as scene:  # type: ignore[operator]
        yield scene


@pytest.mark.parametrize("path", ["/register", "/scored_data", "/scored_data_list", "/v1/batches/1/extend"])
async def test_too_large_a_body_is_413_and_ends_the_connection(narrow: Scene, path: str) -> None:
    answer = await narrow.raw_post(path, b" " * 1025)
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert answer.text.startswith("The body is larger than 1024 bytes.")


async def test_a_sender_that_never_ends_is_408_and_loses_the_connection(scene: Scene) -> None:
    scene.app.state.reach.bodies.deadline_s = 0.05

    async def trickle() -> AsyncIterator[bytes]:
        yield b"["
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        answer = await scene.http.post("/scored_data_list", content=trickle())
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")
    assert answer.json()["code"] == "too_slow"


async def test_a_sender_that_hangs_up_is_nobody_s_error(scene: Scene) -> None:
    sent: list[dict[str, object]] = []
    messages = iter([{"type": "http.request", "body": b"[", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, object]:
        return next(messages)

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": "/scored_data", "headers": headers, "query_string": b""}
    await scene.app(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 400
    assert scene.app.state.reach.bodies.held == 0
