"""The store on PostgreSQL: one queue for several server processes, tokens in the table `bodies`.

    begin: lock ─▶ what others did since the last turn here ─▶ [decide] ─▶ rows, tokens, one entry
        of the log ─▶ COMMIT

The lock is a transaction's advisory lock: it ends with the transaction, so a server that dies holds
up nobody. Under it ids may be given from memory: nobody else gives any. What `commit` took survives
the death of every server process, whatever `durability` says.

The log (`turns`) tells servers on one queue what the others did. A server that knows it up to some
turn reads on from there. It must find that very turn again: where it was pruned, or the database is
an older one now (a backup, a replica that had not caught up), the server begins afresh from the
rows.

Kept are the tokens of everything that waits and of the batch delivered last, which may be asked for
again; of groups that were set aside, archived or left over from another run the newest, within a
budget: they are evidence.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, Connection, bindparam, event, select, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from halteres.errors import Conflict, InvalidConfig, boundary
from halteres.redaction import Redactor
from halteres.trajectories.records import (
    Change,
    Delivery,
    EnvRecord,
    EnvSeen,
    GroupArrived,
    GroupRecord,
    Remembered,
    RunRecord,
    Standing,
    Update,
)
from halteres.trajectories.stores import store
from halteres.trajectories.stores.store import SCHEMA_VERSION, Durability, Store, StoreFailed

SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")

QUEUE = 0x68616C7465726573  # number of the advisory lock: one queue in a database
CONNECT_S = 10
LOCK_S = 10  # how long a turn waits for the turns of other servers
STATEMENT_S = 60
# a server that hangs in the middle of its turn loses it after this long: the others wait for it
IDLE_S = 30
PATIENCE_S = 20.0  # how long a server that runs waits for a PostgreSQL that is being started again
# A machine that vanished without a word is noticed within half a minute (libpq's names, s and ms).
TCP = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
KEEP_BYTES = 1024**3
PRUNED_EVERY = 64  # turns from one clearing away of old turns and evidence to the next
# a turn stays in the log: servers ask several times a second, and one that was away begins afresh
KEPT_S = 120
MOST_READ = 4096  # turns read at once; whoever is further behind begins afresh
KINDS: dict[str, type[Change]] = {
    "run": RunRecord,
    "env": EnvRecord,
    "seen": EnvSeen,
    "arrived": GroupArrived,
    "moved": GroupRecord,
    "delivery": Delivery,
}
"""The word that tells what a change is, in the log."""
_FIELD = {"run": "run", "env": "env", "moved": "group", "delivery": "delivery"}
"""In the log these stand in a field, as earlier versions write them: servers of one queue may be
upgraded in turn.
"""

RUNNING = "Look whether PostgreSQL runs there; the request can be sent again."
AT_FIRST = (
    "Look whether PostgreSQL runs there, and at the user, the password and the database in the URL."
)
RIGHTS = "Give that user the right to create and to write tables there."
ADVICE = {
    "53100": "Make room on its disk; the request can be sent again.",  # disk_full
    "42501": RIGHTS,  # insufficient_privilege
    "3F000": RIGHTS,  # invalid_schema_name: none that the user may use
}
"""What to do instead, by SQLSTATE."""

LOCK_NOT_AVAILABLE = "55P03"

_log = logging.getLogger(__name__)

# -- tables and statements

metadata = sa.MetaData()

schema_version = sa.Table(
    "schema_version",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),  # always 1
    Column("version", sa.Integer, nullable=False),
)

bodies = sa.Table(
    "bodies",
    metadata,
    Column("group_id", BigInteger, primary_key=True, autoincrement=False),
    Column("element", sa.LargeBinary, nullable=False),
)

turns = sa.Table(
    "turns",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # without gaps
    Column("nonce", BigInteger, nullable=False),  # random: tells two turns of one number apart
    Column("at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    Column("changes", sa.LargeBinary, nullable=False),
)

Mark = tuple[int, int]  # number and nonce of a turn: the last one that a server has applied
_NEWEST = select(turns.c.number, turns.c.nonce).order_by(turns.c.number.desc()).limit(1)
_age = sa.func.extract("epoch", sa.func.now() - turns.c.at)
_PRUNE_TURNS = sa.delete(turns).where(
    turns.c.number < bindparam("newest"), _age > bindparam("kept_s")
)

# one parameter for all
_is_requested = bodies.c.group_id == sa.any_(bindparam("ids", type_=ARRAY(BigInteger)))
_LAST_DELIVERED = select(store.deliveries.c.group_ids).join(
    store.run, store.run.c.last_delivery == store.deliveries.c.id
)

_PRUNE_BODIES = text("""
DELETE FROM bodies WHERE group_id IN (
    SELECT id FROM (
        SELECT groups.id,
            sum(groups.num_bytes) OVER (ORDER BY groups.id DESC) AS num_bytes_from_here
        FROM bodies JOIN groups ON groups.id = bodies.group_id
        WHERE groups.place NOT IN ('queued', 'buffered', 'out')
          AND groups.delivery IS DISTINCT FROM (SELECT last_delivery FROM run)
    ) AS evidence
    WHERE num_bytes_from_here > :keep_bytes
)
""")

_POWER = (
    "SELECT set_config('synchronous_commit', 'on', false) WHERE "
    "current_setting('synchronous_commit') = 'off'"
)


class PostgresStore(Store):
    """One database, shared by any number of servers.

    Args:
        url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE.
        durability: process: PostgreSQL's own settings, by which a commit survives its crash too;
            power: the same, and a `synchronous_commit` that was turned off is turned on for these
            commits.
        keep_bytes: tokens kept of groups that were set aside or archived, the newest.

    Raises:
        InvalidConfig: that is no such sa.URL, or the client library is missing.
        Conflict: its tables are of another version.
        StoreFailed: it cannot be reached.
    """

    is_shared = True

    def __init__(
        self, url: str, durability: Durability = "process", keep_bytes: int = KEEP_BYTES
    ) -> None:
        address = _address(url)
        self.name = address.set(drivername="postgresql", query={}).render_as_string(
            hide_password=True
        )
        within = [str(value) for name, value in address.query.items() if "password" in name]
        self._redactor = Redactor([str(address.password or ""), *within])
        self._power, self._keep_bytes = durability == "power", keep_bytes
        self._turn: Connection | None = None
        # the last turn whose changes the server has; None: ask for all
        self._known: Mark | None = None
        self._engine = _engine(address)
        event.listen(self._engine, "connect", self._set_up)
        try:
            with self._reporting("The trajectory database cannot be opened.", AT_FIRST):
                self._prepare()
        except BaseException:
            self.close()
            raise

    def load(self) -> Remembered:
        """See `Store`. From here on `begin` and `catch_up` tell what came after it."""
        self.abandon()
        with self._reading(PATIENCE_S, isolation_level="REPEATABLE READ") as connection:
            return self._everything(connection)

    def begin(self) -> Update:
        """See `Store`."""
        self.abandon()
        with self._reporting("The trajectory queue gave no turn."):
            connection = self._engine.connect()
            try:
                _lock(connection)
                update = self._catch_up(connection)
            except BaseException:
                connection.close()
                raise
        self._turn = connection
        return update

    def commit(self, changes: Sequence[Change]) -> None:
        """See `Store`."""
        known, self._known = self._known, None  # whether a COMMIT that fails was kept, nobody knows
        connection, self._turn = self._turn, None
        if connection is None or known is None:
            raise StoreFailed("The changes were not stored.", "No turn was begun for them.")
        with self._reporting("The changes were not stored."), connection:
            # Before the changes: the tokens of every batch that is not the last delivered any more
            # are deleted.
            saved = (change for change in changes if isinstance(change, Delivery))
            if delivered := [
                batch.groups for batch in saved if batch.standing is Standing.DELIVERED
            ]:
                before = connection.scalar(_LAST_DELIVERED) or ()
                released = {
                    group_id for ids in (before, *delivered[:-1]) for group_id in ids
                } - set(delivered[-1])
                connection.execute(sa.delete(bodies).where(_is_requested), {"ids": list(released)})
            store.write(connection, changes)
            arrived = [change for change in changes if isinstance(change, GroupArrived)]
            if arrived:
                values = [
                    {"group_id": change.group.id, "element": change.body} for change in arrived
                ]
                connection.execute(sa.insert(bodies), values)
            made = _append_turn(connection, known[0] + 1, changes)
            if made[0] % PRUNED_EVERY == 0:
                connection.execute(_PRUNE_TURNS, {"kept_s": KEPT_S, "newest": made[0]})
                connection.execute(_PRUNE_BODIES, {"keep_bytes": self._keep_bytes})
            connection.commit()
        self._known = made

    def abandon(self) -> None:
        """See `Store`."""
        connection, self._turn = self._turn, None
        if connection is None:
            return
        try:
            with connection:
                connection.rollback()
        except SQLAlchemyError as error:  # a lost connection has ended its turn already
            _log.warning("%s: a turn ended with its connection: %s", self.name, error)

    def catch_up(self) -> Update:
        """See `Store`."""
        with self._reading(isolation_level="REPEATABLE READ") as connection:
            return self._catch_up(connection)

    def bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        """See `Store`."""
        with self._reading() as connection:
            found = connection.execute(
                select(bodies).where(_is_requested), {"ids": list(group_ids)}
            )
            elements = {row.group_id: row.element for row in found}
        return {group_id: elements[group_id] for group_id in group_ids if group_id in elements}

    def close(self) -> None:
        """See `Store`."""
        self.abandon()
        self._engine.dispose()

    # -- turns

    def _catch_up(self, connection: Connection) -> Update:
        """What happened after the last turn known here; everything where the log does not tell."""
        if self._known is None:
            return Update(afresh=self._everything(connection))
        query = (
            select(turns.c.number, turns.c.nonce, turns.c.changes)
            .order_by(turns.c.number)
            .limit(MOST_READ + 1)
        )
        found = connection.execute(query.where(turns.c.number >= self._known[0])).all()
        if not found or tuple(found[0][:2]) != self._known or len(found) > MOST_READ:
            return Update(afresh=self._everything(connection))
        self._known = found[-1].number, found[-1].nonce
        return Update(changes=[change for row in found[1:] for change in decoded(row.changes)])

    def _everything(self, connection: Connection) -> Remembered:
        remembered = store.everything(connection)
        number, nonce = connection.execute(_NEWEST).one()
        self._known = number, nonce
        return remembered

    # -- connections

    @contextmanager
    def _reading(
        self, patience_s: float = 0.0, isolation_level: str = "AUTOCOMMIT"
    ) -> Iterator[Connection]:
        """A connection that is alive; where there is none, it is asked for again for
        `patience_s`.
        """
        ends = time.monotonic() + patience_s
        with self._reporting("The trajectory database cannot be read."):
            while True:
                try:
                    connection = self._engine.connect()
                    break
                except OperationalError:
                    if time.monotonic() >= ends:
                        raise
                time.sleep(0.25)
            with connection:
                yield connection.execution_options(isolation_level=isolation_level)

    @contextmanager
    def _reporting(self, what: str, advice: str = RUNNING) -> Iterator[None]:
        """Whatever fails inside leaves as StoreFailed, in one sentence of what, why and next."""
        with boundary(StoreFailed, f"The trajectory database {self.name}"):
            try:
                yield
            except SQLAlchemyError as error:
                cause: Any = error.orig if isinstance(error, DBAPIError) else error
                # of what PostgreSQL itself says, without the statement
                diagnosis = getattr(cause, "diag", None)
                words = " ".join(str((diagnosis and diagnosis.message_primary) or cause).split())
                why = self._redactor.text(words if words.endswith((".", "?")) else f"{words}.")
                raise StoreFailed(
                    what, f"{self.name}: {why}", ADVICE.get(_sqlstate(error), advice)
                ) from error

    def _set_up(self, connection: Any, _: Any) -> None:
        limits = {"lock": LOCK_S, "statement": STATEMENT_S, "idle_in_transaction_session": IDLE_S}
        for setting, limit_s in limits.items():
            connection.execute(
                "SELECT set_config(%s, %s, false)", (f"{setting}_timeout", f"{limit_s * 1000:.0f}")
            )
        if self._power:
            connection.execute(_POWER)
        connection.commit()

    def _prepare(self) -> None:
        """Make what is missing in an empty database.

        Raises:
            Conflict: it has tables of another version, or of somebody else; or it does not keep
                what it should.
        """
        with self._engine.connect() as connection:
            _lock(connection)
            present = set(sa.inspect(connection).get_table_names())
            tables = (*store.RECORDS, bodies, turns)
            if schema_version.name in present:
                found = connection.scalar(select(schema_version.c.version))
                if found != SCHEMA_VERSION:
                    raise Conflict(
                        f"The trajectory database {self.name} has version {found}.",
                        f"This server reads version {SCHEMA_VERSION}.",
                        "Name another database with --database, or use the Halteres version that "
                        "wrote it.",
                    )
            elif foreign := sorted(present & {table.name for table in tables}):
                raise Conflict(
                    f"The database {self.name} is no trajectory database.",
                    "It has tables of the same names that are somebody else's: "
                    f"{', '.join(foreign)}.",
                    "Create a database for this queue alone, and name it with --database.",
                )
            else:
                for table in (schema_version, *tables):
                    table.create(connection)
                # Tokens come as JSON, some as text that was gzipped: pressing them again costs more
                # than it saves.
                connection.execute(
                    text("ALTER TABLE bodies ALTER COLUMN element SET STORAGE EXTERNAL")
                )
                connection.execute(sa.insert(schema_version), {"id": 1, "version": SCHEMA_VERSION})
                _append_turn(connection, 0, ())  # changed nothing: a log is never empty
            if self._power and connection.scalar(text("SHOW fsync")) == "off":
                raise Conflict(
                    f"The PostgreSQL of {self.name} does not keep what it commits when the power "
                    "fails.",
                    "Its setting fsync is off.",
                    "Turn it on there, or start without --durability power.",
                )
            connection.commit()


def _lock(connection: Connection) -> None:
    """Take the turn, until the transaction ends."""
    try:
        connection.execute(select(sa.func.pg_advisory_xact_lock(QUEUE)))
    except DBAPIError as error:
        if _sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        raise StoreFailed(
            f"The trajectory queue gave no turn within {LOCK_S} s.",
            "Another server on it hangs, or its database is slow.",
            "Look at the other servers (pg_stat_activity names them); the request can be sent "
            "again.",
        ) from error


# -- the log of turns

_WORDS = {kind: word for word, kind in KINDS.items()}
_entry = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])


def encoded(changes: Iterable[Change]) -> bytes:
    """Changes as one entry of the log, without tokens."""

    def entry(change: Change) -> tuple[str, Any]:
        word = _WORDS[type(change)]
        bare = replace(change, body=b"") if isinstance(change, GroupArrived) else change
        return word, {_FIELD[word]: bare} if word in _FIELD else bare

    return msgspec.msgpack.encode([entry(change) for change in changes])


def decoded(entry: bytes) -> list[Change]:
    """The changes of an entry.

    Raises:
        msgspec.DecodeError, KeyError: another version of Halteres wrote it.
    """

    def change(word: str, raw: msgspec.Raw) -> Change:
        if word not in _FIELD:
            return msgspec.msgpack.decode(raw, type=KINDS[word])
        return msgspec.msgpack.decode(raw, type=dict[str, KINDS[word]])[_FIELD[word]]  # type: ignore[valid-type]

    return [change(word, raw) for word, raw in _entry.decode(entry)]


def _append_turn(connection: Connection, number: int, changes: Iterable[Change]) -> Mark:
    nonce = secrets.randbits(63)
    connection.execute(
        sa.insert(turns), {"number": number, "nonce": nonce, "changes": encoded(changes)}
    )
    return number, nonce


# -- the way there


def _engine(address: sa.URL) -> sa.Engine:
    try:
        from psycopg.pq import Format
    except ImportError as error:
        next = "pip install 'halteres[postgres]'"
        raise InvalidConfig("A queue on PostgreSQL needs psycopg.", f"{error}.", next) from error
    # PostgreSQL cuts it there
    own_name = f"halteres trajectories, pid {os.getpid()} on {socket.gethostname()}"[:63]
    options = {"connect_timeout": CONNECT_S, "application_name": own_name, **TCP}
    engine = sa.create_engine(
        address,
        connect_args={name: value for name, value in options.items() if name not in address.query},
        pool_size=2,  # the turns', and a reader's
        max_overflow=6,
        pool_timeout=CONNECT_S,
        pool_pre_ping=True,
        use_native_hstore=False,  # spares a question per connection
    )

    def read_in_binary(_: Any, cursor: Any, *__: Any) -> None:
        # as text, tokens would come in hexadecimal: three times the work
        cursor.format = Format.BINARY

    event.listen(engine, "before_cursor_execute", read_in_binary)
    return engine


def _address(url: str) -> sa.URL:
    why = "It cannot be read as a URL."  # never the text itself: it may hold a password
    with suppress(ArgumentError, ValueError):
        address = sa.make_url(url)
        if address.drivername in SCHEMES:
            return address.set(drivername="postgresql+psycopg")
        why = f"It begins with {address.drivername}://."
    next = (
        "Write it as postgresql://USER:PASSWORD@HOST:5432/DATABASE, special characters "
        "percent-encoded."
    )
    raise InvalidConfig("That is no address of a PostgreSQL database.", why, next)


def _sqlstate(error: SQLAlchemyError) -> str:
    """PostgreSQL's five-letter code of an error, or nothing."""
    cause: Any = error.orig if isinstance(error, DBAPIError) else None
    return str(getattr(cause, "sqlstate", None) or "")
