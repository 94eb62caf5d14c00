"""What an operator may choose about a trajectory server: rules, bounds, the command line's flags.

The token comes from a file or a variable, never as an argument, which every user of the machine could read.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from halteres.config import environ
from halteres.errors import InvalidConfig
from halteres.loopback import HOST
from halteres.trajectories.stores.store import Durability, Store

Composition = Literal["fifo", "weighted"]
Validation = Literal["quarantine", "strict"]

Gzip = Literal["auto", "always", "never"]

FILE_NAME = "trajectories.sqlite"
"""Of a queue's file, where nobody gave it one."""

SMALLEST_TOKEN = 16
"""Characters: what nobody guesses through a network."""

MEBIBYTE = 1024 * 1024

_TOKEN = re.compile(r"[!-~]+")

_NAME = re.compile(r"[0-9a-z_]([0-9a-z_.-]*[0-9a-z_])?")

_POSTGRES = ("postgresql://", "postgres://")

_BYTES = re.compile(r"(\d+)\s*([kmgt]?)(i?b)?", re.IGNORECASE)

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}

Add = Callable[..., argparse.Action]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one server. A trainer's own `max_staleness` goes before the server's."""

    validation: Validation = "quarantine"  # strict: 422 instead of setting a useless group aside, and more checks
    composition: Composition = "fifo"  # weighted: batches follow the environments' weights (fair queueing)
    max_staleness: int | None = None  # policy versions; None: unbounded
    require_version: bool = False  # untagged groups are set aside
    env_timeout_s: float = 60.0  # an environment silent for longer has no weight and no minimum share
    min_share_patience_s: float | None = None  # then a batch goes without a starved environment; None: never
    max_queue_batches: int | None = None  # of what waits; from there environments are told to pause
    max_queue_bytes: int = 32 * 1024**3  # of what waits; from there posts are held back, then refused with 503
    same_content_s: float = 0.0  # a body that an environment sends again within it counts once; 0: off


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
        bounds = f"at least {_digits(least)}" if math.isinf(most) else f"from {_digits(least)} to {_digits(most)}"
        raise InvalidConfig(f"{flag} is {_digits(value)}.", f"It must be {bounds}.")


def _digits(number: float) -> str:
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


_RULES, _OPTIONS = Rules(), Options(database="")


def num_bytes(text: str) -> int:
    """Bytes, as flags give them: '64', '64k', '2G'; k, M, G and T are powers of 1024.

    Raises:
        ArgumentTypeError: it is none of that.
    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of bytes: 500000, 64k, 256M, 32G")
    return int(found[1]) * _UNITS[found[2].lower()]


def parser(program: str = "halteres serve trajectories") -> argparse.ArgumentParser:
    """A parser whose result `options_of` understands."""
    made = argparse.ArgumentParser(prog=program, description="Serve the Atropos trajectory API.", allow_abbrev=False)
    _add_place(made.add_argument)
    _add_access(made.add_argument_group("who may talk to it").add_argument)
    _add_rules(made.add_argument_group("rules").add_argument)
    return made


def options_of(arguments: argparse.Namespace) -> Options:
    """The options that these arguments, and the environment, make.

    Raises:
        InvalidConfig: a value is out of bounds, the token's file cannot be read, or the database's name is no file's.
    """
    return Options(
        database=_database(arguments.database),
        host=arguments.host,
        port=arguments.port,
        listen_fd=arguments.listen_fd,
        durability=arguments.durability,
        token=_token(arguments.token_file),
        insecure=arguments.insecure,
        gzip=arguments.gzip,
        allowed_hosts=frozenset(name.lower() for name in arguments.allow_host),
        max_body=arguments.max_body,
        rules=_rules(arguments),
    )


