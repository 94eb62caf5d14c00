"""Who may call this machine's HTTP servers: the token in HALTERES_HOME/token, the guard that asks
for it, and how a browser is let to the page.

A browser proves itself by a ticket that opens once, and from then on by the key in its cookie; our
server proves itself to whoever opens the page (`halteres ui`); answers say what a browser may do
with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import threading
import time
import webbrowser
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halteres.access_policy import AccessPolicy
from halteres.clients.json_client import Refused, get_json
from halteres.config import environ
from halteres.errors import Conflict, HalteresError, InvalidConfig, NotReady, UserError, as_answer
from halteres.loopback import FOREIGN, HOST, is_foreign
from halteres.redaction import Redactor

JSON: Final = "application/json"
FILE: Final = "token"
# characters; a file that holds less was cut off, or written by a person who should not have
SHORTEST = 16


def token() -> str:
    """The token; made at first use, for its owner alone to read.

    Raises:
        InvalidConfig: the file cannot be made or read, or holds no token.
    """
    file = environ.home() / FILE
    try:
        if not file.exists():
            _make(file)
        found = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"The token file {file} cannot be used.",
            f"{getattr(error, 'strerror', None) or error}.",
            "Make it readable, or export HALTERES_HOME=a folder that can be written.",
        ) from error
    if len(found) < SHORTEST:
        raise InvalidConfig(
            f"The token file {file} holds no token.",
            f"A token has {SHORTEST} characters or more.",
            "Remove the file; a new one is made.",
        )
    return found


def _make(file: Path) -> None:
    """Write beside, then link: of two processes that do this at once one wins, and both read the
    winner's.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{FILE}.{os.getpid()}.{threading.get_ident()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(f"{secrets.token_urlsafe(32)}\n")
        with contextlib.suppress(FileExistsError):
            os.link(beside, file)
    finally:
        beside.unlink()


def is_token(given: str) -> bool:
    """Whether this is the token; takes as long for a near miss as for any other."""
    return hmac.compare_digest(given.encode(), token().encode())


def carries_token(headers: Headers) -> bool:
    """Whether a request shows the token, as Bearer or as Basic password
    (`http://halteres:TOKEN@localhost`).

    Raises:
        InvalidConfig: there is no token that it could show.
    """
    return "authorization" in headers and AccessPolicy(token=token()).refusal(headers.raw) is None


class Forbidden(UserError):
    """A request from another machine, or from another page."""

    code, status = "forbidden", 403


class Unauthorized(UserError):
    """A request that does not show what it has to: the token, or the page's cookie."""

    code, status = "unauthorized", 401


class _TokenMissing(Unauthorized):
    pass


class Guard:
    """ASGI middleware: answers a request that `refusal` objects to with its error, and passes on
    the others.
    """

    def __init__(
        self, app: ASGIApp, refusal: Callable[[HTTPConnection], HalteresError | None]
    ) -> None:
        self.app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        error = None
        if scope["type"] == "http":
            error = self._refusal(HTTPConnection(scope))
        if error is None:
            return await self.app(scope, receive, send)
        response = error_response(error)
        if isinstance(error, _TokenMissing):
            response.headers["WWW-Authenticate"] = 'Basic realm="halteres"'
        return await response(scope, receive, send)


def refuse_elsewhere(request: HTTPConnection) -> HalteresError | None:
    """The refusal of a request from another machine or from a page of another site."""
    # nobody's: it came through a Unix socket
    peer = ""
    if request.client:
        peer = request.client.host
    try:
        is_here = not peer or ipaddress.ip_address(peer).is_loopback  # whatever Host says
    except ValueError:
        is_here = False
    if not is_here:
        return Forbidden(
            "This server answers its own machine only.", "", "Reach it through a tunnel (ssh -L)."
        )
    if is_foreign(request.headers):
        return FOREIGN
    return None


def refuse_without_token(request: HTTPConnection) -> HalteresError | None:
    """The refusal of a request without the token."""
    if carries_token(request.headers):
        return None
    how = "Send it: Authorization: Bearer TOKEN"
    return _TokenMissing("A token is needed here.", f"It is in HALTERES_HOME/{FILE}.", how)


