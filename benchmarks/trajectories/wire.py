"""HTTP as cheap as Python allows: requests that exist already, on blocking sockets.

Owns: connections, replies with a Content-Length. Client and server share a machine: what one spends
the other lacks. Never: decodes a reply unless it is asked to.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.trajectories.groups import request

CUT_OFF_S = 60.0
"""A reply that takes longer is not waited for."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_GZIP = re.compile(rb"\r\ncontent-encoding: *gzip", re.IGNORECASE)


class CutOff(TimeoutError):
    """The server took longer than the client waits."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply; `content` is only good until the next one on this connection."""

    status: int
    content: memoryview
    zipped: bool

    def json(self) -> Any:
        """The content as a value."""
        return json.loads(gzip.decompress(self.content) if self.zipped else bytes(self.content))


class Connection:
    """One connection, kept alive; requests one after the other."""

    def __init__(self, port: int, room: int = 1 << 16, patience_s: float = CUT_OFF_S) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=patience_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(room)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def exchange(self, message: bytes) -> Reply:
        """Send a request, wait for the last byte of its reply.

        Raises:
            CutOff: it takes too long.
            ConnectionError: the server went away.
        """
        try:
            self._socket.sendall(message)
            return self._reply()
        except TimeoutError as error:
            raise CutOff(f"no reply within {self._socket.gettimeout():g} s") from error

    def _reply(self) -> Reply:
        filled, head_end = 0, -1
        while head_end < 0:
            filled += self._receive(filled)
            head_end = self._buffer.find(b"\r\n\r\n", 0, filled)
        head = bytes(self._buffer[:head_end])
        length = _LENGTH.search(head)
        if length is None:
            raise ConnectionError(f"a reply without a length: {head!r}")
        begin, end = head_end + 4, head_end + 4 + int(length.group(1))
        if end > len(self._buffer):  # a new one: replies that were given out look into the old
            self._buffer = self._buffer[:filled] + bytes(end - filled)
        while filled < end:
            filled += self._receive(filled)
        return Reply(
            int(head[9:12]),
            memoryview(self._buffer)[begin:end].toreadonly(),
            bool(_GZIP.search(head)),
        )

    def _receive(self, at: int) -> int:
        with memoryview(self._buffer) as view:
            received = self._socket.recv_into(view[at:])
        if not received:
            raise ConnectionError("the server closed the connection")
        return received


def once(port: int, message: bytes, patience_s: float = CUT_OFF_S) -> Reply:
    """A request on a connection of its own, as the original's clients make it."""
    with Connection(port, patience_s=patience_s) as connection:
        return connection.exchange(message)


def ask(port: int, method: str, path: str, body: Any = None, patience_s: float = CUT_OFF_S) -> Any:
    """A call whose cost does not count: JSON in, JSON out."""
    reply = once(
        port, request(method, path, b"" if body is None else json.dumps(body).encode()), patience_s
    )
    if reply.status != 200:
        raise SystemExit(
            f"error: {method} {path} was answered with {reply.status}: "
            f"{bytes(reply.content)[:500]!r}"
        )
    return reply.json()


def timed(connection: Connection, message: bytes) -> tuple[float, Reply]:
    """Seconds from the request to the last byte, and the reply, which must be 200."""
    began = time.perf_counter()
    reply = connection.exchange(message)
    took = time.perf_counter() - began
    if reply.status != 200:
        raise SystemExit(
            f"error: a request was answered with {reply.status}: {bytes(reply.content)[:500]!r}"
        )
    return took, reply
