"""The flags of a trajectory server, for every command that starts one.

Owns: their names and words; the token's way in (a file or a variable, never an argument, which every user could read);
that the database's name is a file's.
Never: judges another value (`options` does), makes a file.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from halteres.config import environ
from halteres.errors import InvalidConfig
from halteres.loopback import HOST
from halteres.trajectories.options import FILE_NAME, Durability, Gzip, Options, default_database
from halteres.trajectories.rules import Composition, Rules, Validation

_BYTES = re.compile(r"(\d+)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}

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
    _add_door(made.add_argument_group("who may talk to it").add_argument)
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


Add = Callable[..., argparse.Action]


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


def _add_door(add: Add) -> None:
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
