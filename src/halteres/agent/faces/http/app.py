"""The control server's app: a value.

Owns: which groups of routes there are, and who is let to each.
Never: opens or closes what is behind them.
"""

from __future__ import annotations

from typing import Final, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from halteres.agent.faces.http.answers import on_bug, on_error, on_gone, on_missing
from halteres.agent.faces.http.calls import Calls
from halteres.agent.faces.http.guard import LocalPeers, TokenOnly
from halteres.agent.faces.http.legacy import LegacyRoutes
from halteres.agent.faces.http.mounts import mounts
from halteres.agent.faces.http.tools import ToolRoutes
from halteres.dashboard.routes import Dashboard
from halteres.errors import HalteresError
from halteres.loopback import LocalOnly

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
