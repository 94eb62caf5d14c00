"""The sockets of a run's servers.

Owns: binding them before any process starts, so that no two runs can race for a port.
Never: accepts a connection; the servers inherit the sockets.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

SERVICE_PORT, API_PORT = 8001, 8000
"""Tried first; where one is taken, any free port will do."""

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket on 127.0.0.1 that listens already: who connects early waits, and is not refused."""

    socket: socket.socket

    @property
    def port(self) -> int:
        """Its port."""
        return self.socket.getsockname()[1]

    @property
    def descriptor(self) -> int:
        """For the child that serves it."""
        return self.socket.fileno()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Let go of it; a child that inherited it keeps it."""
        self.socket.close()


def listen(preferred: int) -> Listener:
    """The preferred port if it is free, else any."""
    for port in (preferred, 0):
        try:
            return Listener(socket.create_server(("127.0.0.1", port), backlog=BACKLOG))
        except OSError:
            if port == 0:
                raise
    raise AssertionError("unreachable")
