"""`halteres ui`: finding the server, starting it, the link, the browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from agent import control

from halteres.agent.transports import access
from halteres.agent.transports.access import token
from halteres.errors import Conflict

pytestmark = pytest.mark.runs

UI = (sys.executable, "-c", "from halteres.cli.main import main; main()", "ui", "--no-open")


@contextmanager
def somebody(answer: object, status: int = 200) -> Iterator[tuple[int, list[str]]]:
    """Another server of this machine; its port, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "status"), [({}, 200), ({"proof": "0" * 64}, 200), ([], 200), ({}, 401)]
)
def test_a_server_that_does_not_know_our_token_is_told_nothing(
    home: Path, answer: object, status: int
) -> None:
    with (
        somebody(answer, status) as (port, asked),
        pytest.raises(Conflict, match="no control server of"),
    ):
        access.check_ours(port)
    assert len(asked) == 1
    assert token() not in asked[0]


def test_a_browser_is_opened_where_windows_can_be(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, done = [], threading.Event()

    def open_(address: str) -> bool:
        opened.append(address)
        done.set()
        return True

    monkeypatch.setattr(webbrowser, "open", open_)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    access.show("http://127.0.0.1:1/#token=a")
    assert not opened, "a browser in the terminal would take it over"
    monkeypatch.setenv("DISPLAY", ":0")
    access.show("http://127.0.0.1:1/#token=b")
    assert done.wait(5)
    assert opened == ["http://127.0.0.1:1/#token=b"]


def test_the_command_serves_the_page_and_its_link_opens_it(home: Path) -> None:
    environment = {**os.environ, "HALTERES_HOME": str(home)}
    with subprocess.Popen(
        [*UI, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as first:
        try:
            assert first.stdout is not None
            url, _, ticket = first.stdout.readline().strip().partition("/#token=")
            with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
                assert http.get("/").status_code == 401
                assert http.post("/api/session", json={"token": ticket}).status_code == 204
                assert http.get("/").status_code == 200
                again = _link(environment, url.rpartition(":")[2])
                assert again.startswith(f"{url}/#token=")
                assert (
                    http.post("/api/session", json={"token": again.partition("=")[2]}).status_code
                    == 204
                )
        finally:
            first.terminate()
            first.wait(10)
        assert first.stderr is not None
        said = first.stderr.read()
    assert first.returncode == 0, said
    assert ticket not in said
    assert token() not in said + ticket


def _link(environment: dict[str, str], port: str) -> str:
    """What the command says where a server answers already: it ends at once."""
    done = subprocess.run(
        [*UI, "--port", port], capture_output=True, text=True, env=environment, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0]


def test_a_port_that_somebody_else_has_is_said_to_be_taken(home: Path) -> None:
    environment = {**os.environ, "HALTERES_HOME": str(home)}
    with somebody({"status": "ok"}) as (port, _):
        done = subprocess.run(
            [*UI, "--port", str(port)], capture_output=True, text=True, env=environment, timeout=30
        )
    assert done.returncode == 1
    assert f"Port {port} of 127.0.0.1 is taken" in done.stderr
    assert "token" not in done.stdout


def test_a_server_of_another_home_is_not_ours(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with control.process(tmp_path_factory.mktemp("another")) as url, pytest.raises(Conflict):
        access.check_ours(int(url.rpartition(":")[2]))
