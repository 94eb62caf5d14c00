"""What an operator may choose about a trajectory server: rules, bounds, the command line's flags.

The token comes from a file or a variable, never as an argument, which every user of the machine
could read.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from halteres.config import environ
from halteres.errors import InvalidConfig
from halteres.loopback import HOST
from halteres.trajectories.stores.store import Durability

Composition = Literal["fifo", "weighted"]
Validation = Literal["quarantine", "strict"]
Gzip = Literal["auto", "always", "never"]

FILE_NAME = "trajectories.sqlite"  # of a queue's file, where nobody gave it one
SMALLEST_TOKEN = 16  # characters: what nobody guesses through a network
MEBIBYTE = 1024 * 1024

_TOKEN = re.compile(r"[!-~]+")
_NAME = re.compile(r"[0-9a-z_]([0-9a-z_.-]*[0-9a-z_])?")
_BYTES = re.compile(r"(\d+)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one server. A trainer's own `max_staleness` goes before the server's."""

    # strict: 422 instead of setting a useless group aside, and more checks
    validation: Validation = "quarantine"
    # weighted: batches follow the environments' weights (fair queueing)
    composition: Composition = "fifo"
    max_staleness: int | None = None  # policy versions; None: unbounded
    require_version: bool = False  # untagged groups are set aside
    # an environment silent for longer has no weight and no minimum share
    env_timeout_s: float = 60.0
    # then a batch goes without a starved environment; None: never
    min_share_patience_s: float | None = None
    max_queue_batches: int | None = None  # of what waits; from there environments are told to pause
    # of what waits; from there posts are held back, then refused with 503
    max_queue_bytes: int = 32 * 1024**3
    # a body that an environment sends again within it counts once; 0: off
    same_content_s: float = 0.0


def default_database() -> str:
    """Where no database is named: HALTERES_DATABASE_URL, or a SQLite file."""
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
    # an inherited socket that listens already; host and port are then ignored
    listen_fd: int | None = None
    durability: Durability = "process"  # power: a reply also survives the loss of power
    # every request must carry it; None: nobody is asked
    token: str | None = field(default=None, repr=False)
    insecure: bool = False  # beyond this machine without a token
    # of replies, where the client accepts it; auto: only those that leave this machine
    gzip: Gzip = "auto"
    # further DNS names of this server, in small letters
    allowed_hosts: frozenset[str] = frozenset()
    max_body: int = 256 * MEBIBYTE  # bytes of one request, inflated
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        rules = self.rules
        _check("--port", self.port, 0, 65535)
        _check("--max-body", self.max_body, 1024, 1024 * MEBIBYTE)
        _check("--env-timeout", rules.env_timeout_s, 1, 86400)
        _check("--same-content-window", rules.same_content_s, 0, 86400)
        _check("--max-queue-bytes", rules.max_queue_bytes, MEBIBYTE)
        _check("--max-staleness", rules.max_staleness, 0, 2**31)
        _check("--min-alloc-patience", rules.min_share_patience_s, 0, 86400)
        _check("--max-queue-batches", rules.max_queue_batches, 1, 2**31)
        if self.token is not None and (
            len(self.token) < SMALLEST_TOKEN or not _TOKEN.fullmatch(self.token)
        ):
            raise InvalidConfig(
                "The token cannot be used.",
                f"It must have {SMALLEST_TOKEN} characters or more, letters, digits and signs, no "
                "blanks.",
                'Make one: python -c "import secrets; print(secrets.token_urlsafe(24))"',
            )
        for name in self.allowed_hosts:
            if not _NAME.fullmatch(name):
                why = "It has no scheme, no port, no path."
                raise InvalidConfig(
                    f"--allow-host '{name}' is no name of a host.", why, "E.g. gpu7.lan."
                )

    @property
    def is_shared(self) -> bool:
        """Whether several servers may use the database at once."""
        return self.database.startswith(("postgresql://", "postgres://"))


_RULES = tuple(each.name for each in fields(Rules))
_PLAIN = tuple(
    each.name
    for each in fields(Options)
    if each.name not in ("database", "token", "allowed_hosts", "rules")
)  # options that are arguments as they are


