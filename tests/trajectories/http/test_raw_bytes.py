"""Whatever bytes come, nobody's answer is a 5xx, and the server goes on."""

from __future__ import annotations

import gzip
import json
import random
import socket
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from halteres.loopback import MOST_HEAD_BYTES
from halteres.trajectories import service
from halteres.trajectories.server import ROUTES
from trajectories.server_fixtures import ENV, TRAINER, ServerFixture, ServerProcess, group

OPERATIONS = {(route.method, route.path): route for route in ROUTES}
EVERY_ROUTE = pytest.mark.parametrize(
    ("method", "path"), list(OPERATIONS), ids=map(" ".join, OPERATIONS)
)

DIGITS = b"9" * 1_000_000
VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        2**31,
        2**63,
        -(2**63) - 1,
        10**400,
        0.5,
        -0.0,
        1e308,
        "",
        "x",
        "\0",
        "\ud800",
        "💥",
        "NaN",
    ),
    *(
        [],
        [[]],
        [[[]]],
        [1, "1", None, [], {}],
        {},
        {"": {}},
        {"role": "user"},
        float("nan"),
        float("inf"),
        "1" * 5000,
    ),
]
BODIES = [
    *(
        b"",
        b" ",
        b"\0",
        b"\xff\xfe",
        b"{",
        b"}",
        b"[",
        b"null",
        b"true",
        b'"',
        b"NaN",
        b"-",
        b"0x1",
        b"1e999",
        b"[,]",
    ),
    *(
        b'"\\ud800"',
        b'"\xed\xa0\x80"',
        b'{"a":1,"a":2}',
        b"\xef\xbb\xbf{}",
        b"{}{}",
        b"[]]",
        DIGITS,
        b"-" + DIGITS,
    ),
    *(
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"[" * 500 + b"]" * 500,
        b'{"tokens":[[' + DIGITS + b"]]}",
    ),
    *(
        b'{"env_id":' + DIGITS + b"}",
        b'{"env_id":1' + b"0" * 4000 + b"}",
        b'{"scores":[1e' + b"9" * 4000 + b"]}",
    ),
    b'{"wandb_group":"\xff","wandb_project":"","batch_size":1,"max_token_len":1,"checkpoint_dir":"",'
    b'"save_checkpoint_interval":1,"starting_step":0,"num_steps":1}',
    json.dumps({**TRAINER, "wandb_group": "\ud800", "run_id": "\0"}).encode(),
    json.dumps({**ENV, "desired_name": "\ud800\0"}).encode(),
    json.dumps({**ENV, "weight": float("nan")}).encode(),
]
DEEP_BOMB = gzip.compress(b"[" * 5_000_000)
NAN = float("nan")
ODD_GROUPS: list[Any] = [
    *({"env_id": number} for number in (2**31, 2**63, -(2**63) - 1, 10**400)),
    *({"generation_params": {name: NAN}} for name in ("\ud800", "\0", "x" * 100_000)),
    *({"halteres_key": key} for key in ("\ud800", "\0", "k" * 300, "")),
    *({"images": value} for value in VALUES),
    {"group_overrides": {"\udfff": 1}},
    {"overrides": [{"a": {"\ud800": NAN}}] * 2},
    {"messages": [[{"role": "\ud800", "content": NAN}]] * 2},
    {"tokens": [[10**30, -(10**30), 0]] * 2},
    {"policy_version": 2**31},
    {"\ud800": 1},
]
QUERIES = [
    *(
        "",
        "?",
        "&&&",
        "=",
        "%",
        "%ff=%ff",
        "wait=",
        "wait=nan",
        "lease=inf",
        "lease=-1",
        "after=" + "9" * 5000,
    ),
    *(
        "policy_version=1.5",
        "policy_version=-1",
        "limit=0",
        "place=%00",
        "place=queued&place=%ff",
        "bodies=%F0%9F%92%A5",
    ),
    *(
        "env_id=" + "-" * 50,
        "newest=maybe",
        "a=1&" * 2000,
        "after=1%0d%0aSet-Cookie:%20x",
        "%0d%0a=1",
        "after=1;limit=2",
    ),
]
HEADERS = [
    {"content-encoding": "gzip"},
    {"content-encoding": "br"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"idempotency-key": "\xff\xfe"},
    {"idempotency-key": "k" * 10_000},
    {"halteres-client": ""},
    {"accept-encoding": "gzip;q=x, *;q=0"},
]


def bodies(draw: random.Random) -> Iterator[bytes]:
    """All of the list above, and as many that are damaged versions of good ones."""
    yield from BODIES
    good = [
        json.dumps(body).encode()
        for body in (TRAINER, ENV, group(2), [group(2)], {"env_id": 0}, {"lease": 9})
    ]
    for body in good:
        for _ in range(6):
            at, length = draw.randrange(len(body)), draw.randrange(9)
            yield body[:at] + draw.randbytes(length) + body[at + draw.randrange(9) :]
    for whole in (TRAINER, ENV, group(2), {"env_id": 0}, {"lease": 9}):
        for name in whole:
            yield json.dumps({**whole, name: draw.choice(VALUES)}).encode()
    for each in ODD_GROUPS:
        yield json.dumps(group(2, **each)).encode()
        yield json.dumps([group(2, **each)]).encode()


