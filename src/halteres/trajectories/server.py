"""One trajectory server answering on one socket until it is told to end.

Owns: the order of start and end: socket, store, app; how a connection that says too little or too much is ended.
Never: parses arguments.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from asyncio import TimerHandle, Transport
from contextlib import closing

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from halteres.loopback import Server, url_of
from halteres.trajectories.app import create_app
from halteres.trajectories.options import Options, open_store
from halteres.trajectories.service import TrajectoryService
from halteres.trajectories.stores.store import StoreFailed

GRACE_S = 3
"""How long requests may take to end after SIGTERM."""

KEEP_ALIVE_S = 75
"""Longer than the clients': who closes first leaves the other a broken request."""

LARGEST_HEAD = 64 * 1024
"""Bytes of a request before its body."""

HEAD_S = 60.0
"""How long a new connection, and every later head, may take to be whole."""

KEPT_BODY = 512 * 1024
"""Bytes of a body that a connection keeps before somebody reads them; uvicorn keeps 64 KiB."""

log = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """uvicorn's, which bounds neither the bytes of a request's head nor the time it takes, and takes bodies in bits."""

    _timer: TimerHandle | None = None
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_S, self._end_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless the head has become too long."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > LARGEST_HEAD and not self.transport.is_closing():
                self.send_400_response(f"The request's head is longer than {LARGEST_HEAD} bytes.")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._end_head)

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body. The app is woken for all of it, or for as much as is kept: each time costs 10 us or more."""
        cycle = self.cycle
        if cycle.response_complete:
            return
        if not cycle.body:
            cycle.body = bytearray()  # type: ignore[assignment] - grows in place, where bytes are copied for each part
        cycle.body += body
        if len(cycle.body) > KEPT_BODY:
            self.flow.pause_reading()
            cycle.message_event.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_head(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


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
        server = Server(_config(app))
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
        http=Connection,
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
    run, queue = service.state.run, service.state.queue
    trainer = f"step {run.step}" if run.registration else "no trainer yet"
    return f"The trajectory server answers on {url}: {len(queue)} groups wait, {trainer}.\n"