def _check(flag: str, value: float | None, least: int, most: int | None = None) -> None:
    if value is not None and not (least <= value and (most is None or value <= most)):
        shown = str(int(value)) if float(value).is_integer() else f"{value:g}"
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidConfig(f"{flag} is {shown}.", f"It must be {bounds}.")


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
    """A parser whose result `options_of` understands: the names of its arguments are those of the
    options and rules.
    """
    made = argparse.ArgumentParser(
        prog=program, description="Serve the Atropos trajectory API.", allow_abbrev=False
    )
    add = made.add_argument
    add(
        "--database",
        metavar="FILE|URL",
        help="SQLite file, or postgresql://... [HALTERES_DATABASE_URL]",
    )
    add("--host", help="address to listen on; beyond this machine with a token [%(default)s]")
    add("--port", type=int, help="0 takes a free one [%(default)s]")
    add(
        "--listen-fd",
        type=int,
        metavar="FD",
        help="inherited socket that listens already, instead of host and port",
    )
    durability = (
        "what an answer survives: the death of the process, or the loss of power too [%(default)s]"
    )
    add("--durability", choices=get_args(Durability), help=durability)
    add("--gzip", choices=get_args(Gzip), help="replies; auto: only to other machines [auto]")
    add("--max-body", type=num_bytes, metavar="BYTES", help="of a request, inflated [256M]")

    add = made.add_argument_group("who may talk to it").add_argument
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds what requests must carry [HALTERES_TRAJECTORY_TOKEN]",
    )
    add("--insecure", action="store_true", help="serve other machines without a token")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a DNS name of this server; may be repeated",
    )

    add = made.add_argument_group("rules").add_argument
    validate = "useless groups are set aside, or refused with 422 [%(default)s]"
    add("--validate", dest="validation", choices=get_args(Validation), help=validate)
    composition = "of batches: in order of arrival, or by the environments' weights [%(default)s]"
    add("--composition", choices=get_args(Composition), help=composition)
    add("--max-staleness", type=int, metavar="VERSIONS", help="a group may lag behind [unbounded]")
    add("--require-version", action="store_true", help="set groups without a policy version aside")
    silence = "of silence, after which an environment has no weight and no minimum share [60]"
    add("--env-timeout", dest="env_timeout_s", type=float, metavar="S", help=silence)
    patience = "then a batch goes without a starved environment [never]"
    add("--min-alloc-patience", dest="min_share_patience_s", type=float, metavar="S", help=patience)
    add(
        "--max-queue-batches",
        type=int,
        metavar="N",
        help="that wait; then environments pause [unbounded]",
    )
    hold = "that wait; then posts are held back, and refused with 503 [32G]"
    add("--max-queue-bytes", type=num_bytes, metavar="BYTES", help=hold)
    twice = "a body that an environment sends twice within it counts once [0: off]"
    add("--same-content-window", dest="same_content_s", type=float, metavar="S", help=twice)

    defaults = Options(database="")
    made.set_defaults(
        **{name: getattr(defaults, name) for name in _PLAIN},
        **{name: getattr(defaults.rules, name) for name in _RULES},
    )
    return made


def options_of(arguments: argparse.Namespace) -> Options:
    """The options that these arguments, and the environment, make.

    Raises:
        InvalidConfig: a value is out of bounds, the token's file cannot be read, or the database's
            name is no file's.
    """
    token = environ.trajectory_token()
    if (file := arguments.token_file) is not None:
        try:
            token = file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "It is no text"
            raise InvalidConfig(f"The token's file {file} cannot be read.", f"{why}.") from error
    return Options(
        database=_database(arguments.database or default_database()),
        token=token,
        allowed_hosts=frozenset(name.lower() for name in arguments.allow_host),
        rules=Rules(**{name: getattr(arguments, name) for name in _RULES}),
        **{name: getattr(arguments, name) for name in _PLAIN},
    )


def _database(name: str) -> str:
    """A URL, or the path of a file; neither is opened or made here."""
    if "://" in name:
        return name
    instead = Path("FILE")
    try:
        file = Path(name).expanduser().resolve()
        if name.endswith(os.sep) or file.is_dir():
            why, instead = "It is a folder; a queue is kept in a file", file / FILE_NAME
        elif file.exists() and not file.is_file():
            why = "It is there, but is no file"
        else:
            return name
    except (OSError, RuntimeError) as error:
        # RuntimeError: nobody is called so whose home a ~ means
        why = f"{error.strerror if isinstance(error, OSError) else error}".rstrip(".")
    next = f"Name a file in a folder of yours: --database {instead}."
    raise InvalidConfig(f"--database '{name}' can be no database.", f"{why}.", next)
