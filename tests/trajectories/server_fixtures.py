"""A trajectory server in process, or as a process of its own; groups to send it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.applications import Starlette

from halteres.loopback import HOST
from halteres.trajectories.options import Options
from halteres.trajectories.server import create_app
from halteres.trajectories.stores.sqlite import SqliteStore
from halteres.trajectories.stores.store import Store, StoreFailed

TRAINER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 4,
    "max_token_len": 64,
    "checkpoint_dir": "/ckpt",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 10,
}
ENV = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 2}

Json = dict[str, Any]


def group(size: int = 2, mark: int = 7, **extra: Any) -> Json:
    """A scored group; `mark` is its first token, by which it is known again."""
    return {
        "tokens": [[mark, 5, 6] for _ in range(size)],
        "masks": [[-100, 5, 6] for _ in range(size)],
        "scores": [float(i) for i in range(size)],
        "inference_logprobs": [[1.0, -0.5, -0.25] for _ in range(size)],
        **extra,
    }


def marks(batch: list[Json] | None) -> list[int]:
    """The marks of a batch's groups, in order."""
    return [element["tokens"][0][0] for element in batch or []]


def num_sequences(batch: list[Json] | None) -> int:
    """Sequences of a batch."""
    return sum(len(element["tokens"]) for element in batch or [])


@dataclass
class Clock:
    """Time that passes when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ServerFixture:
    """A server in process, and what one asks of it."""

    http: httpx.AsyncClient
    app: Starlette
    clock: Clock = field(default_factory=Clock)

    async def get(self, path: str, **params: Any) -> Any:
        answer = await self.http.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        answer = await self.raw_post(path, body, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def raw_post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(
            path, content=content, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    async def register(self, **changes: Any) -> Json:
        return await self.post("/register", {**TRAINER, **changes})

    async def register_env(self, **changes: Any) -> int:
        """Registers an environment; a trainer that asked for a batch must be there."""
        return (await self.post("/register-env", {**ENV, **changes}))["env_id"]

    async def begin(self, **changes: Any) -> None:
        """A registered trainer that has asked once."""
        await self.register(**changes)
        assert (
            await self.batch(**({"policy_version": 0} if "max_staleness" in changes else {}))
            is None
        )

    async def send(self, *groups: Json) -> None:
        for each in groups:
            await self.post("/scored_data", each)

    async def batch(self, **params: Any) -> list[Json] | None:
        return (await self.get("/batch", **params))["batch"]

    async def status_env(self, env_id: int, **asked: int) -> Json:
        answer = await self.http.request("GET", "/status-env", json={"env_id": env_id, **asked})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def diagnostics(self) -> Json:
        return await self.get("/v1/diagnostics")

    async def reason_codes(self) -> list[str]:
        return [reason["code"] for reason in (await self.diagnostics())["reasons"]]


@asynccontextmanager
async def opened(
    database: Path,
    clock: Clock | None = None,
    store: Store | None = None,
    on_loss: Callable[[StoreFailed], None] = lambda failure: None,
    options: Options | None = None,
    address: str = HOST,
) -> AsyncIterator[ServerFixture]:
    """A server over a database, in process."""
    clock, store = clock or Clock(), store or SqliteStore(database)
    app = create_app(store, clock, on_loss, options=options, address=address)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            yield ServerFixture(http, app, clock)
    store.close()


class ServerProcess:
    """The server as users start it, on a socket that outlives it."""

    def __init__(self, database: Path | str) -> None:
        self.database = database
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        descriptor = self.listener.fileno()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "halteres.trajectories"),
                *("--database", str(self.database), "--listen-fd", str(descriptor)),
            ],
            pass_fds=[descriptor],
            stderr=subprocess.PIPE,
        )
        assert self.ask("/") == {"message": "AtroposLib API"}

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self._reap()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end; gives the exit code."""
        self.process.send_signal(number)
        return self._reap()

    def close(self) -> None:
        """End whatever runs."""
        if self.process.poll() is None:
            self.kill()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.listener.close()

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """One request; the listening socket holds it until somebody answers."""
        data = None if body is None else json.dumps(body).encode()
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        try:
            connection.request(method or ("GET" if data is None else "POST"), path, data)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return json.loads(answer.read())
        finally:
            connection.close()

    def _reap(self) -> int:
        code = self.process.wait(10)
        if self.process.stderr:
            self.process.stderr.close()
        return code


def within(seconds: float, what: str, holds: Any) -> None:
    """Wait until `holds()`, with a deadline."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, f"within {seconds} s: {what}"
        os.sched_yield()


__all__ = [
    "ENV",
    "TRAINER",
    "Clock",
    "ServerFixture",
    "ServerProcess",
    "group",
    "marks",
    "num_sequences",
    "opened",
    "within",
]
