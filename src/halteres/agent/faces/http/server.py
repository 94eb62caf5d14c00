"""The control server: its app, and the process that answers on one socket until it is told to end.

At the end waiting calls are answered first, then connections are closed, then the socket.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from halteres.agent.faces import mcp
from halteres.agent.faces.guard import LocalPeers, TokenOnly
from halteres.agent.faces.http.calls import Calls, on_bug, on_error, on_gone, on_missing
from halteres.agent.faces.http.routes import LegacyRoutes, ToolRoutes
from halteres.agent.faces.token import FILE, token
from halteres.config import environ
from halteres.dashboard.routes import Dashboard
from halteres.errors import HalteresError
from halteres.loopback import LocalOnly, Server, url_of

if TYPE_CHECKING:
    from halteres.agent.faces.mcp.http import Endpoint


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounts:
    """Routes, and what must be held while they answer."""

    routes: Sequence[Route]
    endpoints: Sequence[Endpoint]

    @asynccontextmanager
    async def running(self, _: Starlette) -> AsyncIterator[None]:
        """The lifespan of the app that they are part of."""
        async with AsyncExitStack() as stack:
            for endpoint in self.endpoints:
                await stack.enter_async_context(endpoint.running())
            yield


def mounts() -> Mounts:
    """Everything that is installed."""
    if importlib.util.find_spec("mcp") is None:
        return Mounts(routes=(), endpoints=())
    from halteres.agent.faces.mcp.http import Endpoint

    endpoint = Endpoint()
    return Mounts(routes=[Route(mcp.PATH, endpoint, middleware=[Middleware(TokenOnly)])], endpoints=[endpoint])


LegacyAuth = Literal["open", "token"]

GUARDED: Final = [Middleware(TokenOnly)]


def create_app(legacy_auth: LegacyAuth = "open", calls: Calls | None = None) -> Starlette:
    """The routes over the table of tools.

    Args:
        legacy_auth: whether the seed's routes, whose client sends no token, want one too.
        calls: the calls under way, for a server that ends them when it ends.
    """
    calls, mounted = calls or Calls(), mounts()
    app = Starlette(
        routes=[
            *ToolRoutes(calls).table(GUARDED),
            *LegacyRoutes(calls).table(GUARDED if legacy_auth == "token" else []),
            *mounted.routes,
            *Dashboard(calls).table(),
        ],
        middleware=[Middleware(LocalPeers), Middleware(LocalOnly)],
        exception_handlers={
            HalteresError: on_error,
            HTTPException: on_missing,
            ClientDisconnect: on_gone,
            Exception: on_bug,
        },
        lifespan=mounted.running,
    )
    app.router.redirect_slashes = False  # a redirected POST would change what an empty name means
    return app


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
