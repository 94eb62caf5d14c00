"""One SQLite file, held by one server at a time: how it is opened, begun, committed, and what is said when it fails.

Owns: the lock beside the file, its pragmas and version, its connections; turning failures into sentences.
Never: knows a record.
"""

from __future__ import annotations

import fcntl
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sqlalchemy import URL, Connection, Table, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from halteres.errors import Conflict, boundary
from halteres.trajectories.stores import tables
from halteres.trajectories.stores.store import Durability, StoreFailed

PRAGMAS = (
    "page_size = 2048",  # a commit writes whole pages, and changes little in each
    "journal_mode = WAL",
    "wal_autocheckpoint = 8000",  # pages
    "busy_timeout = 5000",  # ms
    "fullfsync = ON",  # of macOS, whose fsync leaves data in the disk's own memory
)
SYNCHRONOUS = {"process": "NORMAL", "power": "FULL"}

_log = logging.getLogger(__name__)


class SqliteFile:
    """A database with these tables, made where it is missing.

    Raises:
        Conflict: another server holds it, or it is of another version.
        StoreFailed: it cannot be opened.
    """

    def __init__(self, file: Path, durability: Durability, wanted: Sequence[Table]) -> None:
        self.file = file
        self._synchronous = SYNCHRONOUS[durability]
        self._closing = ExitStack()
        lock = file.with_name(f"{file.name}.lock")
        is_new = not lock.exists()
        self._closing.enter_context(_lock(file, lock))
        self._engine = create_engine(URL.create("sqlite", database=str(file)))  # a path may hold anything
        self._closing.callback(self._engine.dispose)
        event.listen(self._engine, "connect", self._set_up)
        try:
            self.connection = self._closing.enter_context(self._engine.connect())
            self.connection = self.connection.execution_options(isolation_level="AUTOCOMMIT")
            self.driver: sqlite3.Connection = self.connection.connection.driver_connection  # type: ignore[assignment]
            with self.transaction():
                self._make(wanted)
        except BaseException as error:
            if is_new:  # what cannot be opened is left as it was; nobody else holds this lock
                lock.unlink(missing_ok=True)
            self.close()
            if isinstance(error, DBAPIError | sqlite3.Error):
                raise unusable(file, cause_of(error)) from error
            raise

    def transaction(self) -> _Transaction:
        """All or nothing, on the one connection that writes; only one thread may."""
        return _Transaction(self.connection, self.driver)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for whatever thread asks.

        Raises:
            StoreFailed: the database cannot be read.
        """
        what = f"The trajectory database {self.file} cannot be read."
        with boundary(StoreFailed, f"The trajectory database {self.file}"):
            try:
                with self._engine.connect() as connection:
                    yield connection
            except (DBAPIError, OSError) as error:
                why, next = f"{cause_of(error)}.", "Look at the disk; what was acknowledged may be in a copy."
                raise StoreFailed(what, why, next) from error

    @contextmanager
    def told(self) -> Iterator[None]:
        """What fails to be written inside leaves as StoreFailed."""
        try:
            yield
        except (DBAPIError, sqlite3.Error, OSError) as error:
            why = cause_of(error)
            _log.error("%s took nothing: %s", self.file, why)
            raise StoreFailed(
                "It was not stored.",
                f"The database {self.file} answers: {why}.",
                "" if "constraint" in str(why) else "Make room on the disk; the request can be sent again.",
            ) from error

    def num_bytes(self) -> int:
        """Bytes of the file and of the log beside it."""
        beside = (self.file, self.file.with_name(f"{self.file.name}-wal"))
        return sum(path.stat().st_size for path in beside if path.exists())

    def close(self) -> None:
        """Let go of the file."""
        self._closing.close()

    def _set_up(self, connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for pragma in (*PRAGMAS, f"synchronous = {self._synchronous}"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def _make(self, wanted: Sequence[Table]) -> None:
        found = self.connection.scalar(text("PRAGMA user_version"))
        if found not in (0, tables.SCHEMA_VERSION):
            raise Conflict(
                f"The trajectory database {self.file} has version {found}.",
                f"This server reads version {tables.SCHEMA_VERSION}.",
                "Name another file with --database, or use the Halteres version that wrote it.",
            )
        if found == 0 and self.connection.scalar(text("SELECT count(*) FROM sqlite_master")):
            raise Conflict(
                f"{self.file} is another program's database.",
                "It holds tables, and none of a trajectory server's.",
                "Name another file with --database.",
            )
        tables.metadata.create_all(self.connection, wanted)
        self.connection.execute(text(f"PRAGMA user_version = {tables.SCHEMA_VERSION}"))


@dataclass(slots=True)
class _Transaction:
    """A context; as a generator it would cost every group a microsecond more."""

    _connection: Connection
    _driver: sqlite3.Connection

    def __enter__(self) -> Connection:
        self._driver.execute("BEGIN IMMEDIATE")
        return self._connection

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._driver.commit()
        finally:
            if self._driver.in_transaction:
                self._driver.rollback()


def cause_of(error: BaseException) -> object:
    """What the database or the system said; SQLAlchemy's own text has five lines."""
    if isinstance(error, DBAPIError):
        return error.orig
    return error.strerror if isinstance(error, OSError) else error


def unusable(file: Path, why: object) -> StoreFailed:
    """The database cannot be opened."""
    return StoreFailed(
        f"The trajectory database {file} cannot be opened.",
        f"{why}.",
        "Name a file in a folder that can be written: --database FILE.",
    )


def _lock(file: Path, lock: Path) -> IO[bytes]:
    """Hold the file until closed: two servers would each think that they know what is in it."""
    try:
        if file.exists() and file.stat().st_nlink > 1:  # a lock, and the folder of tokens, go by the name
            raise Conflict(
                f"The trajectory database {file} has another name, too.",
                "It is a hard link; a server under the other name would not know of this one.",
                "Remove one of the names.",
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        held = lock.open("ab")
    except OSError as error:
        raise unusable(file, error.strerror) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.close()
        raise Conflict(
            f"The trajectory database {file} is in use.",
            "Another trajectory server holds it.",
            "Stop that one, or name another file with --database.",
        ) from error
    return held
