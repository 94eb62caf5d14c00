"""What SQL dialects word differently, worded once.

Owns: inserting or overwriting; lists of any length.
Never: knows a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

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
