"""One trajectory server answering on one socket until it is told to end.

Owns: the order of start and end: socket, store, app.
Never: parses arguments.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from contextlib import closing

import uvicorn
import uvloop

from halteres.loopback import Server, url_of
from halteres.trajectories.app import create_app, release
from halteres.trajectories.options import Options, open_store
from halteres.trajectories.reporting.status import status
from halteres.trajectories.service import TrajectoryService
from halteres.trajectories.stores.store import StoreFailed

GRACE_S = 3
"""How long requests may take to end after SIGTERM."""

KEEP_ALIVE_S = 75
"""Longer than the clients': who closes first leaves the other a broken request."""

log = logging.getLogger(__name__)


def serve(options: Options, listening: socket.socket) -> None:
    """Serve on a socket.

    Raises:
        InvalidConfig, Conflict, StoreFailed: the database cannot be opened.
        StoreFailed: it was lost on the way; whoever starts the process again finds what was acknowledged.
    """
    lost: list[StoreFailed] = []

    def end(failure: StoreFailed) -> None:
        lost.append(failure)
        server.end()

    def tell(service: TrajectoryService) -> None:
        sys.stdout.write(_greeting(service, url_of(listening)))
        sys.stdout.flush()

    with listening, closing(open_store(options)) as store:
        address = listening.getsockname()[0]
        app = create_app(store, on_loss=end, options=options, address=address, on_ready=tell)
        server = Server(_config(app), on_end=lambda: release(app))
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve(sockets=[listening]))
        except SystemExit:  # uvicorn's, when the app does not start; ours says why
            if not lost:
                raise
    if lost:
        raise lost[0]


def _config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type] - an ASGI app
        http="httptools",
        ws="none",
        loop="none",
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        proxy_headers=False,  # whoever sends X-Forwarded-For would choose who it is
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


def _greeting(service: TrajectoryService, url: str) -> str:
    run, waiting = service.state.run, status(service.state)["queue_size"]
    trainer = f"step {run.step}" if run.registration else "no trainer yet"
    return f"The trajectory server answers on {url}: {waiting} groups wait, {trainer}.\n"
