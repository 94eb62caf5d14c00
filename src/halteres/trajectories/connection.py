"""One connection of a client: what it may send before anybody reads it.

Owns: how a connection that says too little or too much is ended; the parts in which bodies come.
Never: knows a route.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LARGEST_HEAD = 64 * 1024
"""Bytes of a request before its body."""

HEAD_S = 60.0
"""How long a new connection, and every later head, may take to be whole."""

KEPT_BODY = 512 * 1024
"""Bytes of a body that a connection keeps before somebody reads them; uvicorn keeps 64 KiB."""


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
            cycle.body = body  # type: ignore[assignment] - most often it is whole, and never copied
        else:
            if isinstance(cycle.body, bytes):
                cycle.body = bytearray(cycle.body)  # grows in place, where bytes are copied for each part
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
