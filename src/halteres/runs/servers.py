"""A run's servers: where they are, and the secret that a request must bring.

A run's own servers answer whoever knows their secret. It reaches those who may know it by a variable of the run's
processes, and by two files that the run's owner alone may read (wiring.json, and config.yaml for the environment). It
comes in a request's `Authorization`: an inference client of any make sends it as its `api_key`; a client of the
trajectory server has it as the password of the address, `http://run:SECRET@127.0.0.1:PORT`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from halteres.clients.trajectories.address import Address
from halteres.errors import InvalidConfig
from halteres.files import NOT_JSON, read_regular
from halteres.redaction import Redactor
from halteres.runs.directory import RunDirectory

WIRING = "wiring.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server."""

    url: str  # without login
    key: str | None = field(default=None, repr=False)  # None: it asks for none, or we may not know it


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Those of one run; None: not known yet."""

    service: Server | None = None
    trajectories: Server | None = None

    @property
    def redactor(self) -> Redactor:
        """Strikes their keys out of a text."""
        return Redactor(one.key for one in (self.service, self.trajectories) if one and one.key)


class _Keys(msgspec.Struct, frozen=True, kw_only=True):
    """What of wiring.json is not in run.json."""

    api_key: str | None = None
    api_url: str | None = None


def servers_of(run: RunDirectory) -> Servers:
    """Addresses from run.json, keys from wiring.json; no key where that cannot be read or is older than keys."""
    urls = run.state().urls
    service, api = urls.get("service"), urls.get("api")
    try:
        keys = msgspec.json.decode(read_regular(run.path / WIRING), type=_Keys)
        if keys.api_url:
            Address.of(keys.api_url)  # whether it is one
    except (OSError, InvalidConfig, *NOT_JSON):
        keys = _Keys()
    return Servers(
        service=Server(url=service, key=keys.api_key) if service else None,
        trajectories=Server(url=api, key=Address.of(keys.api_url or api).token) if api else None,
    )


def new_secret() -> str:
    """144 random bits, in the form that every version of the SDK takes for a key.

    So short that the address which holds it fits into a line of 80 columns: atroposlib 0.4.0 prints its config, broken
    there, and half a secret is struck out of no log.
    """
    return f"tml-run-{secrets.token_urlsafe(18)}"


def with_login(url: str, secret: str) -> str:
    """The address for a client that knows no keys."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"run:{secret}@{parts.netloc}").geturl()
