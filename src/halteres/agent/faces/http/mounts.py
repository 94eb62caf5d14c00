"""What answers beside the tools' own routes.

Owns: the list of it, what must be held while it answers; that it wants the token.
Never: knows what it answers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from halteres.agent.faces import mcp
from halteres.agent.faces.http.guard import TokenOnly

if TYPE_CHECKING:
    from halteres.agent.faces.mcp.http import Endpoint


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
    endpoint = mcp.http_app()
    return Mounts(routes=[Route(mcp.PATH, endpoint, middleware=[Middleware(TokenOnly)])], endpoints=[endpoint])
