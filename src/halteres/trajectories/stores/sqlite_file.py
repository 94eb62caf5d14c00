"""One SQLite file, held by one server at a time: how it is opened, begun, committed, and what is said when it fails."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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

RESERVE_BYTES = 8 * 1024**2
"""Half of what SQLite's log holds before it is put into the file, most of which is pages that the file has already."""

PART_BYTES = 512 * 1024
"""Given back at once: another program may be as quick to take it."""

_log = logging.getLogger(__name__)


class Reserve:
    """Room on the disk, given back by parts once the disk is full so that what waits can still be taken out.

    It is made before the first group is stored. Groups may not have the room that it left: once the disk was full they
    are refused until there is as much again beside it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes = path.stat().st_size if path.exists() else 0
        self.ran_out = False  # something could not be written

    @property
    def is_full(self) -> bool:
        """The disk has no room for groups."""
        if self._num_bytes == RESERVE_BYTES and not self.ran_out:
            return False
        return shutil.disk_usage(self._path.parent).free < 2 * RESERVE_BYTES - self._num_bytes

    def make(self) -> None:
        """Have one before a group is stored.

        Raises:
            OSError: the disk has no room.
        """
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.ran_out = False
        if self._num_bytes == RESERVE_BYTES:
            return
        try:
            with self._path.open("ab") as file:
                if sys.platform == "darwin":  # which has no such call
                    file.write(bytes(RESERVE_BYTES - self._num_bytes))
                else:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError as error:  # a file system that cannot, or a quota: the queue takes groups all the same
            self._path.unlink(missing_ok=True)
            _log.warning("No room is reserved in %s for a full disk: %s", self._path.parent, error.strerror)
        self._num_bytes = RESERVE_BYTES

    def shrink(self) -> None:
        """The server ends: keep what it takes to start again, and to begin with taking things out."""
        with suppress(OSError):
            while self._num_bytes > 2 * PART_BYTES and not self.is_full:
                self.give_back()

    def give_back(self) -> None:
        """Let what is not a group have a part of it."""
        self._num_bytes = max(0, self._num_bytes - PART_BYTES)
        with suppress(OSError):
            os.truncate(self._path, self._num_bytes)


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
        self.reserve = Reserve(file.with_name(f"{file.name}.reserve"))
        self._engine = create_engine(URL.create("sqlite", database=str(file)))  # a path may hold anything
        self._closing.callback(self._engine.dispose)
        event.listen(self._engine, "connect", self._set_up)
        try:
            try:
                self._open(wanted)
            except (DBAPIError, sqlite3.Error) as error:
                if not is_full(error):
                    raise
                self.reserve.ran_out = True
                self.reserve.give_back()
                self._open(wanted)
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

    def make_room(self) -> None:
        """On a full disk: give back some of the reserve, and let the log begin anew in the room that it has."""
        self.reserve.give_back()
        self.checkpoint()

    def checkpoint(self) -> None:
        """Put the log into the file, as far as that can grow: the next turn begins the log anew."""
        with suppress(sqlite3.Error):
            self.driver.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

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
    def reporting_failures(self) -> Iterator[None]:
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
        self.reserve.shrink()
        self._closing.close()

    def _open(self, wanted: Sequence[Table]) -> None:
        self.connection = self._closing.enter_context(self._engine.connect())
        self.connection = self.connection.execution_options(isolation_level="AUTOCOMMIT")
        self.driver: sqlite3.Connection = self.connection.connection.driver_connection  # type: ignore[assignment]
        with self.transaction():
            self._make(wanted)

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


def is_full(error: BaseException) -> bool:
    """Whether room may help. SQLite calls a file beside the database that cannot grow, and a quota, an I/O error."""
    cause = cause_of(error)
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def unusable(file: Path, why: object) -> StoreFailed:
    """The database cannot be opened."""
    return StoreFailed(
        f"The trajectory database {file} cannot be opened.",
        f"{why}.",
        "Make room on a full disk, or name a file in a folder that can be written: --database FILE.",
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
