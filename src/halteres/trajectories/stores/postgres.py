"""The store on PostgreSQL: one queue for several server processes.

Owns: turns that exclude each other across servers, what each server has learnt of the others, the tokens' table.
Never: decides; translates records (`rows`, `loading` do); speaks to PostgreSQL in a way of its own (`postgres_link`).
Promise: what `commit` took survives the death of every server process, whatever `durability` says.

    begin: lock ─▶ what others did since the last turn here ─▶ [decide] ─▶ rows, tokens, one entry of the log ─▶ COMMIT

The lock is a transaction's advisory lock: it ends with the transaction, so a server that dies holds up nobody. Under it
ids may be given from memory: nobody else gives any.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from halteres.errors import Conflict
from halteres.trajectories.records import Change, Delivery, GroupRecord, KnownKey, Remembered
from halteres.trajectories.stores import changelog, loading, postgres_link, postgres_schema, postgres_tokens, rows
from halteres.trajectories.stores.postgres_link import (
    AT_FIRST,
    LOCK_NOT_AVAILABLE,
    Durability,
    Link,
    holder,
    sqlstate,
)
from halteres.trajectories.stores.store import GroupsQuery, News, StoreFailed

QUEUE = 0x68616C7465726573
"""Number of the advisory lock: one queue in a database."""

KEEP_BYTES = 1024**3

PRUNED_EVERY = 64
"""Turns from one clearing away of old turns and evidence to the next."""

PATIENCE_S = 20.0
"""How long a server that runs waits for a PostgreSQL that is being started again."""

_log = logging.getLogger(__name__)


class PostgresStore:
    """One database, shared by any number of servers.

    Args:
        url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE.
        durability: process: PostgreSQL's own settings, by which a commit survives its crash too; power: the same, and
            a `synchronous_commit` that was turned off is turned on for these commits.
        keep_bytes: tokens kept of groups that were set aside or archived, the newest.

    Raises:
        InvalidConfig: that is no such URL, or the client library is missing.
        Conflict: its tables are of another version.
        StoreFailed: it cannot be reached.
    """

    is_shared = True
    is_quick = False
    is_full = False  # its server's disk is not ours to see

    def __init__(self, url: str, durability: Durability = "process", keep_bytes: int = KEEP_BYTES) -> None:
        self._link = Link(url, durability)
        self._keep_bytes = keep_bytes
        self._turn: Connection | None = None
        self._known: changelog.Mark | None = None  # the last turn whose changes the server has; None: ask for all
        try:
            with self._link.told("The trajectory database cannot be opened.", AT_FIRST):
                self._open(durability)
        except BaseException:
            self.close()
            raise

    def load(self) -> Remembered:
        """See `Store`. From here on `begin` and `news` tell what came after it."""
        self.abandon()
        with self._reading(PATIENCE_S, isolation_level="REPEATABLE READ") as connection:
            return self._everything(connection)

    def begin(self, keys: Sequence[str] = ()) -> News:
        """See `Store`."""
        self.abandon()
        with self._link.told("The trajectory queue gave no turn."):
            connection = self._link.connect()
            try:
                _lock(connection)
                known = loading.known_keys(connection, keys) if keys else ()
                news = self._news(connection, known)
            except BaseException:
                connection.close()
                raise
        self._turn = connection
        return news

    def commit(self, changes: Sequence[Change]) -> None:
        """See `Store`."""
        known, self._known = self._known, None  # whether a COMMIT that fails was kept, nobody knows
        with self._link.told("The changes were not stored."), self._ending() as connection:
            if known is None:
                raise StoreFailed("The changes were not stored.", "No turn was begun for them.")
            self._write(connection, changes)
            made = changelog.append(connection, known, changes)
            if made.number % PRUNED_EVERY == 0:
                changelog.prune(connection, made)
                postgres_tokens.prune(connection, self._keep_bytes)
            connection.commit()
        self._known = made

    def abandon(self) -> None:
        """See `Store`."""
        if self._turn is None:
            return
        try:
            with self._ending() as connection:
                connection.rollback()
        except SQLAlchemyError as error:  # a lost connection has ended its turn already
            _log.warning("%s: a turn ended with its connection: %s", self._link.name, error)

    def news(self) -> News:
        """See `Store`."""
        with self._reading(isolation_level="REPEATABLE READ") as connection:
            return self._news(connection)

    def bodies(self, group_ids: Sequence[int]) -> list[bytes]:
        """See `Store`."""
        found = self.find_bodies(group_ids)
        gone = [group_id for group_id in group_ids if group_id not in found]
        if gone:
            raise StoreFailed(f"The tokens of {len(gone)} groups are not kept any more.", f"The first is {gone[0]}.")
        return [found[group_id] for group_id in group_ids]

    def find_bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        """See `Store`."""
        with self._reading() as connection:
            return postgres_tokens.find(connection, group_ids)

    def latest_body(self) -> bytes | None:
        """See `Store`."""
        with self._reading() as connection:
            return postgres_tokens.newest(connection)

    def delivery(self, batch_id: int) -> Delivery | None:
        """See `Store`."""
        with self._reading() as connection:
            return loading.delivery(connection, batch_id)

    def groups(self, query: GroupsQuery) -> list[GroupRecord]:
        """See `Store`."""
        with self._reading() as connection:
            return loading.listed(connection, query)

    def num_bytes(self) -> int:
        """See `Store`."""
        names = [table.name for table in postgres_schema.TABLES]
        with self._reading() as connection:
            return int(connection.scalar(_NUM_BYTES, {"names": names}) or 0)

    def close(self) -> None:
        """See `Store`."""
        self.abandon()
        self._link.close()

    @contextmanager
    def _reading(self, patience_s: float = 0.0, isolation_level: str = "AUTOCOMMIT") -> Iterator[Connection]:
        with self._link.told("The trajectory database cannot be read."), self._link.connect(patience_s) as connection:
            yield connection.execution_options(isolation_level=isolation_level)

    def _open(self, durability: Durability) -> None:
        with self._link.connect() as connection:
            _lock(connection)
            postgres_schema.prepare(connection, self._link.name)
            if durability == "power":
                _check_power(connection, self._link.name)
            connection.commit()

    @staticmethod
    def _write(connection: Connection, changes: Sequence[Change]) -> None:
        postgres_tokens.release(connection, changes)
        rows.write(connection, changes)
        postgres_tokens.write(connection, changes)

    @contextmanager
    def _ending(self) -> Iterator[Connection]:
        """The connection of the turn, which ends."""
        connection, self._turn = self._turn, None
        if connection is None:
            raise StoreFailed("The changes were not stored.", "No turn was begun for them.")
        with connection:
            yield connection

    def _news(self, connection: Connection, known: Sequence[KnownKey] = ()) -> News:
        told = None if self._known is None else changelog.since(connection, self._known)
        if told is None:
            return News(afresh=self._everything(connection), known=known)
        changes, self._known = told
        return News(changes=changes, known=known)

    def _everything(self, connection: Connection) -> Remembered:
        remembered = loading.everything(connection)
        self._known = changelog.newest(connection)
        return remembered


_LOCK = select(func.pg_advisory_xact_lock(QUEUE))
_NUM_BYTES = text("SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest(CAST(:names AS text[])) AS name")


def _lock(connection: Connection) -> None:
    """Take the turn, until the transaction ends."""
    try:
        connection.execute(_LOCK)
    except DBAPIError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        connection.rollback()
        raise StoreFailed(
            f"The trajectory queue gave no turn within {postgres_link.LOCK_S} s.",
            f"{holder(connection, QUEUE)}.",
            "Look at that server: it hangs, or its database is slow; the request can be sent again.",
        ) from error


def _check_power(connection: Connection, name: str) -> None:
    if connection.scalar(text("SHOW fsync")) == "off":
        raise Conflict(
            f"The PostgreSQL of {name} does not keep what it commits when the power fails.",
            "Its setting fsync is off.",
            "Turn it on there, or start without --durability power.",
        )