def packed(draw: random.Random) -> Iterator[bytes]:
    """Gzip that is none, or not all of it."""
    whole = gzip.compress(json.dumps(group(2)).encode())
    for _ in range(8):
        at = draw.randrange(len(whole))
        yield whole[:at]
        yield whole[:at] + draw.randbytes(1) + whole[at + 1 :]
    yield from (
        b"",
        b"\x1f\x8b",
        draw.randbytes(40),
        whole + b"x",
        whole * 40,
        zlib.compress(b"{}"),
    )
    yield DEEP_BOMB


def filled(path: str) -> str:
    return path.replace("{batch_id}", "1").replace("{group_id}", "1")


@pytest.fixture
async def busy(scene: ServerFixture, monkeypatch: pytest.MonkeyPatch) -> ServerFixture:
    """A server with a run under way, which holds no answer for long."""
    monkeypatch.setattr(service, "PAUSE_HOLD_S", 0.01)
    await scene.begin()
    await scene.register_env()
    await scene.send(group(2), group(2), group(3))
    return scene


@EVERY_ROUTE
async def test_no_body_makes_a_5xx(busy: ServerFixture, method: str, path: str) -> None:
    draw = random.Random(path)
    if OPERATIONS[method, path].body is None:  # nobody reads it
        assert (await busy.http.request(method, filled(path), content=DIGITS)).status_code < 500
        return
    for body in bodies(draw):
        answer = await busy.http.request(method, filled(path), content=body)
        assert answer.status_code < 500, (body[:200], answer.text)
    for body in packed(draw):
        answer = await busy.http.request(
            method, filled(path), content=body, headers={"content-encoding": "gzip"}
        )
        assert answer.status_code < 500, (body[:200], answer.text)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\0", "\N{PILE OF POO}", "x" * 5000])
@pytest.mark.parametrize(
    ("path", "whole"),
    [("/register", {**TRAINER, "run_id": "r"}), ("/register-env", ENV), ("/scored_data", group(2))],
)
async def test_no_text_in_a_body_makes_a_5xx(
    busy: ServerFixture, path: str, whole: dict[str, Any], text: str
) -> None:
    """Half a character was a failure of the store: clients asked again without end."""
    for name in whole:
        answer = await busy.http.request(
            "POST", path, content=json.dumps({**whole, name: text}).encode()
        )
        assert answer.status_code < 500, (name, answer.text)


@EVERY_ROUTE
async def test_no_query_no_header_and_no_method_makes_a_5xx(
    busy: ServerFixture, method: str, path: str
) -> None:
    for query in QUERIES:
        answer = await busy.http.request(method, f"{filled(path)}?{query}")
        assert answer.status_code < 500, (query, answer.text)
        assert "set-cookie" not in answer.headers
    for headers in HEADERS:
        raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        answer = await busy.http.request(method, filled(path), content=b"{}", headers=raw)
        assert answer.status_code < 500, (headers, answer.text)
    for other in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "X"):
        assert (await busy.http.request(other, filled(path))).status_code == 405


@pytest.mark.parametrize(
    "name", ["%00", "..%2f..%2fetc", "1%0d%0aX:%20y", "9" * 5000, "1.5", "-0", "%ff", "💥", "nan"]
)
async def test_no_name_in_a_path_makes_a_5xx(busy: ServerFixture, name: str) -> None:
    for route in (route.path for route in ROUTES if "{" in route.path):
        path = route.replace("{batch_id}", name).replace("{group_id}", name)
        for method in ("GET", "POST"):
            assert (await busy.http.request(method, path)).status_code < 500, path


GREETING = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
HOSTILE = [
    b"\r\n\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /%zz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET http://evil.example/reset_data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"CONNECT evil.example:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\rb\nc\x00\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
    b"POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: "
    b"99999999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\nTransfer-Encoding: "
    b"chunked\r\n\r\n0\r\n\r\n",
    b"POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: "
    b"chunked\r\n\r\nzz\r\n\r\n",
    b"POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: "
    b"chunked\r\n\r\nffffffffffffffffff\r\n",
    b"POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 400\r\n\r\n{",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: "
    b"websocket\r\nSec-WebSocket-Key: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n"
    + b"".join(b"X%d: y\r\n" % number for number in range(3000))
    + b"Host: 127.0.0.1\r\n\r\n",
    *(random.Random(number).randbytes(300) for number in range(20)),
]


def said(server: ServerProcess, sent: bytes) -> bytes:
    """What a server answers until nothing comes any more; the sender ends first."""
    address = urlsplit(server.url)
    with socket.create_connection(
        (str(address.hostname), address.port or 0), timeout=10
    ) as connection:
        heard = b""
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                heard += chunk
        except ConnectionError:
            pass
        return heard


def test_whatever_comes_through_the_socket_the_server_goes_on(server: ServerProcess) -> None:
    for sent in HOSTILE:
        heard = said(server, sent)
        statuses = [
            line.split(b" ")[1] for line in heard.splitlines() if line.startswith(b"HTTP/1.1 ")
        ]
        assert all(status < b"500" for status in statuses), (sent[:80], heard[:200])
    assert said(server, GREETING).startswith(b"HTTP/1.1 200 OK\r\n")
    assert server.ask("/status") == {"current_step": 0, "queue_size": 0}


def test_a_head_that_never_ends_is_refused(server: ServerProcess) -> None:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), 20) as held:
        held.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (MOST_HEAD_BYTES + 65536))
        assert held.recv(12) == b"HTTP/1.1 400"