def answer(body: Any, status: int = 200) -> Response:
    """A JSON answer."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), status, media_type=JSON)


def error_response(error: HalteresError, status: int | None = None) -> Response:
    """An error outside any tool, in the tools' own form and without secrets."""
    return answer(Redactor.of_this_process().json(as_answer(error)), status or error.status)


# how long a ticket lets somebody in, once; long enough to carry a link to another window
TICKET_S: Final = 600

ANSWER_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def _signed(purpose: str, text: str) -> str:
    return hmac.new(token().encode(), f"{purpose}\n{text}".encode(), hashlib.sha256).hexdigest()


def ticket(now: float | None = None) -> str:
    """A ticket: EXPIRY.NONCE.SIGNATURE."""
    expiry = int((time.time() if now is None else now) + TICKET_S)
    content = f"{expiry}.{secrets.token_urlsafe(12)}"
    return f"{content}.{_signed('ticket', content)}"


def page_key() -> str:
    """What the cookie of an admitted browser holds."""
    return _signed("page", "")


def proof(nonce: str) -> str:
    """What only a server with our token answers to a nonce."""
    return _signed("proof", nonce)


class Tickets:
    """Who may see the page of one server: whoever has its token, or a ticket that was not used."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}  # ticket -> expiry

    def admits(self, given: str, now: float | None = None) -> bool:
        """Whether this is the token, or a ticket that has neither been used nor run out; it is used
        now.
        """
        if is_token(given):
            return True
        if now is None:
            now = time.time()
        content, _, signature = given.rpartition(".")
        if not hmac.compare_digest(signature.encode(), _signed("ticket", content).encode()):
            return False
        expiry = int(content.partition(".")[0])
        if expiry < now or given in self._used:
            return False
        self._used = {used: until for used, until in self._used.items() if until >= now} | {
            given: expiry
        }
        return True


class WithHeaders:
    """ASGI middleware: every answer carries the headers that say what a browser may do with it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(ANSWER_HEADERS)
            await send(message)

        await self.app(scope, receive, sending)


def refuse_outside_page(request: HTTPConnection) -> HalteresError | None:
    """The refusal of a request that is neither the page's, with its cookie, nor a program's, with
    the token.
    """
    headers = request.headers
    if "authorization" in headers:
        # no browser sends that header by itself: there is nothing to forge
        return refuse_without_token(request)
    if not is_admitted(headers):
        return Unauthorized("This page is not open in this browser.", "", "Run: halteres ui")
    # SameSite takes every port of a host for one site, and we do not.
    is_own = headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
    if is_own and (
        request.scope["method"] in ("GET", "HEAD")
        or headers.get("origin") == f"http://{headers.get('host')}"
    ):
        return None
    return Forbidden("This request comes from another page.", "", "Use the page itself.")


def cookie_name(headers: Headers) -> str:
    """Cookies know no ports: the port is in the name, so that servers of two homes do not shut each
    other out.
    """
    port = headers.get("host", "").rpartition(":")[2]
    if port.isascii() and port.isdecimal():
        return f"halteres-{port}"
    return "halteres"


def is_admitted(headers: Headers) -> bool:
    """Whether the browser was let in before."""
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(cookie_name(headers))
    except CookieError:
        return False
    return cookie is not None and hmac.compare_digest(cookie.value.encode(), page_key().encode())


def check_ours(port: int) -> None:
    """That a server of this home answers there: a ticket is for nobody else.

    Raises:
        Conflict: it is another, of somebody else perhaps.
    """
    nonce = secrets.token_urlsafe(24)
    try:
        answered = get_json(f"http://{HOST}:{port}/api/session?nonce={nonce}", 5.0).get("proof")
    except (NotReady, Refused):
        answered = None
    if not isinstance(answered, str) or not hmac.compare_digest(
        answered.encode(), proof(nonce).encode()
    ):
        raise Conflict(
            f"Port {port} of {HOST} is taken.",
            f"What answers there is no control server of {environ.home()}.",
            "Name another with --port; 0 takes a free one.",
        )


def link(url: str) -> str:
    """The address that lets one browser in. What is behind the # is never sent."""
    return f"{url}/#token={ticket()}"


def show(address: str) -> None:
    """Open a browser, if windows can be opened here; nobody waits for it to start."""
    if environ.has_display():
        threading.Thread(
            target=webbrowser.open, args=(address,), name="browser", daemon=True
        ).start()
