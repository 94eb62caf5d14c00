"""The tables of a trajectory database in PostgreSQL, and the version they have.

Owns: creating them once, refusing others; how tokens are laid out on PostgreSQL's disk.
Never: migrates, drops, takes the lock under which it works (the store does).
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, Table, insert, inspect, select, text

from halteres.errors import Conflict
from halteres.trajectories.stores import changelog, tables

metadata = MetaData()

schema_version = Table(
    "schema_version",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),  # always 1
    Column("version", Integer, nullable=False),
)

TABLES = (*tables.RECORDS, tables.bodies, changelog.turns)


def prepare(connection: Connection, name: str) -> None:
    """Create what is missing in an empty database. `name` is what errors call it.

    Raises:
        Conflict: it has tables of another version, or of somebody else.
    """
    present = set(inspect(connection).get_table_names())
    if schema_version.name in present:
        _check_version(connection, name)
    else:
        _check_empty(present, name)
        _create(connection)


def _create(connection: Connection) -> None:
    for table in (schema_version, *TABLES):
        table.create(connection)
    # Tokens come as JSON, some as text that was gzipped on its way: pressing them again costs more than it saves.
    connection.execute(text("ALTER TABLE bodies ALTER COLUMN element SET STORAGE EXTERNAL"))
    connection.execute(insert(schema_version), {"id": 1, "version": tables.SCHEMA_VERSION})
    changelog.begin(connection)


def _check_version(connection: Connection, name: str) -> None:
    found = connection.scalar(select(schema_version.c.version))
    if found != tables.SCHEMA_VERSION:
        raise Conflict(
            f"The trajectory database {name} has version {found}.",
            f"This server reads version {tables.SCHEMA_VERSION}.",
            "Name another database with --database, or use the Halteres version that wrote it.",
        )


def _check_empty(present: set[str], name: str) -> None:
    foreign = sorted(present & {table.name for table in TABLES})
    if foreign:
        raise Conflict(
            f"The database {name} is no trajectory database.",
            f"It has tables of the same names that are somebody else's: {', '.join(foreign)}.",
            "Create a database for this queue alone, and name it with --database.",
        )
