"""Who may talk to a server without keys.

Owns: the check that a request names this machine and comes from no foreign page (DNS rebinding, cross-site requests).
Never: authenticates anybody.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class LocalOnly:
    """ASGI middleware: 403 unless Host, and Origin where there is one, name the loopback."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host"), headers.get("origin")
            if not is_local(f"//{host}") or (origin is not None and not is_local(origin)):
                detail = "This server answers requests to localhost only. Use its 127.0.0.1 address."
                await JSONResponse({"detail": detail}, 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def is_local(url: str) -> bool:
    """Whether a URL names the loopback."""
    try:
        return urlsplit(url).hostname in LOCAL_NAMES
    except ValueError:
        return False
