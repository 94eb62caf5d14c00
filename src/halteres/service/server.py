"""One service answering on one socket until it is told to end.

Owns: the order of start and end: socket, service, HTTP, engine; then promises, HTTP, engine, journal.
Never: parses arguments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path

import msgspec
import uvicorn

from halteres.errors import HalteresError
from halteres.files import replace_file
from halteres.loopback import Server, url_of
from halteres.service.app import create_app
from halteres.service.base import BaseModel
from halteres.service.host import Host
from halteres.service.service import Service, locked, opened

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 900
"""How long an idle connection is kept: a client that reuses one just as it is closed would see an error."""

DRAIN_S = 2
"""How long answers under way may take after the end was asked for."""


class ServiceServer(Server):
    """A server that ends open polls before it waits for connections."""

    def __init__(self, service: Service) -> None:
        self._service = service
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http="h11",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
                h11_max_incomplete_event_size=2**20,
                server_header=False,
            )
        )

    def end(self) -> None:
        """End in order."""
        self._service.promises.close()
        super().end()


async def serve(state: Path, base: BaseModel, host: Host, bound: socket.socket) -> None:
    """Serve until a signal comes, or the engine cannot be started.

    Raises:
        HalteresError: the state directory is taken, or the engine cannot be started.
    """
    with locked(state):
        async with opened(state, base, host) as service:
            server = ServiceServer(service)
            starting = asyncio.create_task(_start(host, state, bound, server), name="engine start")
            try:
                await server.serve(sockets=[bound])
            finally:
                starting.cancel()
                failure = (await asyncio.gather(starting, return_exceptions=True))[0]
        if isinstance(failure, HalteresError):
            raise failure


async def _start(host: Host, state: Path, bound: socket.socket, server: ServiceServer) -> None:
    try:
        await host.start()
        _write_card(state, host, bound)
        log.info("The training service answers on %s (state in %s).", url_of(bound), state)
    except HalteresError:
        server.end()
        raise


def _write_card(state: Path, host: Host, bound: socket.socket) -> None:
    """service.json: who answers where."""
    card = {
        "pid": os.getpid(),
        "engine_pid": host.pid,
        "port": bound.getsockname()[1],
        "url": url_of(bound),
        "started_at": time.time(),
    }
    replace_file(state / "service.json", msgspec.json.encode(card))
