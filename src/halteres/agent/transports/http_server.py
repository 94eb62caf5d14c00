"""The control server: the app, and the process that answers on one socket until it is stopped.

At the end waiting calls are answered first, then connections are closed, then the socket.
`python -m halteres.agent.transports.http_server` is the process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from contextlib import nullcontext
from typing import Literal

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from halteres import process
from halteres.agent.transports import mcp
from halteres.agent.transports.access import (
    FILE,
    Guard,
    refuse_elsewhere,
    refuse_without_token,
    token,
)
from halteres.agent.transports.command_line import for_person
from halteres.agent.transports.http_routes import ERRORS, Calls, legacy_routes, tool_routes
from halteres.config import environ
from halteres.dashboard.routes import page_routes
from halteres.errors import HalteresError
from halteres.loopback import Server, open_listener, url_of

_log = logging.getLogger(__name__)

LegacyAuth = Literal["open", "token"]


def create_app(legacy_auth: LegacyAuth = "open", calls: Calls | None = None) -> Starlette:
    """The routes over the table of tools.

    Args:
        legacy_auth: whether the seed's routes, whose client sends no token, want one too.
        calls: the calls under way, for a server that ends them when it ends.
    """
    calls = calls or Calls()
    guard = [Middleware(Guard, refusal=refuse_without_token)]
    endpoint = None
    if mcp.is_installed():
        from halteres.agent.transports.mcp.server import Endpoint

        endpoint = Endpoint()

    app = Starlette(
        routes=[
            *tool_routes(calls, guard),
            *legacy_routes(calls, guard if legacy_auth == "token" else []),
            *([Route(mcp.PATH, endpoint, middleware=guard)] if endpoint else []),
            *page_routes(calls, for_person),
        ],
        middleware=[Middleware(Guard, refusal=refuse_elsewhere)],
        exception_handlers=ERRORS,
        lifespan=lambda _: endpoint.running() if endpoint else nullcontext(),
    )
    app.router.redirect_slashes = False  # a redirected POST would change what an empty name means
    return app


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
                # longer than the clients': who closes first leaves the other a broken request
                timeout_keep_alive=75,
                timeout_graceful_shutdown=2,
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
        _log.info(
            "The control server answers on %s; its token is in %s.",
            url_of(listening),
            environ.home() / FILE,
        )
        asyncio.run(ControlServer(legacy_auth).serve(sockets=[listening]))


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, on the loopback only."""
    process.begin("control")
    logging.getLogger("mcp").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(
        prog="python -m halteres.agent.transports.http_server", description="The control server."
    )
    parser.add_argument("--port", type=int, default=8080, help="port on 127.0.0.1; 0: a free one")
    parser.add_argument(
        "--listen-fd", type=int, help="inherited socket that listens already; --port is ignored"
    )
    parser.add_argument(
        "--auth", choices=("open", "token"), default="open", help="of the seed's routes"
    )
    arguments = parser.parse_args(argv)
    try:
        serve(open_listener(arguments.port, arguments.listen_fd), arguments.auth)
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
