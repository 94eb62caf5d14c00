"""The control server answering on one socket until it is told to end.

Owns: the order of the end: waiting calls are answered, then connections, then the socket.
Never: parses arguments.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from halteres.agent.faces.http.app import LegacyAuth, create_app
from halteres.agent.faces.http.calls import Calls
from halteres.agent.faces.token import FILE, token
from halteres.config import environ
from halteres.loopback import Server, url_of

_log = logging.getLogger(__name__)

DRAIN_S = 2
"""How long answers under way may take after the end was asked for."""

KEEP_ALIVE_S = 75
"""Longer than the clients': who closes first leaves the other a broken request."""


class ControlServer(Server):
    """A server that ends waiting calls before it waits for connections."""

    def __init__(self, legacy_auth: LegacyAuth = "open") -> None:
        self._calls = Calls()
        super().__init__(
            uvicorn.Config(
                create_app(legacy_auth, self._calls),
                http="h11",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
                server_header=False,
            )
        )

    def end(self) -> None:
        """End in order."""
        self._calls.end()
        super().end()


def serve(listening: socket.socket, legacy_auth: LegacyAuth) -> None:
    """Serve on a socket until SIGTERM or SIGINT.

    Raises:
        InvalidConfig: the token cannot be made or read.
    """
    with listening:
        token()  # there before the first request: its clients read the file
        _log.info("The control server answers on %s; its token is in %s.", url_of(listening), environ.home() / FILE)
        asyncio.run(ControlServer(legacy_auth).serve(sockets=[listening]))
