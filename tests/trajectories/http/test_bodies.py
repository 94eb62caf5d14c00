"""Bodies are bounded: each in bytes and time, all together in bytes."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path

import pytest
from starlette.types import Receive, Scope

from halteres.trajectories import http
from halteres.trajectories.http import (
    INFLATED_AT_ONCE,
    LARGE_PACKED,
    Bodies,
    TooLarge,
    TooSlow,
    inflate,
)
from halteres.trajectories.options import Options, Rules
from trajectories.server_fixtures import ServerFixture, group, opened


class Sender:
    """A client whose chunks come when told."""

    def __init__(self, **headers: str) -> None:
        self._headers = [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ]
        self._chunks: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    def send(self, chunk: bytes, *, more: bool = False) -> Sender:
        self._chunks.put_nowait({"type": "http.request", "body": chunk, "more_body": more})
        return self

    @property
    def request(self) -> tuple[Scope, Receive]:
        return {"type": "http", "method": "POST", "headers": self._headers}, self._chunks.get


def sender(size: int) -> Sender:
    """One that says how much it sends."""
    return Sender(content_length=str(size))


async def read(bodies: Bodies, sent: Sender) -> bytes:
    async with bodies.of(*sent.request) as body:
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
        await read(
            bodies,
            Sender(transfer_encoding="chunked")
            .send(b"x" * 60, more=True)
            .send(b"x" * 60, more=True),
        )
    with pytest.raises(TooLarge, match="when inflated"):
        await read(bodies, Sender(content_encoding="gzip").send(gzip.compress(b"0" * 101)))
    assert bodies.held == 0


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "identity"])
async def test_content_encodings_that_are_understood(encoding: str) -> None:
    body = b"abc" if encoding == "identity" else gzip.compress(b"abc")
    assert await read(Bodies(largest=100), Sender(content_encoding=encoding).send(body)) == b"abc"


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, identity"])
async def test_a_body_that_is_not_encoded_as_it_says_is_left_to_its_reader(encoding: str) -> None:
    assert await read(Bodies(largest=100), Sender(content_encoding=encoding).send(b"abc")) == b"abc"


async def test_gzip_among_other_encodings_is_understood() -> None:
    packed = Sender(content_encoding="gzip, identity").send(gzip.compress(b"abc"))
    assert await read(Bodies(largest=100), packed) == b"abc"


async def test_a_body_that_trickles_is_given_up() -> None:
    bodies = Bodies(largest=100, deadline_s=0.05)
    with pytest.raises(TooSlow, match=r"within 0\.05 s"):
        await read(bodies, sender(10).send(b"x", more=True))
    assert bodies.held == 0


async def test_a_body_that_stops_is_given_up_long_before_one_that_is_slow() -> None:
    bodies = Bodies(largest=100, stall_s=0.05)
    with pytest.raises(TooSlow, match=r"nothing of it for 0\.05 s"):
        await read(bodies, Sender(transfer_encoding="chunked").send(b"x", more=True))
    assert bodies.held == 0


async def test_a_body_is_waited_for_as_long_as_some_of_it_comes_but_no_longer_than_any() -> None:
    async def trickle(sent: Sender) -> None:
        for at in range(11):
            await asyncio.sleep(0.03)
            sent.send(b"x", more=at < 10)

    for deadline_s, is_taken in ((5, True), (0.1, False)):
        bodies, sent = Bodies(largest=100, stall_s=0.2, deadline_s=deadline_s), sender(11)
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            tasks.create_task(trickle(sent))
            with nullcontext() if is_taken else pytest.raises(TooSlow, match=r"within 0\.1 s"):
                assert await read(bodies, sent) == b"x" * 11
        assert bodies.held == 0


async def test_beyond_the_bound_later_bodies_wait_in_order() -> None:
    bodies, order = Bodies(largest=100, at_once=100, small=0), list[str]()
    first, second, third = sender(60), sender(60).send(b"2" * 60), sender(10).send(b"3" * 10)

    async def follow(name: str, sent: Sender) -> None:
        async with bodies.of(*sent.request):
            order.append(name)

    async with (
        asyncio.timeout(5),
        asyncio.TaskGroup() as tasks,
        bodies.of(*first.send(b"1" * 60).request),
    ):
        tasks.create_task(follow("second", second))
        tasks.create_task(follow("third", third))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (bodies.held, order) == (60, []), (
            "the third is small enough, but the second was there before it"
        )
    assert (order, bodies.held) == (["second", "third"], 0)


async def test_what_a_body_is_inflated_to_counts_too() -> None:
    bodies = Bodies(largest=1000)
    packed = gzip.compress(b"0" * 900)
    sent = Sender(content_encoding="gzip", content_length=str(len(packed))).send(packed)
    async with bodies.of(*sent.request) as body:
        assert bodies.held == len(body) == 900
    assert bodies.held == 0


async def test_a_body_that_did_not_say_its_length_keeps_no_more_room_than_it_needs() -> None:
    bodies = Bodies(largest=100, at_once=200, small=0)
    async with asyncio.timeout(5), AsyncExitStack() as held:
        for _ in range(10):
            await held.enter_async_context(
                bodies.of(*Sender(transfer_encoding="chunked").send(b"abc").request)
            )
        assert bodies.held == 30
    assert bodies.held == 0


async def test_while_one_of_unknown_length_is_read_the_next_waits_until_it_is_known() -> None:
    bodies = Bodies(largest=100, at_once=100, small=0)
    unknown = Sender(transfer_encoding="chunked").send(b"x", more=True)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        first, second = (
            tasks.create_task(read(bodies, sent)) for sent in (unknown, sender(2).send(b"ab"))
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bodies.held == 100
        unknown.send(b"y")
    assert (first.result(), second.result(), bodies.held) == (b"xy", b"ab", 0)


async def test_a_small_body_waits_for_nobody() -> None:
    bodies = Bodies(largest=1000, at_once=1000, small=10)
    async with (
        asyncio.timeout(5),
        asyncio.TaskGroup() as tasks,
        bodies.of(*sender(999).send(b"1" * 999).request),
    ):
        waiting = tasks.create_task(read(bodies, sender(11).send(b"2" * 11)))
        for _ in range(3):
            assert await read(bodies, sender(10).send(b"0123456789")) == b"0123456789"
        assert not waiting.done()
    assert (waiting.result(), bodies.held) == (b"2" * 11, 0)


async def test_a_small_body_does_not_keep_the_largest_out() -> None:
    bodies = Bodies(largest=1000, at_once=1000, small=10)
    async with asyncio.timeout(5), bodies.of(*sender(5).send(b"small").request):
        assert await read(bodies, sender(1000).send(b"x" * 1000)) == b"x" * 1000
    assert bodies.held == 0


async def test_heartbeats_come_through_while_posts_of_unknown_length_are_held_at_a_full_queue(
    tmp_path: Path,
) -> None:
    full = Options(database="", rules=Rules(max_queue_bytes=1024 * 1024))
    async with opened(tmp_path / "queue.sqlite", options=full) as scene:
        await scene.begin(batch_size=1000)
        env_id, row = await scene.register_env(), [[1] * 87_340] * 2
        await scene.send({"tokens": row, "masks": row, "scores": [0, 0]})

        async def content() -> AsyncIterator[bytes]:
            yield json.dumps(group()).encode() + b" " * 100

        posts = [
            asyncio.create_task(scene.http.post("/scored_data", content=content()))
            for _ in range(5)
        ]
        async with asyncio.timeout(5):
            await asyncio.wait(posts, timeout=0.1)
            assert 5 * 100 < scene.app.state.context.bodies.held < 5 * 1000
            assert "env_weight" in await scene.status_env(env_id)
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        assert scene.app.state.context.bodies.held == 0


@pytest.mark.parametrize(
    ("num_bytes", "in_thread"),
    [(INFLATED_AT_ONCE, False), (INFLATED_AT_ONCE + 1, True), (40 * INFLATED_AT_ONCE, True)],
)
async def test_what_is_large_inside_is_inflated_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, in_thread: bool
) -> None:
    threads, text = list[str](), b" " * num_bytes

    def watched(body: bytes, limit: int) -> bytes:
        threads.append(threading.current_thread().name)
        return inflate(body, limit)

    monkeypatch.setattr(http, "inflate", watched)
    packed = gzip.compress(text)
    assert len(packed) < LARGE_PACKED
    assert (
        await read(
            Bodies(largest=256 * INFLATED_AT_ONCE), Sender(content_encoding="gzip").send(packed)
        )
        == text
    )
    assert [name == "MainThread" for name in threads] == [True, False][: 1 + in_thread]


async def test_a_bomb_beyond_the_limit_is_told_from_a_thread_as_well() -> None:
    packed = gzip.compress(bytes(3 * INFLATED_AT_ONCE))
    with pytest.raises(TooLarge, match=f"larger than {2 * INFLATED_AT_ONCE} bytes when inflated"):
        await read(
            Bodies(largest=2 * INFLATED_AT_ONCE), Sender(content_encoding="gzip").send(packed)
        )


async def test_a_request_that_is_given_up_while_it_waits_leaves_no_hole() -> None:
    bodies = Bodies(largest=100, at_once=100, small=0)
    async with asyncio.timeout(5), AsyncExitStack() as held:
        await held.enter_async_context(bodies.of(*sender(90).send(b"1" * 90).request))
        waiting = [asyncio.create_task(read(bodies, sender(50).send(b"2" * 50))) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await held.aclose()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert waiting[0].cancelled() and [each.result() for each in waiting[1:]] == [b"2" * 50] * 2
    assert bodies.held == 0


@pytest.fixture
async def narrow(tmp_path: object) -> AsyncIterator[ServerFixture]:
    """A server that takes small bodies only."""
    async with opened(
        tmp_path / "queue.sqlite", options=Options(database="", max_body=1024)
    ) as scene:  # type: ignore[operator]
        yield scene


@pytest.mark.parametrize(
    "path", ["/register", "/scored_data", "/scored_data_list", "/v1/batches/1/extend"]
)
async def test_too_large_a_body_is_413_and_ends_the_connection(
    narrow: ServerFixture, path: str
) -> None:
    answer = await narrow.raw_post(path, b" " * 1025)
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert answer.text.startswith("The body is larger than 1024 bytes.")


async def test_a_sender_that_never_ends_is_408_and_loses_the_connection(
    scene: ServerFixture,
) -> None:
    scene.app.state.context.bodies.deadline_s = 0.05

    async def trickle() -> AsyncIterator[bytes]:
        yield b"["
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        answer = await scene.http.post("/scored_data_list", content=trickle())
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")
    assert answer.json()["code"] == "too_slow"


async def test_a_sender_that_hangs_up_is_nobody_s_error(scene: ServerFixture) -> None:
    sent: list[dict[str, object]] = []
    messages = iter(
        [{"type": "http.request", "body": b"[", "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive() -> dict[str, object]:
        return next(messages)

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-length", b"9")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/scored_data",
        "headers": headers,
        "query_string": b"",
    }
    await scene.app(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 400
    assert scene.app.state.context.bodies.held == 0
