"""Where a trajectory server is, and by which token one talks to it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote, urlsplit

import halteres
from halteres.config import environ
from halteres.errors import InvalidConfig
from halteres.logins import is_web_address, refused

CLIENT = "Halteres-Client"
"""Header of a client that knows our extensions: the server may then say 410 where an environment is
unknown.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One server."""

    url: str  # without login; does not end in a slash
    is_here: bool  # on this machine, so that compressing would only cost
    token: str | None  # where the server asks for one

    @classmethod
    def of(cls, url: str, otherwise: Callable[[], str | None] = environ.trajectory_token) -> Self:
        """An address like `http://HOST:PORT`, or `http://anybody:TOKEN@HOST:PORT`.

        The token is the URL's password, else what `otherwise` gives: the variable for this kind of
        server.

        Raises:
            InvalidConfig: it is no address of a web server.
        """
        if not is_web_address(url):
            raise InvalidConfig(
                f"'{refused(url)}' is no address of a server.",
                next="For example http://127.0.0.1:8000.",
            )
        parts = urlsplit(url)
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        return cls(
            url=bare._replace(query="", fragment="").geturl().rstrip("/"),
            is_here=_is_here(parts.hostname or ""),
            token=unquote(parts.password) if parts.password else otherwise(),
        )

    @property
    def headers(self) -> Mapping[str, str]:
        """Of every request."""
        known = {"Content-Type": "application/json", CLIENT: halteres.__version__}
        return known if self.token is None else {**known, "Authorization": f"Bearer {self.token}"}


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
