"""Which requests a server answers at all: by which names it may be called, from which pages, with
which token.

Browsers carry requests for any page. Host tells of a page whose name was pointed at this machine
(DNS rebinding), Origin of one that calls from elsewhere, and Sec-Fetch-Site of one that only embeds
an address, which has no Origin. A page with another name does not know the token, and its browser
sends it to no other name either: who sends the token without a word of a page may call the server
as it likes. Without the token, beyond the loopback, a name without a dot passes too: machines and
services of a cluster have such names, and pages of the Internet have none.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from halteres.errors import HalteresError, NotReady, UserError, as_http
from halteres.loopback import (
    FOREIGN,
    LOCAL_NAMES,
    Foreign,
    host_of,
    hostname_of,
    is_loopback,
    is_of_another_site,
)

RawHeaders = Sequence[tuple[bytes, bytes]]


class TokenMissing(UserError):
    """The request carries no token, or another one."""

    code, status = "token_wanted", 401


NO_TOKEN = TokenMissing(
    "This server asks for a token.",
    "The request carries none, or another one.",
    "Send 'Authorization: Bearer TOKEN', or have it in the URL: http://x:TOKEN@HOST:PORT. "
    "That of a run: `halteres runs connect RUN`.",
)

ENDING = NotReady(
    "The server is ending.",
    "The request had not come, or could not be served, in time.",
    "Send it again.",
)

_NEXT = {
    "Host": (
        "Start it with --allow-host NAME, or call it by its IP address; who sends its token "
        "may use any name."
    ),
    "Origin": "If that is a name of this server, start it with --allow-host NAME.",
}

# how long a start waits for this machine's full name; resolvers that do not answer take half a
# minute
RESOLVER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """What a server asks of a request.

    The token comes as Bearer or as the password of Basic: a client that knows no token has it in
    its URL.
    """

    names: frozenset[str] = LOCAL_NAMES  # by which it may be called, in small letters
    any_address: bool = False  # also by any IP address: no page can take one for its name
    token: str | None = None  # None: nobody is asked

    @classmethod
    def of(cls, address: str, token: str | None, allowed_hosts: Collection[str] = ()) -> Self:
        """The policy of a server that listens on this IP address."""
        beyond = not is_loopback(address)
        own = own_names() if beyond else frozenset[str]()
        return cls(
            names=LOCAL_NAMES | own | frozenset(allowed_hosts), any_address=beyond, token=token
        )

    def refusal(self, headers: RawHeaders) -> UserError | None:
        """Why this request may not come in; None: it may."""

        def all_of(header: bytes) -> list[str]:
            return [value.decode("latin-1") for name, value in headers if name == header]

        hosts, sites = all_of(b"host"), all_of(b"sec-fetch-site")
        # An embedded address has no Origin, and without TLS no Sec-Fetch-Site, but a Referer.
        origins = all_of(b"origin") + [
            "/".join(url.split("/", 3)[:3]) for url in all_of(b"referer")
        ]
        expected = None if self.token is None else self.token.encode()
        given = [token for login in all_of(b"authorization") for token in _tokens(login)]
        knows = expected is not None and any(hmac.compare_digest(one, expected) for one in given)
        of_page = bool(origins or sites)  # a browser sends it, for a page
        if len(hosts) != 1 or not (self._is_own(host_of(hosts[0])) or (knows and not of_page)):
            return self._foreign("Host", hosts)
        if not all(
            hostname_of(origin) in self.names or origin == f"http://{hosts[0]}"
            for origin in origins
        ):
            return self._foreign("Origin", origins)
        if is_of_another_site(sites) and not origins:
            return self._foreign("the page", [])
        return None if expected is None or knows else NO_TOKEN

    def _is_own(self, name: str | None) -> bool:
        if name is None or name in self.names:
            return name is not None
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return self.any_address
        return self.any_address and "." not in name

    def _foreign(self, what: str, found: list[str]) -> Foreign:
        if not self.any_address:
            return FOREIGN
        why = f"{what} names '{found[0][:200]}'." if found else f"{what} is another's."
        return Foreign("This server does not answer to that name.", why, _NEXT.get(what, ""))


def refusal_answer(error: HalteresError) -> Response:
    """The usual reply to a refused request."""
    headers = (
        {"www-authenticate": 'Basic realm="halteres", charset="UTF-8"'}
        if error.status == 401
        else None
    )
    return JSONResponse(as_http(error), error.status, headers)


class AccessControl:
    """ASGI middleware: passes on what the policy lets in, refuses the rest with a sentence."""

    def __init__(
        self,
        app: ASGIApp,
        policy: AccessPolicy,
        answer_to: Callable[[HalteresError], Response] = refusal_answer,
    ) -> None:
        self._app, self._policy, self._answer_to = app, policy, answer_to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        refusal = self._policy.refusal(scope["headers"]) if scope["type"] == "http" else None
        if refusal is not None:
            await self._answer_to(refusal)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and waited as long as it may
            if scope["type"] != "http":
                raise
            with suppress(RuntimeError):  # its reply has begun
                await self._answer_to(ENDING)(scope, receive, send)


def own_names(resolver_s: float = RESOLVER_S) -> frozenset[str]:
    """What this machine calls itself, in small letters: its name, and the full one if that is found
    out in time.
    """
    found = [socket.gethostname().lower()]
    asking = threading.Thread(target=lambda: found.append(socket.getfqdn().lower()), daemon=True)
    asking.start()
    asking.join(resolver_s)
    return frozenset(found)


def _tokens(login: str) -> Iterator[bytes]:
    scheme, _, value = login.strip().partition(" ")
    if scheme.lower() == "bearer":
        yield value.strip().encode()
    elif scheme.lower() == "basic":
        with suppress(binascii.Error, ValueError):
            yield base64.b64decode(value.strip(), validate=True).partition(b":")[2]
