"""Who may use the page's routes, and what a browser is told it may do with the answers.

Owns: the cookie's name, the check of cookie and origin, the headers of every answer.
Never: makes a key (`door`), guards the tools' own routes (`agent.faces.http.guard`).
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halteres.agent.faces.http.answers import refused
from halteres.agent.faces.http.guard import TokenOnly
from halteres.dashboard.door import is_page_key
from halteres.errors import UserError

ANSWER_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

SAFE = frozenset({"GET", "HEAD"})


class _NotAdmitted(UserError):
    code, status = "unauthorized", 401


class _OtherOrigin(UserError):
    code, status = "forbidden", 403


class WithHeaders:
    """ASGI middleware: every answer carries the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(ANSWER_HEADERS)
            await send(message)

        await self.app(scope, receive, sending)


class PageOnly:
    """ASGI middleware: passes the page itself, by its cookie, and programs, by the token."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._for_programs = TokenOnly(app)  # no browser sends that header by itself: there is nothing to forge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        headers = Headers(scope=scope)
        if "authorization" in headers:
            await self._for_programs(scope, receive, send)
        elif not is_admitted(headers):
            error = _NotAdmitted("This page is not open in this browser.", "", "Run: halteres ui")
            await refused(error)(scope, receive, send)
        elif not _is_own(scope["method"], headers):
            error = _OtherOrigin("This request comes from another page.", "", "Use the page itself.")
            await refused(error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def cookie_name(headers: Headers) -> str:
    """Cookies know no ports: the port is in the name, so that servers of two homes do not shut each other out."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"halteres-{port}" if port.isascii() and port.isdecimal() else "halteres"


def is_admitted(headers: Headers) -> bool:
    """Whether the browser was let in before."""
    try:
        kept = SimpleCookie(headers.get("cookie", "")).get(cookie_name(headers))
    except CookieError:
        return False
    return kept is not None and is_page_key(kept.value)


def _is_own(method: str, headers: Headers) -> bool:
    """Whether the page itself asks: SameSite takes every port of a host for one site, and we do not."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    return method in SAFE or headers.get("origin") == f"http://{headers.get('host')}"