def _add_place(add: Add) -> None:
    add("--database", metavar="FILE|URL", help="SQLite file, or postgresql://... [HALTERES_DATABASE_URL]")
    add("--host", default=HOST, help="address to listen on; beyond this machine with a token [%(default)s]")
    add("--port", type=int, default=_OPTIONS.port, help="0 takes a free one [%(default)s]")
    add("--listen-fd", type=int, metavar="FD", help="inherited socket that listens already, instead of host and port")
    add(
        "--durability",
        choices=get_args(Durability),
        default=_OPTIONS.durability,
        help="what an answer survives: the death of the process, or the loss of power too [%(default)s]",
    )
    add("--gzip", choices=get_args(Gzip), default=_OPTIONS.gzip, help="replies; auto: only to other machines [auto]")
    add("--max-body", type=num_bytes, default=_OPTIONS.max_body, metavar="BYTES", help="of a request, inflated [256M]")


def _add_access(add: Add) -> None:
    add("--token-file", type=Path, metavar="FILE", help="holds what requests must carry [HALTERES_TRAJECTORY_TOKEN]")
    add("--insecure", action="store_true", help="serve other machines without a token")
    add("--allow-host", action="append", default=[], metavar="NAME", help="a DNS name of this server; may be repeated")


def _add_rules(add: Add) -> None:
    add(
        "--validate",
        choices=get_args(Validation),
        default=_RULES.validation,
        help="useless groups are set aside, or refused with 422 [%(default)s]",
    )
    add(
        "--composition",
        choices=get_args(Composition),
        default=_RULES.composition,
        help="of batches: in order of arrival, or by the environments' weights [%(default)s]",
    )
    add("--max-staleness", type=int, metavar="VERSIONS", help="a group may lag behind the trainer [unbounded]")
    add("--require-version", action="store_true", help="set groups without a policy version aside")
    add(
        "--env-timeout",
        type=float,
        default=_RULES.env_timeout_s,
        metavar="S",
        help="of silence, after which an environment has no weight and no minimum share [60]",
    )
    add("--min-alloc-patience", type=float, metavar="S", help="then a batch goes without a starved environment [never]")
    add("--max-queue-batches", type=int, metavar="N", help="that wait; then environments are told to pause [unbounded]")
    add(
        "--max-queue-bytes",
        type=num_bytes,
        default=_RULES.max_queue_bytes,
        metavar="BYTES",
        help="that wait; then posts are held back, and refused with 503 [32G]",
    )
    add(
        "--same-content-window",
        type=float,
        default=_RULES.same_content_s,
        metavar="S",
        help="a body that an environment sends twice within it counts once [0: off]",
    )


def _rules(arguments: argparse.Namespace) -> Rules:
    return Rules(
        validation=arguments.validate,
        composition=arguments.composition,
        max_staleness=arguments.max_staleness,
        require_version=arguments.require_version,
        env_timeout_s=arguments.env_timeout,
        min_share_patience_s=arguments.min_alloc_patience,
        max_queue_batches=arguments.max_queue_batches,
        max_queue_bytes=arguments.max_queue_bytes,
        same_content_s=arguments.same_content_window,
    )


def _database(given: str | None) -> str:
    """What the queue is kept in; a URL as it is, the path of a file whole."""
    name = given or default_database()
    if "://" in name:
        return name
    try:
        file = Path(name).expanduser().resolve()
        if name.endswith(os.sep) or file.is_dir():
            raise _no_file(name, "It is a folder; a queue is kept in a file.", file / FILE_NAME)
        if file.exists() and not file.is_file():
            raise _no_file(name, "It is there, but is no file.")
        above = next(folder for folder in file.parents if folder.exists())
        if not above.is_dir():
            raise _no_file(name, f"{above} is no folder.")
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody is called so whose home a ~ means
        raise _no_file(name, f"{error.strerror if isinstance(error, OSError) else error}".rstrip(".") + ".") from error
    return name


def _no_file(name: str, why: str, instead: Path | str = "FILE") -> InvalidConfig:
    return InvalidConfig(
        f"--database '{name}' can be no database.", why, f"Name a file in a folder of yours: --database {instead}."
    )


def _token(file: Path | None) -> str | None:
    if file is None:
        return environ.trajectory_token()
    try:
        return file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "It is no text."
        raise InvalidConfig(f"The token's file {file} cannot be read.", f"{why}.".replace("..", ".")) from error
