"""The log of turns: how servers on one queue learn what the others did.

A server that knows the log up to `Mark` reads on from there. It must find that very turn again: where it was pruned, or
the database is an older one now (a backup, a replica that had not caught up), it begins afresh from the rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    LargeBinary,
    MetaData,
    Table,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
)

from halteres.trajectories.records import (
    Change,
    DeliverySaved,
    EnvSaved,
    EnvSeen,
    GroupArrived,
    GroupMoved,
    RunSaved,
)

KEPT_S = 120
"""How long a turn stays in the log: servers ask several times a second, and one that was away begins afresh."""

MOST_READ = 4096
"""Turns read at once; whoever is further behind begins afresh."""

KINDS: dict[str, type[Change]] = {
    "run": RunSaved,
    "env": EnvSaved,
    "seen": EnvSeen,
    "arrived": GroupArrived,
    "moved": GroupMoved,
    "delivery": DeliverySaved,
}
"""The word that tells what a change is, in the log."""

metadata = MetaData()

turns = Table(
    "turns",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # without gaps
    Column("nonce", BigInteger, nullable=False),  # random: tells two turns of one number apart
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("changes", LargeBinary, nullable=False),
)

_WORDS = {kind: word for word, kind in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode
_entry = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
_decoders = {word: msgspec.msgpack.Decoder(kind) for word, kind in KINDS.items()}

_NEWEST = select(turns.c.number, turns.c.nonce).order_by(turns.c.number.desc()).limit(1)
_known = bindparam("known", type_=BigInteger)
_SINCE = (
    select(turns.c.number, turns.c.nonce, case((turns.c.number > _known, turns.c.changes), else_=b"").label("changes"))
    .where(turns.c.number >= _known)
    .order_by(turns.c.number)
    .limit(bindparam("most"))
)
_age = func.extract("epoch", func.now() - turns.c.at)
_PRUNE = delete(turns).where(turns.c.number < bindparam("newest"), _age > bindparam("kept_s"))


@dataclass(frozen=True, slots=True)
class Mark:
    """A turn of the log: the last one that a server has applied."""

    number: int
    nonce: int


def encoded(changes: Iterable[Change]) -> bytes:
    """Changes as one entry, without tokens."""
    bare = (replace(change, body=b"") if isinstance(change, GroupArrived) else change for change in changes)
    return _encode([(_WORDS[type(change)], change) for change in bare])


def decoded(entry: bytes) -> list[Change]:
    """The changes of an entry.

    Raises:
        msgspec.DecodeError, KeyError: another version of Halteres wrote it.
    """
    return [_decoders[word].decode(change) for word, change in _entry.decode(entry)]


def begin(connection: Connection) -> None:
    """The first turn of a new log, which changed nothing: a log is never empty."""
    _append(connection, Mark(0, _nonce()), ())


def newest(connection: Connection) -> Mark:
    """The last turn of the log."""
    row = connection.execute(_NEWEST).one()
    return Mark(row.number, row.nonce)


def since(connection: Connection, known: Mark) -> tuple[list[Change], Mark] | None:
    """What happened after a turn, and the last turn now; None: the log does not tell, begin afresh."""
    found = connection.execute(_SINCE, {"known": known.number, "most": MOST_READ + 1}).all()
    if not found or (found[0].number, found[0].nonce) != (known.number, known.nonce) or len(found) > MOST_READ:
        return None
    return [change for row in found[1:] for change in decoded(row.changes)], Mark(found[-1].number, found[-1].nonce)


def append(connection: Connection, known: Mark, changes: Sequence[Change]) -> Mark:
    """Enter a turn behind the last one; gives its mark."""
    made = Mark(known.number + 1, _nonce())
    _append(connection, made, changes)
    return made


def prune(connection: Connection, newest: Mark) -> None:
    """Forget turns that everybody had time to read; the newest stays."""
    connection.execute(_PRUNE, {"kept_s": KEPT_S, "newest": newest.number})


def _append(connection: Connection, mark: Mark, changes: Sequence[Change]) -> None:
    row: dict[str, Any] = {"number": mark.number, "nonce": mark.nonce, "changes": encoded(changes)}
    connection.execute(insert(turns), row)


def _nonce() -> int:
    return secrets.randbits(63)
