"""A trajectory server in a thread, at an address that it comes back to; what it was asked; groups
to put there.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from trajectories.server_fixtures import ENV, TRAINER, Json, group

from halteres.loopback import Server, open_listener, url_of
from halteres.trajectories.options import Options
from halteres.trajectories.server import create_app
from halteres.trajectories.stores.sqlite import SqliteStore


class Queue:
    """The server; it can be ended and started again on its database."""

    def __init__(self, database: Path, options: Options | None = None) -> None:
        self._database, self._options = database, options
        self._port = 0
        self.asked: list[str] = []  # method and path of every request
        self.start()

    def start(self) -> None:
        """Answer in a thread."""
        begun, self._listening = threading.Event(), open_listener(self._port)
        self.url, self._port = url_of(self._listening), self._listening.getsockname()[1]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(begun)))
        self._thread.start()
        assert begun.wait(10)

    def end(self) -> None:
        """Answer no more; nobody listens there."""
        self._loop.call_soon_threadsafe(self._server.end)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """End, if it was not ended."""
        if self._thread.is_alive():
            self.end()

    def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        """One request of an environment or a trainer."""
        data = (
            body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        )
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        with closing(connection):
            connection.request("GET" if data is None else "POST", path, data, headers)
            answer = connection.getresponse()
            text = answer.read()
        assert answer.status == 200, text
        return json.loads(text)

    def begin(self, **changes: Any) -> int:
        """A trainer and an environment register; the environment's id."""
        self.ask("/register", {**TRAINER, **changes})
        assert self.ask("/batch")["batch"] is None
        return self.ask("/register-env", ENV)["env_id"]

    def send(self, *groups: Json | bytes) -> None:
        """Post groups."""
        for each in groups:
            self.ask("/scored_data", each)

    def groups(self, **wanted: Any) -> list[Json]:
        """GET /v1/groups."""
        query = "&".join(f"{name}={value}" for name, value in wanted.items())
        return self.ask(f"/v1/groups?limit=1000&{query}")["groups"]

    async def _serve(self, begun: threading.Event) -> None:
        store = SqliteStore(self._database)
        app = self._noted(
            create_app(store, options=self._options, on_ready=lambda service: begun.set())
        )
        self._loop = asyncio.get_running_loop()
        self._server = Server(uvicorn.Config(app, log_level="warning", lifespan="on", ws="none"))
        await self._server.serve(sockets=[self._listening])
        self._listening.close()
        store.close()

    def _noted(self, app: ASGIApp) -> ASGIApp:
        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                self.asked.append(f"{scope['method']} {scope['path']}")
            await app(scope, receive, send)

        return noted


@contextmanager
def answering(database: Path, options: Options | None = None) -> Iterator[Queue]:
    """A server for the length of a block."""
    queue = Queue(database, options)
    try:
        yield queue
    finally:
        queue.close()


__all__ = ["ENV", "TRAINER", "Queue", "answering", "group"]
