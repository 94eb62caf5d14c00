"""One request to a server of ours, or beside us."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from halteres.clients.json_client import (
    JsonClient,
    Refused,
    get_json,
    post_bytes,
    post_for_events,
    post_json,
)
from halteres.errors import HalteresError, InvalidConfig, NotFound, NotReady, ProcessFailed

ANSWERS = {
    "/object": (200, b'{"a": 1}'),
    "/list": (200, b"[1]"),
    "/junk": (200, b"<html>"),
    "/refused": (503, b'{"detail": "Not yet."}'),
    "/broken": (500, b"oh"),
}

EVENTS = {
    "/events": 'data: {"text": "a\u2028b"}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'.encode(),
    "/fails": b'data: {"n": 1}\n\ndata: {"error": {"message": "It broke."}}\n\n',
    "/breaks": b'data: {"n": 1}\n\n',
    "/strange": b"data: <html>\n\n",
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = ANSWERS[self.path]
        self._answer(status, body)

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in EVENTS:
            return self._answer(200, EVENTS[self.path])
        answer = (
            {"by": self.headers["Authorization"]} if self.path == "/whoami" else {"given": given}
        )
        self._answer(200, json.dumps(answer).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server, while the environment names a proxy that nobody is behind."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(5)


def test_json_is_fetched_and_posted_past_any_proxy(url: str) -> None:
    assert get_json(f"{url}/object", 5) == {"a": 1}
    assert get_json(f"{url}/list", 5) == {}
    assert post_json(f"{url}/object", [1, 2], 5) == {"given": [1, 2]}
    assert post_bytes(f"{url}/object", b"[1]", 5, content_type="text/plain") == b'{"given": [1]}'


def test_a_process_that_is_born_with_a_proxy_asks_none(url: str) -> None:
    """urllib reads the variables once: what holds here was decided before the test set them."""
    code = f"from halteres.clients.json_client import get_json; print(get_json('{url}/object', 5))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ended.stdout == "{'a': 1}\n", ended.stderr


def test_a_refusal_carries_status_and_what_the_server_said(url: str) -> None:
    with pytest.raises(Refused, match="Not yet") as refused:
        get_json(f"{url}/refused", 5)
    assert refused.value.answered == 503
    with pytest.raises(Refused, match="oh"):
        get_json(f"{url}/broken", 5)


def test_no_usable_answer_is_not_ready(url: str) -> None:
    with pytest.raises(NotReady):
        get_json(f"{url}/junk", 5)
    with pytest.raises(NotReady, match="does not answer"):
        get_json("http://127.0.0.1:9/", 5)


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="no service address"):
        get_json("file:///etc/hosts", 5)


@pytest.mark.parametrize(
    ("login", "key", "sent"),
    [
        ("", "", None),
        ("any:s3cr3t%2F1@", "", "Basic YW55OnMzY3IzdC8x"),
        ("any:s3cr3t@", "k", "Bearer k"),
    ],
)
async def test_a_login_in_a_servers_address_is_sent_and_is_no_part_of_the_address(
    url: str, login: str, key: str, sent: str | None
) -> None:
    root = url.replace("://", f"://{login}")
    async with JsonClient(root, api_key=key, timeout_s=5, ready_within_s=0) as client:
        assert (client.root, (await client.post_when_ready("/whoami", {}))["by"]) == (url, sent)


async def test_no_error_of_a_client_names_the_login_of_its_server() -> None:
    root = "http://any:s3cr3t@127.0.0.1:9"
    async with JsonClient(root, timeout_s=5, ready_within_s=0, waits_for_start=False) as client:
        with pytest.raises(NotFound) as missing:
            await client.get("/health")
    shown = f"{missing.value.what} {missing.value.why} {missing.value.__cause__}"
    assert "127.0.0.1:9" in shown and "s3cr3t" not in shown


async def test_events_come_one_by_one_and_their_texts_may_hold_line_separators(url: str) -> None:
    events = [event async for event in post_for_events(f"{url}/events", {}, 5, "key")]
    assert events == [{"text": "a\u2028b"}, {"n": 2}]


@pytest.mark.parametrize(
    ("path", "error", "why"),
    [
        ("/fails", ProcessFailed, "It broke."),
        ("/breaks", NotReady, "no end"),
        ("/strange", NotReady, "does not answer"),
    ],
)
async def test_a_stream_that_fails_or_breaks_off_is_an_error(
    url: str, path: str, error: type[HalteresError], why: str
) -> None:
    with pytest.raises(error, match=why):
        async for _ in post_for_events(f"{url}{path}", {}, 5):
            pass
    with pytest.raises(NotReady, match="does not answer"):
        async for _ in post_for_events("http://127.0.0.1:9/events", {}, 5):
            pass
