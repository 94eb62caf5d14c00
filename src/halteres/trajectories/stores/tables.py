"""The tables of a trajectory database, and what SQL dialects word differently.

Tokens are beside the rows: SQLite's name their place in a segment file, PostgreSQL holds them (`bodies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.dialects import postgresql, sqlite

SCHEMA_VERSION = 3

NOBODY = -1
"""Environment id in `tallies` of groups that name none; a primary key has no nulls."""

metadata = MetaData()

_Id = BigInteger().with_variant(Integer, "sqlite")  # there the row's own number, without an index of its own

run = Table(
    "run",
    metadata,
    Column("id", Integer, primary_key=True),  # always 1: the run being served
    Column("registration", Text),  # JSON; null before /register
    Column("uuid", String(40), nullable=False),
    Column("started", Boolean, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("first_group", BigInteger, nullable=False),
    Column("asked_version", BigInteger),
    Column("last_delivery", BigInteger),
    Column("parked", Boolean, nullable=False),
)

environments = Table(
    "environments",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("desired_name", Text, nullable=False),
    Column("registration", Text),  # JSON; null if adopted
    Column("connected", Boolean, nullable=False),
    Column("adopted_size", Integer, nullable=False),
    Column("last_seen", Float),  # unix s, coarse
)

groups = Table(
    "groups",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=False),
    Column("env_id", BigInteger),
    Column("size", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("received_at", Float, nullable=False),
    Column("place", String(16), nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("version_min", BigInteger),
    Column("version_max", BigInteger),
    Column("reason", String(64)),
    Column("why", Text),
    Column("delivery", BigInteger),
    Column("key", Text),  # unique in its run; another run may use it again
    Column("fingerprint", BigInteger, nullable=False),
    Column("verdict", LargeBinary, nullable=False),
    Column("segment", Integer),  # number of the file that holds the tokens, where a store has files
    Column("start", BigInteger),  # byte in it
    Column("length", BigInteger),  # bytes
    Column("checksum", BigInteger),  # CRC-32 of them
)
Index("groups_by_place", groups.c.place, groups.c.id)  # every further index costs each group a page
_is_keyed = groups.c.key.is_not(None)
Index("groups_by_key", groups.c.key, sqlite_where=_is_keyed, postgresql_where=_is_keyed)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=False),
    Column("standing", String(16), nullable=False, index=True),
    Column("step", BigInteger),
    Column("version", BigInteger),
    Column("group_ids", Text, nullable=False),  # JSON array, in the order of the batch
    Column("num_sequences", Integer, nullable=False),
    Column("made_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("version_min", BigInteger),
    Column("version_max", BigInteger),
    Column("held", BigInteger),
)

tallies = Table(  # groups of the run that no longer wait: counted once, so that a start need not read them all
    "tallies",
    metadata,
    Column("env_id", BigInteger, primary_key=True, autoincrement=False),  # or NOBODY
    Column("place", String(16), primary_key=True),
    Column("reason", String(64), primary_key=True),  # "": none
    Column("num_groups", BigInteger, nullable=False),
)

bodies = Table(
    "bodies",
    metadata,
    Column("group_id", _Id, primary_key=True, autoincrement=False),
    Column("element", LargeBinary, nullable=False),
)

segments = Table(  # the files that hold something; what a group says of another is out of date
    "segments",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("first_group", BigInteger, nullable=False),  # whose tokens it holds; those of the next are in the next file
)

RECORDS = (run, environments, groups, deliveries, tallies)
"""What every store has; where the tokens are comes beside it."""

T = TypeVar("T")

LARGEST_LIST = 500
"""Values in one IN list: every dialect takes that many parameters."""


def chunks(values: Iterable[T]) -> Iterator[list[T]]:
    """Lists that fit into an IN list."""
    listed = list(values)
    return (listed[first : first + LARGEST_LIST] for first in range(0, len(listed), LARGEST_LIST))


def upsert(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows, or overwrite these columns of those with the same primary key. All rows name the same columns."""
    connection.execute(_upserting(connection.dialect.name, table, tuple(rows[0]), None), rows)


def add(connection: Connection, table: Table, rows: Sequence[dict[str, Any]], column: str) -> None:
    """Insert rows; where the primary key is there, add to the column instead."""
    connection.execute(_upserting(connection.dialect.name, table, tuple(rows[0]), column), rows)


@cache
def _upserting(dialect: str, table: Table, columns: tuple[str, ...], added: str | None) -> Any:
    made = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    keys = [column.name for column in table.primary_key]
    new = {name: made.excluded[name] for name in columns if name not in keys}
    if added is not None:
        new = {added: table.c[added] + made.excluded[added]}
    return made.on_conflict_do_update(index_elements=keys, set_=new)
