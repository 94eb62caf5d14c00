"""A stand-in for a run's trajectory server that says why there is no batch."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from halteres.runs.directory import RunDirectory

WHY = "Environment 'gsm8k_1' asked for 32 sequences of every batch and has none queued."


class TrajectoryServer(ThreadingHTTPServer):
    """It answers GET /v1/diagnostics with what it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Diagnostics)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answer: Any = {
            "batch_ready": False,
            "parked": False,
            "reasons": [{"code": "x", "sentence": WHY}],
        }
        self.status = 200
        self.asked = 0
        self.lets_go = threading.Event()
        self.lets_go.set()


class Diagnostics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast(TrajectoryServer, self.server)
        server.asked += 1
        assert self.path == "/v1/diagnostics"
        server.lets_go.wait(10)
        body = json.dumps(server.answer).encode()
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def trajectory_server() -> Iterator[TrajectoryServer]:
    """It answers inside."""
    with TrajectoryServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.lets_go.set()
            server.shutdown()
            thread.join()


def quiet_for(run: RunDirectory, seconds: float) -> None:
    """As if nothing had come of a run for so long."""
    then = time.time() - seconds
    os.utime(run.path / "metrics.jsonl", (then, then))
