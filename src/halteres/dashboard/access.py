"""Who may use the page: one-time links, the key in a browser's cookie, the guard of the routes, the command `ui`.

A browser proves itself by a ticket that opens once; our server proves itself to whoever opens the page; answers say
what a browser may do with them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
import webbrowser
from http.cookies import CookieError, SimpleCookie
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halteres.agent.faces.guard import TokenOnly
from halteres.agent.faces.responses import refused
from halteres.agent.faces.token import is_token, token
from halteres.clients.plain import Refused, get_json
from halteres.config import environ
from halteres.errors import Conflict, NotReady, UserError
from halteres.loopback import HOST

TICKET_S: Final = 600
"""How long a ticket opens the door, once; long enough to carry a link to another window."""

MOST_USED = 4096
"""Tickets that a server remembers to have been used. Only who holds the token makes any."""


def ticket(now: float | None = None) -> str:
    """A ticket: EXPIRY.NONCE.SIGNATURE."""
    expiry = int((time.time() if now is None else now) + TICKET_S)
    content = f"{expiry}.{secrets.token_urlsafe(12)}"
    return f"{content}.{_signed('ticket', content)}"


def page_key() -> str:
    """What the cookie of an admitted browser holds."""
    return _signed("page", "")


def is_page_key(given: str) -> bool:
    """Whether a cookie's value is the key."""
    return hmac.compare_digest(given.encode(), page_key().encode())


def proof(nonce: str) -> str:
    """What only a server with our token answers to a nonce."""
    return _signed("proof", nonce)


class Tickets:
    """Who may see the page of one server: whoever has its token, or a ticket that was not used."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}  # ticket -> expiry

    def admits(self, given: str, now: float | None = None) -> bool:
        """Whether this is the token, or a ticket that has neither been used nor run out; it is used now."""
        return is_token(given) or self._takes(given, time.time() if now is None else now)

    def _takes(self, given: str, now: float) -> bool:
        content, _, signature = given.rpartition(".")
        if not hmac.compare_digest(signature.encode(), _signed("ticket", content).encode()):
            return False
        expiry = int(content.partition(".")[0])
        if expiry < now or given in self._used:
            return False
        self._used = {ticket: until for ticket, until in self._used.items() if until >= now}
        if len(self._used) >= MOST_USED:
            return False
        self._used[given] = expiry
        return True


def _signed(purpose: str, text: str) -> str:
    return hmac.new(token().encode(), f"{purpose}\n{text}".encode(), hashlib.sha256).hexdigest()


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


ANSWERS_WITHIN_S = 5.0


def check_ours(port: int) -> None:
    """That a server of this home answers there: a ticket is for nobody else.

    Raises:
        Conflict: it is another, of somebody else perhaps.
    """
    nonce = secrets.token_urlsafe(24)
    try:
        answered = get_json(f"http://{HOST}:{port}/api/session?nonce={nonce}", ANSWERS_WITHIN_S).get("proof")
    except (NotReady, Refused):
        answered = None
    if not isinstance(answered, str) or not hmac.compare_digest(answered.encode(), proof(nonce).encode()):
        raise Conflict(
            f"Port {port} of {HOST} is taken.",
            f"What answers there is no control server of {environ.home()}.",
            "Name another with --port; 0 takes a free one.",
        )


def link(url: str) -> str:
    """The address that lets one browser in. What is behind the # is never sent."""
    return f"{url}/#token={ticket()}"


def show(address: str) -> None:
    """Open a browser, if windows can be opened here; what it takes to start nobody waits for."""
    if environ.has_display():
        threading.Thread(target=webbrowser.open, args=(address,), name="browser", daemon=True).start()
