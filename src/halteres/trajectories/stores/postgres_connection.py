"""The way to a PostgreSQL: its address, how every connection is set up, what is said when it fails."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, OperationalError, SQLAlchemyError

from halteres.errors import InvalidConfig, boundary
from halteres.redaction import Redactor
from halteres.trajectories.stores.store import Durability, StoreFailed

SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")

CONNECT_S = 10
LOCK_S = 10
"""How long a turn waits for the turns of other servers."""

STATEMENT_S = 60
IDLE_S = 30
"""A server that hangs in the middle of its turn loses it after this long: the others wait for it."""

TCP = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
"""A machine that vanished without a word is noticed within half a minute (libpq's names, s and ms)."""

POWER = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"

AGAIN = "Look whether PostgreSQL runs there; the request can be sent again."
AT_FIRST = "Look whether PostgreSQL runs there, and at the user, the password and the database in the URL."
RIGHTS = "Give that user the right to create and to write tables there."
ADVICE = {
    "53100": "Make room on its disk; the request can be sent again.",  # disk_full
    "42501": RIGHTS,  # insufficient_privilege
    "3F000": RIGHTS,  # invalid_schema_name: none that the user may use
}
"""What to do instead, by SQLSTATE."""

ASK_EVERY_S = 0.25

LOCK_NOT_AVAILABLE = "55P03"


class Connections:
    """Connections to one database, made when they are needed.

    Raises:
        InvalidConfig: the URL is none, or the client library is not installed.
    """

    def __init__(self, url: str, durability: Durability) -> None:
        address = _parsed(url)
        self.name = address.set(drivername="postgresql", query={}).render_as_string(hide_password=True)
        self._redactor = Redactor([str(address.password or ""), *_secrets_within(address)])
        self._durability: Durability = durability
        self._engine = _engine(address)
        event.listen(self._engine, "connect", self._set_up)
        event.listen(self._engine, "checkout", _check_alive)

    @contextmanager
    def reporting_failures(self, what: str, advice: str = AGAIN) -> Iterator[None]:
        """Whatever fails inside leaves as StoreFailed, in one sentence of what, why and next."""
        with boundary(StoreFailed, f"The trajectory database {self.name}"):
            try:
                yield
            except SQLAlchemyError as error:
                failure = StoreFailed(what, f"{self.name}: {self._why(error)}", ADVICE.get(sqlstate(error), advice))
                raise failure from error

    def connect(self, patience_s: float = 0.0) -> Connection:
        """A connection that is alive; one that broke is replaced, for `patience_s` again and again.

        Raises:
            sqlalchemy.exc.OperationalError: there is none.
        """
        ends = time.monotonic() + patience_s
        while True:
            try:
                return self._engine.connect()
            except OperationalError:
                if time.monotonic() >= ends:
                    raise
            time.sleep(ASK_EVERY_S)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def _set_up(self, connection: Any, _: Any) -> None:
        for setting, limit_s in (
            ("lock_timeout", LOCK_S),
            ("statement_timeout", STATEMENT_S),
            ("idle_in_transaction_session_timeout", IDLE_S),
        ):
            connection.execute("SELECT set_config(%s, %s, false)", (setting, f"{limit_s * 1000:.0f}"))
        if self._durability == "power":
            connection.execute(POWER)
        connection.commit()

    def _why(self, error: SQLAlchemyError) -> str:
        cause: Any = error.orig if isinstance(error, DBAPIError) else error
        diagnosis = getattr(cause, "diag", None)  # of what PostgreSQL itself says, without the statement
        message = self._redactor.text(" ".join(str((diagnosis and diagnosis.message_primary) or cause).split()))
        return message if message.endswith((".", "?")) else f"{message}."


def sqlstate(error: SQLAlchemyError) -> str:
    """PostgreSQL's five-letter code of an error, or nothing."""
    cause: Any = error.orig if isinstance(error, DBAPIError) else None
    return str(getattr(cause, "sqlstate", None) or "")


def holder(connection: Connection, key: int) -> str:
    """Who holds an advisory lock, in words."""
    row = connection.execute(_HOLDER, {"key": key}).one_or_none()
    if row is None:
        return "Nobody holds it any more"
    return f"'{row.application_name}' (backend {row.pid}) holds it, for {row.held_s:.0f} s"


_HOLDER = text("""
SELECT activity.pid, activity.application_name, extract(epoch FROM clock_timestamp() - activity.xact_start) AS held_s
FROM pg_locks AS locks JOIN pg_stat_activity AS activity USING (pid)
WHERE locks.locktype = 'advisory' AND locks.granted AND locks.objsubid = 1
  AND locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (locks.classid::bigint << 32) + locks.objid::bigint = :key
LIMIT 1
""")


def _engine(address: URL) -> Engine:
    try:
        from psycopg.pq import Format
    except ImportError as error:
        raise InvalidConfig(
            "A queue on PostgreSQL needs psycopg.", f"{error}.", "pip install 'halteres[postgres]'"
        ) from error
    options = {"connect_timeout": CONNECT_S, "application_name": _own_name(), **TCP}
    engine = create_engine(
        address,
        connect_args={name: value for name, value in options.items() if name not in address.query},
        pool_size=2,  # the turns', and a reader's
        max_overflow=6,
        pool_timeout=CONNECT_S,
        use_native_hstore=False,  # spares a question per connection
    )

    def read_in_binary(_: Any, cursor: Any, *__: Any) -> None:
        cursor.format = Format.BINARY  # as text, tokens would come in hexadecimal: three times the work

    event.listen(engine, "before_cursor_execute", read_in_binary)
    return engine


def _check_alive(connection: Any, *_: Any) -> None:
    """Refuse a connection that was closed meanwhile: the pool then makes another.

    A question to the server before every turn would cost a tenth of the turn. An idle socket that has something to say
    is nearly always one that was closed; only such a one is asked.
    """
    import psycopg

    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    if not waiting.poll(0):
        return
    try:
        connection.execute("SELECT 1")
        connection.rollback()
    except psycopg.Error as error:
        raise DisconnectionError(str(error)) from error


def _own_name() -> str:
    return f"halteres trajectories, pid {os.getpid()} on {socket.gethostname()}"[:63]  # PostgreSQL cuts it there


def _parsed(url: str) -> URL:
    try:
        address = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise _no_address("It cannot be read as a URL.") from error
    if address.drivername not in SCHEMES:
        raise _no_address(f"It begins with {address.drivername}://.")
    return address.set(drivername="postgresql+psycopg")


def _no_address(why: str) -> InvalidConfig:
    return InvalidConfig(
        "That is no address of a PostgreSQL database.",
        why,  # never the text itself: it may hold a password
        "Write it as postgresql://USER:PASSWORD@HOST:5432/DATABASE, special characters percent-encoded.",
    )


def _secrets_within(address: URL) -> list[str]:
    return [str(value) for name, value in address.query.items() if "password" in name]
