"""The tools over MCP's streamable HTTP.

Owns: the ASGI endpoint, whose draft a request works on, the server of `halteres mcp --http`.
Never: makes the token, listens on anything but the loopback.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import uvicorn
from mcp.server import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from halteres import loopback
from halteres.agent.caller import Caller
from halteres.agent.faces.functions import own_caller
from halteres.agent.faces.guard import TokenOnly
from halteres.agent.faces.mcp import PATH
from halteres.agent.faces.mcp.server import PROGRESS_EVERY_S, build
from halteres.agent.faces.token import FILE, token
from halteres.config import environ

SESSION = "x-halteres-session"
"""Header that names the draft a client works on, unless a call does."""

GRACE_S = 2
"""How long answers under way may take to end after a signal; a client's idle event stream never ends by itself."""

_log = logging.getLogger(__name__)


class Endpoint:
    """An ASGI app that speaks MCP at whatever path it is mounted; it answers while `running` holds."""

    def __init__(self, progress_every_s: float = PROGRESS_EVERY_S) -> None:
        self._sessions = StreamableHTTPSessionManager(build(_caller, progress_every_s))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._sessions.handle_request(scope, receive, send)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Hold sessions and calls under way; at the end they are cancelled. Once only."""
        return self._sessions.run()


def _caller(context: ServerRequestContext[Any, Any]) -> Caller:
    request = context.request
    named = request.headers.get(SESSION) if isinstance(request, Request) else None
    return Caller(draft=named, face="mcp") if named else own_caller("mcp")


def guarded(endpoint: Endpoint) -> Starlette:
    """The endpoint at /mcp, for requests of this machine that carry the token."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with endpoint.running():
            yield

    return Starlette(
        routes=[Route(PATH, endpoint)],
        middleware=[Middleware(loopback.LocalOnly), Middleware(TokenOnly)],
        lifespan=lifespan,
    )


def serve(port: int) -> None:
    """Serve until a signal.

    Raises:
        Conflict: the port is taken.
        InvalidConfig: the token cannot be read or made.
    """
    token()  # a client must find it before its first request
    with loopback.open_listener(port) as listening:
        config = uvicorn.Config(
            guarded(Endpoint()),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
        )
        url = f"{loopback.url_of(listening)}{PATH}"
        _log.info("MCP at %s; send `Authorization: Bearer` with the token in %s.", url, environ.home() / FILE)
        asyncio.run(loopback.Server(config).serve(sockets=[listening]))
