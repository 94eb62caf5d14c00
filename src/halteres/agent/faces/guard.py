"""Who may talk to the control server.

Owns: that requests come from this machine, and that those outside the open routes carry the token.
Never: makes the token (`faces.token`), checks Host and Origin (`loopback.LocalOnly`).
"""

from __future__ import annotations

import base64
import binascii
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from halteres.agent.faces.responses import refused
from halteres.agent.faces.token import FILE, is_token
from halteres.errors import UserError

_HOW = "Send it: Authorization: Bearer TOKEN"


class _Foreign(UserError):
    code, status = "forbidden", 403


class _NoToken(UserError):
    code, status = "unauthorized", 401


class LocalPeers:
    """ASGI middleware: 403 for another machine. A Host header proves nothing where somebody binds all addresses."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if scope["type"] == "http" and not _is_local(scope.get("client")):
            error = _Foreign("This server answers its own machine only.", "", "Reach it through a tunnel (ssh -L).")
            await refused(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _is_local(client: tuple[str, int] | None) -> bool:
    """Whether a peer is this machine; one without address came through a Unix socket."""
    if client is None or not client[0]:
        return True
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


class TokenOnly:
    """ASGI middleware: 401 without the token, as Bearer or as Basic password (`http://halteres:TOKEN@localhost`)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if scope["type"] == "http" and not carries_token(Headers(scope=scope)):
            response = refused(_NoToken("A token is needed here.", f"It is in HALTERES_HOME/{FILE}.", _HOW))
            response.headers["WWW-Authenticate"] = 'Basic realm="halteres"'
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)


def carries_token(headers: Headers) -> bool:
    """Whether a request shows the token.

    Raises:
        InvalidConfig: there is no token that it could show.
    """
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return is_token(given.strip())
    return kind.lower() == "basic" and is_token(_password(given))


def _password(given: str) -> str:
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
