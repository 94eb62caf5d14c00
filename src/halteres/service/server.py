"""One service answering on one socket until it is told to end.

Owns: the order of start and end: socket, service, HTTP, engine; then promises, HTTP, engine, journal.
Never: parses arguments.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn

from halteres.errors import Conflict, HalteresError
from halteres.service.app import create_app
from halteres.service.base import BaseModel
from halteres.service.host import Host
from halteres.service.service import Service, locked, opened

KEEP_ALIVE_S = 900
"""How long an idle connection is kept: a client that reuses one just as it is closed would see an error."""

DRAIN_S = 2
"""How long answers under way may take after the end was asked for."""


class Server(uvicorn.Server):
    """uvicorn, which ends open polls before it waits for connections."""

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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: end in order; a second one does not wait for answers under way.

        uvicorn's own handler would raise the signal again once the last connection is closed: too early for us.
        """
        self.force_exit = self.should_exit
        self.end()

    def end(self) -> None:
        """End in order."""
        self._service.promises.close()
        self.should_exit = True


def listening(port: int, listen_fd: int | None) -> socket.socket:
    """A socket on 127.0.0.1: the inherited one, or a new one.

    Raises:
        Conflict: the port is taken.
    """
    if listen_fd is not None:
        return socket.socket(fileno=listen_fd)
    # The protocol is named because asyncio turns Nagle's algorithm (40 ms per answer) off only where it sees TCP.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("127.0.0.1", port))
    except OSError as error:
        bound.close()
        raise Conflict(
            f"Port {port} of 127.0.0.1 cannot be used.",
            f"{error.strerror}.",
            "Name another with --port; 0 takes a free one.",
        ) from error
    bound.listen(1024)
    return bound


async def serve(state: Path, base: BaseModel, host: Host, bound: socket.socket) -> None:
    """Serve until a signal comes, or the engine cannot be started.

    Raises:
        HalteresError: the state directory is taken, or the engine cannot be started.
    """
    with locked(state):
        async with opened(state, base, host) as service:
            server = Server(service)
            starting = asyncio.create_task(_start(host, state, bound, server), name="engine start")
            try:
                await server.serve(sockets=[bound])
            finally:
                starting.cancel()
                failure = (await asyncio.gather(starting, return_exceptions=True))[0]
        if isinstance(failure, HalteresError):
            raise failure


async def _start(host: Host, state: Path, bound: socket.socket, server: Server) -> None:
    try:
        await host.start()
        _write_card(state, host, bound)
    except HalteresError:
        server.end()
        raise


def _write_card(state: Path, host: Host, bound: socket.socket) -> None:
    """service.json: who answers where."""
    port = bound.getsockname()[1]
    card = {
        "pid": os.getpid(),
        "engine_pid": host.pid,
        "port": port,
        "url": f"http://127.0.0.1:{port}",
        "started_at": time.time(),
    }
    beside = state / ".service.json"
    beside.write_bytes(msgspec.json.encode(card))
    beside.replace(state / "service.json")
