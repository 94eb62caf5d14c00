"""Where a trajectory server is, and by which token one talks to it.

Owns: taking a login out of a URL, so that the rest can be shown; the headers that every request carries; whether the
server is on this machine.
Never: connects.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult, unquote, urlsplit

import halteres
from halteres.config import environ
from halteres.errors import InvalidConfig

CLIENT = "Halteres-Client"
"""Header of a client that knows our extensions: the server may then say 410 where an environment is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One server."""

    url: str  # without login; does not end in a slash
    host: str
    port: int | None
    prefix: str  # path before every route; mostly empty
    is_secure: bool  # https
    is_here: bool  # on this machine, so that compressing would only cost
    token: str | None  # where the server asks for one

    @classmethod
    def of(cls, url: str, otherwise: Callable[[], str | None] = environ.trajectory_token) -> Self:
        """An address like `http://HOST:PORT`, or `http://anybody:TOKEN@HOST:PORT`.

        The token is the URL's password, else what `otherwise` gives: the variable for this kind of server.

        Raises:
            InvalidConfig: it is no address of a web server.
        """
        parts = urlsplit(url)
        host, port = _place(parts)
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
        return cls(
            url=bare.geturl().rstrip("/"),
            host=host,
            port=port,
            prefix=parts.path.rstrip("/"),
            is_secure=parts.scheme == "https",
            is_here=_is_here(host),
            token=unquote(parts.password) if parts.password else otherwise(),
        )

    @property
    def headers(self) -> Mapping[str, str]:
        """Of every request."""
        known = {"Content-Type": "application/json", CLIENT: halteres.__version__}
        return known if self.token is None else {**known, "Authorization": f"Bearer {self.token}"}


def _place(parts: SplitResult) -> tuple[str, int | None]:
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or parts.scheme not in ("http", "https"):
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        raise InvalidConfig(f"'{shown}' is no address of a server.", next="For example http://127.0.0.1:8000.")
    return host, port


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
