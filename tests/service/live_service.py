"""A service for a test: a real port, a scripted engine inside the test's own process, the real SDK
before it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import tinker
from tinker import types

from halteres.engine.protocol import Engine, ModelInfo
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.errors import HalteresError, NotReady
from halteres.loopback import open_listener
from halteres.models import TINY
from halteres.service.base import base_model
from halteres.service.fleet import Fleet
from halteres.service.gateway.gateway import Gateway, gateway_over
from halteres.service.server import ServiceServer
from halteres.service.service import Options, Service, locked, opened

KEY = "tml-test"
BASE = base_model(TINY)


class InProcess:
    """A host whose engine lives in this process; `die` is what kill -9 does to a real one."""

    def __init__(self, *, exact: bool = True) -> None:
        self.restarts, self.pid = 0, None
        self.state, self.failure = "starting", None
        self.info: ModelInfo | None = None
        self._changed = asyncio.Condition()
        self._options: dict[str, bool] = {} if exact else {"exact": False}
        self.scripted = ScriptedEngine(BASE.folder, BASE.name, **self._options)

    @property
    def engine(self) -> Engine:
        return self.scripted

    async def start(self) -> None:
        self.info = await self.engine.info()
        await self.become("ready")

    async def stop(self) -> None:
        await self.become("stopped")
        await self.scripted.close()

    async def settled(self, restarts: int = 0) -> None:
        def is_settled() -> bool:
            if self.state == "ready":
                return self.restarts >= restarts
            return self.state != "starting"

        async with self._changed:
            await self._changed.wait_for(is_settled)

    async def become(self, state: str) -> None:
        """From now on it is in this state."""
        async with self._changed:
            self.state = state
            self._changed.notify_all()

    async def die(self) -> None:
        """The engine is gone, and another starts."""
        self.failure: HalteresError | None = NotReady("The engine (process 1) died.")
        await self.scripted.close()
        self.scripted = ScriptedEngine(BASE.folder, BASE.name, **self._options)
        self.info = await self.engine.info()
        self.restarts += 1
        await self.become(self.state)


def connected(url: str, **user_metadata: str) -> tinker.ServiceClient:
    """A client of the SDK with a session; it blocks while it connects."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY, user_metadata=user_metadata or None)
    assert client.holder.get_session_id()
    return client


@dataclass(frozen=True, slots=True)
class LiveService:
    """One service and ways to talk to it."""

    url: str
    service: Service
    host: InProcess
    http: aiohttp.ClientSession
    server: ServiceServer
    gateway: Gateway
    samplers: tuple[InProcess, ...] = ()  # those that only sample

    @property
    def engine(self) -> ScriptedEngine:
        return self.host.scripted

    async def client(self, **user_metadata: str) -> tinker.ServiceClient:
        """A client of the SDK; it blocks while it connects, at the first use of its holder: not on
        our event loop.
        """

        return await asyncio.to_thread(connected, self.url, **user_metadata)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """POST JSON (or bytes) to the Tinker API."""
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(f"{self.url}/api/v1/{path}", headers=headers, **data) as response:
            return response.status, await _content(response)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.url}{path}") as response:
            return response.status, await _content(response)

    async def ask(self, path: str, **body: Any) -> tuple[int, Any]:
        """POST JSON to any path."""
        async with self.http.post(f"{self.url}{path}", json=body) as response:
            return response.status, await _content(response)

    async def redeem(self, request_id: str) -> Any:
        """The outcome of a future."""
        async with asyncio.timeout(60):
            status, outcome = await self.post("retrieve_future", {"request_id": request_id})
            while status == 408:  # not yet: the client asks again
                status, outcome = await self.post("retrieve_future", {"request_id": request_id})
        assert status == 200, outcome
        return outcome

    async def model(self, session: str | None = None, seq: int = 0) -> str:
        """A training run made by raw HTTP."""
        session = session or await self.session()
        body = {
            "session_id": session,
            "model_seq_id": seq,
            "base_model": TINY,
            "lora_config": {"rank": 4},
        }
        _, promised = await self.post("create_model", body)
        return (await self.redeem(promised["request_id"]))["model_id"]

    async def session(self, **user_metadata: str) -> str:
        _, made = await self.post(
            "create_session", {"tags": [], "user_metadata": user_metadata, "sdk_version": "x"}
        )
        return made["session_id"]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What another process reads in the journal."""
        with sqlite3.connect(
            f"file:{self.service.state}/journal.sqlite?mode=ro", uri=True
        ) as connection:
            rows = connection.execute(query).fetchall()
        connection.close()
        return rows


async def _content(response: aiohttp.ClientResponse) -> Any:
    if response.content_type == "application/json":
        return await response.json()
    return await response.read()


@asynccontextmanager
async def serving(
    state: Path,
    options: Options | None = None,
    port: int = 0,
    samplers: int = 0,
    *,
    exact: bool = True,
) -> AsyncIterator[LiveService]:
    """A service over this state directory while the block runs; `samplers` engines beside the one
    that trains.
    """
    host, others = InProcess(exact=exact), tuple(InProcess(exact=exact) for _ in range(samplers))
    with locked(state), open_listener(port) as bound:
        async with (
            opened(state, BASE, Fleet.of(host, *others), options) as service,
            gateway_over(service) as gateway,
            aiohttp.ClientSession() as http,
        ):
            for one in (host, *others):
                await one.start()
            server = ServiceServer(service, gateway)
            running = asyncio.create_task(server.serve(sockets=[bound]))
            try:
                yield LiveService(
                    f"http://127.0.0.1:{bound.getsockname()[1]}",
                    service,
                    host,
                    http,
                    server,
                    gateway,
                    others,
                )
            finally:
                await http.close()
                server.end()
                server.force_exit = True  # nobody waits for an answer any more
                await running


@asynccontextmanager
async def closing(client: tinker.ServiceClient) -> AsyncIterator[tinker.ServiceClient]:
    """Ends the client's session and connections."""
    try:
        yield client
    finally:
        with suppress(tinker.APIError), warnings.catch_warnings(action="ignore"):
            await client.close("success")


async def trainer(
    client: tinker.ServiceClient, rank: int = 8, seed: int | None = 0
) -> tinker.TrainingClient:
    """A training client."""
    return await client.create_lora_training_client(TINY, rank=rank, seed=seed)


def datum(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    """A datum of cross_entropy: each token predicts the next."""
    length = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[length]),
            "weights": types.TensorData(
                data=weights or [1.0] * length, dtype="float32", shape=[length]
            ),
        },
    )


def prompt(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


DATA = [datum([5, 6, 7, 8]), datum([5, 6, 7, 8, 9, 10])]
STEP = types.AdamParams(learning_rate=1e-3)
