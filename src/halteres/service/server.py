"""One service answering on one socket until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from halteres.errors import HalteresError, InvalidConfig, ServerError
from halteres.files import replace_file
from halteres.loopback import MOST_HEAD_BYTES, Server, url_of
from halteres.service.answers import on_bug, on_error, on_gone, on_missing
from halteres.service.base import BaseModel
from halteres.service.fleet import Fleet, Host
from halteres.service.inference.answering import Inference
from halteres.service.inference.http import Shutdown
from halteres.service.inference.routes import InferenceRoutes
from halteres.service.routes.checkpoints import CheckpointRoutes
from halteres.service.routes.middleware import CountRequests, Guard, Meter, RequestCounts
from halteres.service.routes.sessions import SessionRoutes
from halteres.service.routes.training import TrainingRoutes
from halteres.service.service import Options, Service, locked, opened
from halteres.service.tenancy.keys import Keys

KEEP_ALIVE_S = 900
"""How long an idle connection is kept: a client that reuses one just as it is closed would see an error."""

DRAIN_S = 2  # how long answers under way may take after the end was asked for
EVERY_S = 60.0  # the same warning is written so often at most

log = logging.getLogger(__name__)


class Seldom(logging.Filter):
    """Lets each warning of uvicorn's through once a minute: no line per bad request."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False  # uvicorn has said in a line of its own that it cancels what did not end in time
        if record.levelno != logging.WARNING:
            return True
        now = time.monotonic()
        due = now - self._written.get(record.msg, -math.inf) >= EVERY_S
        if due:
            self._written[record.msg] = now
        return due


SELDOM = Seldom()


def create_app(service: Service, shutdown: Shutdown | None = None) -> Starlette:
    """The routes over an open service, those called most first; `shutdown` cuts answers short."""
    counts = RequestCounts()
    rooms = (
        TrainingRoutes(service),
        InferenceRoutes(Inference(service)),
        SessionRoutes(service),
        CheckpointRoutes(service),
        counts,
    )
    keys = Keys(service.state, required=service.options.require_keys, own=service.options.own_key)
    app = Starlette(
        routes=[route for room in rooms for route in room.table()],
        middleware=[
            Middleware(CountRequests, counts=counts),
            Middleware(Guard, keys=keys, meter=Meter(service.options.limits)),
        ],
        exception_handlers={
            HalteresError: on_error,
            HTTPException: on_missing,
            ClientDisconnect: on_gone,
            Exception: on_bug,
        },
    )
    app.state.shutdown = shutdown or Shutdown()
    return app


@dataclass(frozen=True, slots=True)
class Tls:
    """What a server shows that it is who it says."""

    certificate: Path  # PEM, with the chain
    key: Path  # PEM, private

    def check(self) -> None:
        """Read both."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidConfig(
                f"The certificate {self.certificate} and its key {self.key} cannot be used.",
                f"{error}.",
                "Give the chain with --certificate and its key, without a password, with --certificate-key: both PEM.",
            ) from error


class ServiceServer(Server):
    """A server that ends open polls, and answers under way, before it waits for connections."""

    def __init__(self, service: Service, tls: Tls | None = None) -> None:
        self._service, self._shutdown = service, Shutdown()
        logging.getLogger("uvicorn.error").addFilter(SELDOM)
        super().__init__(
            uvicorn.Config(
                create_app(service, self._shutdown),
                http="h11",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
                h11_max_incomplete_event_size=MOST_HEAD_BYTES,
                server_header=False,
                ssl_certfile=tls.certificate if tls else None,
                ssl_keyfile=tls.key if tls else None,
            )
        )

    def end(self) -> None:
        """End in order."""
        self._service.futures.close()
        self._shutdown.begin()
        super().end()


async def serve(
    state: Path, base: BaseModel, fleet: Fleet, bound: socket.socket, options: Options, tls: Tls | None = None
) -> None:
    """Serve until a signal comes, or the engine cannot be started.

    Raises:
        HalteresError: the state directory is taken, or the engine cannot be started or named.
    """
    with locked(state):
        async with opened(state, base, fleet, options) as service:
            server = ServiceServer(service, tls)
            url = url_of(bound, "https" if tls else "http")
            tending = asyncio.create_task(_tend(fleet, state, url, bound, server), name="engine")
            try:
                await server.serve(sockets=[bound])
            finally:
                tending.cancel()
                failure = (await asyncio.gather(tending, return_exceptions=True))[0]
        if isinstance(failure, HalteresError):
            raise failure


async def _tend(fleet: Fleet, state: Path, url: str, bound: socket.socket, server: ServiceServer) -> None:
    """Start the engines, one after the other, for each looks how much memory is free; name them, and every later one,
    in service.json."""

    async def name_successors(host: Host[Any]) -> None:
        while True:
            await host.until("ready", restarts=host.restarts + 1)
            try:
                _write_card(state, fleet, url, bound)
            except ServerError as error:  # its readers miss a process id; clients miss nothing
                log.error("%s", error)

    try:
        for host in fleet.hosts:
            await host.start()
        _write_card(state, fleet, url, bound)
    except HalteresError:
        server.end()
        raise
    log.info("The training service answers on %s (state in %s).", url, state)
    async with asyncio.TaskGroup() as tasks:
        for host in fleet.hosts:
            tasks.create_task(name_successors(host), name="engine's card")


def _write_card(state: Path, fleet: Fleet, url: str, bound: socket.socket) -> None:
    """service.json: who answers where."""
    card = {
        "pid": os.getpid(),
        "engine_pid": fleet.trainer.pid,
        "sampler_pids": [host.pid for host in fleet.samplers],
        "port": bound.getsockname()[1],
        "url": url,
        "started_at": time.time(),
    }
    file = state / "service.json"
    try:
        replace_file(file, msgspec.json.encode(card))
    except OSError as error:
        why, remedy = f"{error.strerror or error}.", f"See that {state} is yours to write and not full"
        raise ServerError(f"{file} cannot be written.", why, f"{remedy}, and start the service again.") from error
