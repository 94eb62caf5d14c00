"""What an operator may choose about a trajectory server, checked once.

Owns: the choices, their bounds and defaults; which store a database's name means.
Never: reads arguments (`arguments` does), listens, decides by a rule.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from halteres.config import environ
from halteres.errors import InvalidConfig
from halteres.loopback import HOST
from halteres.trajectories.rules import Rules
from halteres.trajectories.stores.store import Durability, Store

Gzip = Literal["auto", "always", "never"]

FILE_NAME = "trajectories.sqlite"
"""Of a queue's file, where nobody gave it one."""

SMALLEST_TOKEN = 16
"""Characters: what nobody guesses through a network."""

MEBIBYTE = 1024 * 1024

_TOKEN = re.compile(r"[!-~]+")
_NAME = re.compile(r"[0-9a-z_]([0-9a-z_.-]*[0-9a-z_])?")
_POSTGRES = ("postgresql://", "postgres://")


def default_database() -> str:
    """The database of a server that is told nothing: HALTERES_DATABASE_URL, or a SQLite file."""
    return environ.database_url() or str(environ.home() / FILE_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The choices of one server.

    Raises:
        InvalidConfig: a value is out of its bounds; the sentence names the flag.
    """

    database: str = field(default_factory=default_database)  # SQLite file, or postgresql:// URL
    host: str = HOST
    port: int = 8000  # 0: a free one
    listen_fd: int | None = None  # an inherited socket that listens already; host and port are then ignored
    durability: Durability = "process"  # power: a reply also survives the loss of power
    token: str | None = field(default=None, repr=False)  # every request must carry it; None: nobody is asked
    insecure: bool = False  # beyond this machine without a token
    gzip: Gzip = "auto"  # of replies, where the client accepts it; auto: only those that leave this machine
    allowed_hosts: frozenset[str] = frozenset()  # further DNS names of this server, in small letters
    max_body: int = 256 * MEBIBYTE  # bytes of one request, inflated
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        _check("--port", self.port, 0, 65535)
        _check("--max-body", self.max_body, 1024, 1024 * MEBIBYTE)
        if self.token is not None:
            _check_token(self.token)
        for name in self.allowed_hosts:
            _check_name(name)
        _check_rules(self.rules)

    @property
    def is_shared(self) -> bool:
        """Whether several servers may use the database at once."""
        return self.database.startswith(_POSTGRES)


def open_store(options: Options) -> Store:
    """The database, made if it is missing.

    Raises:
        InvalidConfig: what it needs is not installed.
        Conflict, StoreFailed: it cannot be opened.
    """
    return _postgres(options) if options.is_shared else _sqlite(options)


def _sqlite(options: Options) -> Store:
    from halteres.trajectories.stores.sqlite import SqliteStore

    if "://" in options.database:
        scheme = options.database.partition("://")[0]
        raise InvalidConfig(
            f"--database names no database that is known: '{scheme}://'.",
            "A queue lies in an SQLite file, or in PostgreSQL.",
            "Name a file, or postgresql://USER@HOST/DATABASE.",
        )
    return SqliteStore(Path(options.database).expanduser(), durability=options.durability)


def _postgres(options: Options) -> Store:
    from halteres.trajectories.stores.postgres import PostgresStore

    return PostgresStore(options.database, durability=options.durability)


def _check(flag: str, value: float, least: float, most: float = math.inf) -> None:
    if not least <= value <= most:
        bounds = f"at least {_said(least)}" if math.isinf(most) else f"from {_said(least)} to {_said(most)}"
        raise InvalidConfig(f"{flag} is {_said(value)}.", f"It must be {bounds}.")


def _said(number: float) -> str:
    """A whole number with all its digits."""
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def _check_token(token: str) -> None:
    if len(token) < SMALLEST_TOKEN or not _TOKEN.fullmatch(token):
        raise InvalidConfig(
            "The token cannot be used.",
            f"It must have {SMALLEST_TOKEN} characters or more, letters, digits and signs, no blanks.",
            'Make one: python -c "import secrets; print(secrets.token_urlsafe(24))"',
        )


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"--allow-host '{name}' is no name of a host.", "It has no scheme, no port, no path.", "E.g. gpu7.lan."
        )


def _check_rules(rules: Rules) -> None:
    _check("--env-timeout", rules.env_timeout_s, 1, 86400)
    _check("--same-content-window", rules.same_content_s, 0, 86400)
    _check("--max-queue-bytes", rules.max_queue_bytes, MEBIBYTE)
    if rules.max_staleness is not None:
        _check("--max-staleness", rules.max_staleness, 0, 2**31)
    if rules.min_share_patience_s is not None:
        _check("--min-alloc-patience", rules.min_share_patience_s, 0, 86400)
    if rules.max_queue_batches is not None:
        _check("--max-queue-batches", rules.max_queue_batches, 1, 2**31)
