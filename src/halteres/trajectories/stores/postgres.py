"""The store on PostgreSQL: one queue for several server processes, tokens in the table `bodies`.

    begin: lock ─▶ what others did since the last turn here ─▶ [decide] ─▶ rows, tokens, one entry of the log ─▶ COMMIT

The lock is a transaction's advisory lock: it ends with the transaction, so a server that dies holds up nobody. Under it
ids may be given from memory: nobody else gives any. What `commit` took survives the death of every server process,
whatever `durability` says.

Kept are the tokens of everything that waits and of the batch delivered last, which may be asked for again; of groups
that were set aside, archived or left over from another run the newest, within a budget: they are evidence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    MetaData,
    Table,
    any_,
    bindparam,
    delete,
    func,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from halteres.errors import Conflict
from halteres.trajectories.records import (
    Change,
    Delivery,
    DeliverySaved,
    GroupArrived,
    GroupRecord,
    KnownKey,
    Remembered,
    Standing,
)
from halteres.trajectories.stores import changelog, loading, postgres_connection, rows, tables
from halteres.trajectories.stores.postgres_connection import (
    AT_FIRST,
    LOCK_NOT_AVAILABLE,
    Connections,
    Durability,
    holder,
    sqlstate,
)
from halteres.trajectories.stores.store import GroupsQuery, News, StoreFailed

metadata = MetaData()

schema_version = Table(
    "schema_version",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),  # always 1
    Column("version", Integer, nullable=False),
)

TABLES = (*tables.RECORDS, tables.bodies, changelog.turns)


_log = logging.getLogger(__name__)


def _prepare(connection: Connection, name: str) -> None:
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


_is_asked_for = tables.bodies.c.group_id == any_(bindparam("ids", type_=ARRAY(BigInteger)))  # one parameter for all
_FIND = select(tables.bodies).where(_is_asked_for)
_DELETE = delete(tables.bodies).where(_is_asked_for)
_LAST_DELIVERED = select(tables.deliveries.c.group_ids).join(
    tables.run, tables.run.c.last_delivery == tables.deliveries.c.id
)

_PRUNE = text("""
DELETE FROM bodies WHERE group_id IN (
    SELECT id FROM (
        SELECT groups.id, sum(groups.num_bytes) OVER (ORDER BY groups.id DESC) AS num_bytes_from_here
        FROM bodies JOIN groups ON groups.id = bodies.group_id
        WHERE groups.place NOT IN ('queued', 'buffered', 'out')
          AND groups.delivery IS DISTINCT FROM (SELECT last_delivery FROM run)
    ) AS evidence
    WHERE num_bytes_from_here > :keep_bytes
)
""")


def _write_tokens(connection: Connection, changes: Sequence[Change]) -> None:
    """Write the tokens of groups that arrived."""
    arrived = (change for change in changes if isinstance(change, GroupArrived))
    values = [{"group_id": change.group.id, "element": change.body} for change in arrived]
    if values:
        connection.execute(insert(tables.bodies), values)


def _find_tokens(connection: Connection, group_ids: Iterable[int]) -> dict[int, bytes]:
    """The elements of those groups that have them still."""
    return {row.group_id: row.element for row in connection.execute(_FIND, {"ids": list(group_ids)})}


def _newest_tokens(connection: Connection) -> bytes | None:
    """The element of the group of the run that entered the queue last, of those still kept."""
    newest = loading.newest(connection)
    found = _find_tokens(connection, newest)
    return next((found[group_id] for group_id in newest if group_id in found), None)


def _release_tokens(connection: Connection, changes: Sequence[Change]) -> None:
    """Delete the tokens of every batch that is not the last delivered any more. Before the changes are written."""
    saved = (change.delivery for change in changes if isinstance(change, DeliverySaved))
    delivered = [delivery.groups for delivery in saved if delivery.standing is Standing.DELIVERED]
    if not delivered:
        return
    before = connection.scalar(_LAST_DELIVERED)
    if before is not None:
        delivered.insert(0, msgspec.json.decode(before, type=tuple[int, ...]))
    released = {group_id for groups in delivered[:-1] for group_id in groups} - set(delivered[-1])
    if released:
        connection.execute(_DELETE, {"ids": list(released)})


def _prune_tokens(connection: Connection, keep_bytes: int) -> None:
    """Delete evidence, the oldest first, until no more than so many bytes of it are left."""
    connection.execute(_PRUNE, {"keep_bytes": keep_bytes})


QUEUE = 0x68616C7465726573
"""Number of the advisory lock: one queue in a database."""

KEEP_BYTES = 1024**3

PRUNED_EVERY = 64
"""Turns from one clearing away of old turns and evidence to the next."""

PATIENCE_S = 20.0
"""How long a server that runs waits for a PostgreSQL that is being started again."""


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
        self._connections = Connections(url, durability)
        self._keep_bytes = keep_bytes
        self._turn: Connection | None = None
        self._known: changelog.Mark | None = None  # the last turn whose changes the server has; None: ask for all
        try:
            with self._connections.reporting_failures("The trajectory database cannot be opened.", AT_FIRST):
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
        with self._connections.reporting_failures("The trajectory queue gave no turn."):
            connection = self._connections.connect()
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
        with self._connections.reporting_failures("The changes were not stored."), self._ending() as connection:
            if known is None:
                raise StoreFailed("The changes were not stored.", "No turn was begun for them.")
            self._write(connection, changes)
            made = changelog.append(connection, known, changes)
            if made.number % PRUNED_EVERY == 0:
                changelog.prune(connection, made)
                _prune_tokens(connection, self._keep_bytes)
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
            _log.warning("%s: a turn ended with its connection: %s", self._connections.name, error)

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
            return _find_tokens(connection, group_ids)

    def latest_body(self) -> bytes | None:
        """See `Store`."""
        with self._reading() as connection:
            return _newest_tokens(connection)

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
        names = [table.name for table in TABLES]
        with self._reading() as connection:
            return int(connection.scalar(_NUM_BYTES, {"names": names}) or 0)

    def close(self) -> None:
        """See `Store`."""
        self.abandon()
        self._connections.close()

    @contextmanager
    def _reading(self, patience_s: float = 0.0, isolation_level: str = "AUTOCOMMIT") -> Iterator[Connection]:
        with (
            self._connections.reporting_failures("The trajectory database cannot be read."),
            self._connections.connect(patience_s) as connection,
        ):
            yield connection.execution_options(isolation_level=isolation_level)

    def _open(self, durability: Durability) -> None:
        with self._connections.connect() as connection:
            _lock(connection)
            _prepare(connection, self._connections.name)
            if durability == "power":
                _check_power(connection, self._connections.name)
            connection.commit()

    @staticmethod
    def _write(connection: Connection, changes: Sequence[Change]) -> None:
        _release_tokens(connection, changes)
        rows.write(connection, changes)
        _write_tokens(connection, changes)

    @contextmanager
    def _ending(self) -> Iterator[Connection]:
        """The connection of the turn, which ends."""
        connection, self._turn = self._turn, None
        if connection is None:
            raise StoreFailed("The changes were not stored.", "No turn was begun for them.")
        with connection:
            yield connection

    def _news(self, connection: Connection, known: Sequence[KnownKey] = ()) -> News:
        news = None if self._known is None else changelog.since(connection, self._known)
        if news is None:
            return News(afresh=self._everything(connection), known=known)
        changes, self._known = news
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
            f"The trajectory queue gave no turn within {postgres_connection.LOCK_S} s.",
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
