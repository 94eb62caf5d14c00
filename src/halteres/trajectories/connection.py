"""One connection of a client: what it may send before anybody reads it.

Owns: how a connection that says too little or too much is ended; that a large body goes where its reader wants it.
Never: knows a route.
"""

from __future__ import annotations

from asyncio import BufferedProtocol, TimerHandle, Transport
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from halteres.trajectories.arrival import LARGE, SCOPE_KEY, SCRATCH, Arrival

LARGEST_HEAD = 64 * 1024
"""Bytes of a request before its body."""

HEAD_S = 60.0
"""How long a new connection, and every later head, may take to be whole."""


class Connection(HttpToolsProtocol):
    """uvicorn's, which bounds neither the bytes of a request's head nor its time, and copies bodies in bits."""

    _timer: TimerHandle | None = None
    _in_head = True
    _head_bytes = 0
    _arrival: Arrival | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self._may_read)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_timer()
        if self._arrival is not None:
            self._arrival.lose()
        super().connection_lost(exc)

    def get_buffer(self) -> memoryview:
        """Where the next bytes go."""
        return SCRATCH if self._arrival is None else self._arrival.room()

    def buffer_updated(self, num_bytes: int) -> None:
        """So many came."""
        if self._arrival is None:
            self.data_received(SCRATCH[:num_bytes])  # type: ignore[arg-type] - the parser takes any buffer
            return
        self._arrival.came(num_bytes)
        if self._arrival.is_whole:
            self._arrival = None
            self.on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Read on, unless the head has become too long; of a large body, no more than came with the head."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            self._wait_for_head()
            if self._head_bytes > LARGEST_HEAD and not self.transport.is_closing():
                self.send_400_response(f"The request's head is longer than {LARGEST_HEAD} bytes.")
        elif self._arrival is not None:
            self.parser = httptools.HttpRequestParser(self)  # the one before waits for a body that it will not see
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            if not self._arrival.has_place:
                self.flow.pause_reading()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        self._in_head = False
        self._stop_timer()
        length = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        if length > LARGE and not self.expect_100_continue and not self.parser.should_upgrade():
            self._arrival = Arrival(length, lambda: self.flow.resume_reading())
            self.scope[SCOPE_KEY] = self._arrival  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body."""
        if self._arrival is None:
            super().on_body(body)
        else:
            self._arrival.start(body)

    def _may_read(self) -> bool:
        """Not into a body that has no place and may yet be wanted: a pipelined one, while others are served."""
        return self._arrival is None or self._arrival.has_place or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        """Most heads come as one, and need no clock."""
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._end_head)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_head(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


class _Flow(FlowControl):
    """uvicorn's, which everybody resumes who waits for a message of any request."""

    def __init__(self, transport: Transport, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read = may_read

    def resume_reading(self) -> None:
        """Read on, if what comes has somewhere to go."""
        if self._may_read():
            super().resume_reading()


class Reader(BufferedProtocol):
    """What an event loop reads a connection through: bytes go where it says, uncopied. uvicorn makes one for each."""

    def __init__(self, **given: Any) -> None:
        self._connection = Connection(**given)

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """See `Connection`."""
        self._connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `Connection`."""
        self._connection.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `Connection`."""
        return self._connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """See `Connection`."""
        self._connection.buffer_updated(nbytes)

    def eof_received(self) -> None:
        """The client says no more."""
        self._connection.eof_received()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """It reads again."""
        self._connection.resume_writing()
