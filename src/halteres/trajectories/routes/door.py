"""The door: which requests come in at all.

Owns: by which names this server may be called, from which pages; the token, as Bearer or as the password of Basic, so
that clients who know no token can have it in their URL (`http://x:TOKEN@host:8000`).
Never: knows a route, reads a body.

Browsers carry requests for any page. Host tells of a page whose name was pointed at this machine (DNS rebinding),
Origin of one that calls from elsewhere, and Sec-Fetch-Site of one that only embeds an address, which has no Origin.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from halteres.errors import UserError
from halteres.loopback import FOREIGN, LOCAL_NAMES, Foreign, is_loopback
from halteres.trajectories.options import Options
from halteres.trajectories.routes.errors import answer_to

RawHeaders = Sequence[tuple[bytes, bytes]]


class TokenWanted(UserError):
    """The request carries no token, or another one."""

    code, status = "token_wanted", 401


NO_TOKEN = TokenWanted(
    "This server asks for a token.",
    "The request carries none, or another one.",
    "Send 'Authorization: Bearer TOKEN', or have it in the URL: http://x:TOKEN@HOST:PORT.",
)

_OFF_SITE = b"cross-site"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doorkeeper:
    """What a server asks of a request."""

    names: frozenset[str] = LOCAL_NAMES  # by which it may be called, in small letters
    any_address: bool = False  # also by any IP address: no page can take one for its name
    token: str | None = None  # None: nobody is asked

    @classmethod
    def of(cls, options: Options, address: str) -> Self:
        """The doorkeeper of a server that listens on this IP address."""
        beyond = not is_loopback(address)
        own = frozenset({socket.gethostname().lower()}) if beyond else frozenset[str]()
        return cls(names=LOCAL_NAMES | own | options.allowed_hosts, any_address=beyond, token=options.token)

    def refusal(self, headers: RawHeaders) -> UserError | None:
        """Why this request may not come in; None: it may."""
        hosts, origins, logins, is_embedded = _read(headers)
        if len(hosts) != 1 or not self.is_own(_hostname(f"//{hosts[0]}")):
            return self._foreign("Host", hosts)
        if origins and not all(self.is_welcome(origin, hosts[0]) for origin in origins):
            return self._foreign("Origin", origins)
        if is_embedded and not origins:
            return self._foreign("the page", [])
        return None if self.token is None or self._knows(logins) else NO_TOKEN

    def is_own(self, name: str | None) -> bool:
        """Whether this server may be called so."""
        return name is not None and (name in self.names or (self.any_address and _is_address(name)))

    def is_welcome(self, origin: str, host: str) -> bool:
        """Whether a page of that origin may talk to this server: its own, and those of its other names."""
        return _hostname(origin) in self.names or origin == f"http://{host}"

    def _knows(self, logins: list[str]) -> bool:
        expected = (self.token or "").encode()
        return any(hmac.compare_digest(given, expected) for login in logins for given in _tokens(login))

    def _foreign(self, what: str, found: list[str]) -> Foreign:
        if not self.any_address:
            return FOREIGN
        why = f"{what} names '{found[0][:200]}'." if found else f"{what} is another's."
        return Foreign("This server does not answer to that name.", why, "Name it with --allow-host NAME.")


class Door:
    """ASGI middleware: passes on what the doorkeeper lets in, refuses the rest with a sentence."""

    def __init__(self, app: ASGIApp, keeper: Doorkeeper) -> None:
        self._app, self._keeper = app, keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if scope["type"] == "http" and (refusal := self._keeper.refusal(scope["headers"])) is not None:
            await answer_to(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _read(headers: RawHeaders) -> tuple[list[str], list[str], list[str], bool]:
    """Host, Origin and Authorization, and whether a page of another site embeds the address."""
    hosts, origins, logins, is_embedded = list[str](), list[str](), list[str](), False
    for name, value in headers:
        if name == b"host":
            hosts.append(value.decode("latin-1"))
        elif name == b"origin":
            origins.append(value.decode("latin-1"))
        elif name == b"authorization":
            logins.append(value.decode("latin-1"))
        elif name == b"sec-fetch-site":
            is_embedded = is_embedded or value.lower() == _OFF_SITE
    return hosts, origins, logins, is_embedded


@lru_cache(256)
def _hostname(url: str) -> str | None:
    """The host a URL names, in small letters; None where it names none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _tokens(login: str) -> Iterator[bytes]:
    """What an Authorization header may mean as token."""
    scheme, _, value = login.strip().partition(" ")
    if scheme.lower() == "bearer":
        yield value.strip().encode()
    elif scheme.lower() == "basic":
        try:
            yield base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return
