"""The trajectory store of one server: rows in an SQLite file, tokens in segment files beside it.

Tokens are written first, so that a committed row vouches for its extent. What was committed
survives kill -9 of the process; with durability "power" also the loss of power.

Wanted are the tokens of groups that wait or are out, and of the batch delivered last, because its
reply may have been lost. Others are evidence, kept while there is room.
"""

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
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy import Connection, event, select, text
from sqlalchemy.exc import DBAPIError

from halteres.errors import Conflict, boundary
from halteres.trajectories.records import Change, GroupArrived
from halteres.trajectories.stores import store
from halteres.trajectories.stores.segments import SEGMENT_BYTES, Extent, Segments
from halteres.trajectories.stores.store import (
    SCHEMA_VERSION,
    Durability,
    Store,
    StoreFailed,
    chunks,
    groups,
)

PRAGMAS = (
    "page_size = 2048",  # a commit writes whole pages, and changes little in each
    "journal_mode = WAL",
    "wal_autocheckpoint = 8000",  # pages
    "busy_timeout = 5000",  # ms
    "fullfsync = ON",  # of macOS, whose fsync leaves data in the disk's own memory
)

KEEP_BYTES = 1024**3
# half of SQLite's log before it is put into the file, which has most of its pages
RESERVE_BYTES = 8 * 1024**2
PART_BYTES = 512 * 1024  # of it, given back at once: another program may be as quick to take it
# one, one for each part of the reserve, one with a log begun anew
NUM_TRIES = RESERVE_BYTES // PART_BYTES + 2

segments = sa.Table(  # the files that hold something; what a group says of another is out of date
    "segments",
    sa.MetaData(),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    # the groups of the next begin in the next file
    sa.Column("first_group", sa.BigInteger, nullable=False),
)

_EXTENTS = select(
    groups.c.id, groups.c.segment, groups.c.start, groups.c.length, groups.c.checksum
).join(segments, (segments.c.number == groups.c.segment) & (groups.c.id >= segments.c.first_group))
"""Of a file that is there: a number may be used again after a start, and what groups before it say
of it is of old.
"""

_LAST_END = select(groups.c.start + groups.c.length).order_by(groups.c.id.desc()).limit(1)

_UNWANTED = text("""
SELECT number FROM segments
WHERE number <> :newest AND NOT EXISTS (
    SELECT 1 FROM groups
    WHERE groups.id >= segments.first_group
      AND groups.id < coalesce(
          (SELECT min(first_group) FROM segments AS s WHERE s.number > segments.number), 1 << 62)
      AND groups.segment = segments.number
      AND (+groups.place IN ('queued', 'buffered', 'out')
           OR groups.delivery = (SELECT last_delivery FROM run))
)
ORDER BY number
""")
"""Files that nobody wants, the oldest first. By the range of their groups' ids: the + keeps the
index of places out.
"""

_log = logging.getLogger(__name__)


class SqliteStore(Store):
    """One database file and its folder of tokens, held by one server at a time.

    Args:
        file: the database; its tokens are in `FILE.tokens/`.
        durability: "process" survives kill -9, "power" also the loss of power, for two fsyncs per
            turn.
        keep_bytes: what all tokens may take before those that nobody wants are removed, the oldest
            first; on a full disk none are kept.
        segment_bytes: size of a file of tokens.

    Raises:
        Conflict: another server holds it, or it is of another version.
        StoreFailed: it cannot be opened.
    """

    is_quick = True

    def __init__(
        self,
        file: Path,
        durability: Durability = "process",
        keep_bytes: int = KEEP_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        # tokens lie beside the file itself, whatever names lead to it
        self.file = file = file.resolve()
        self._power, self._keep_bytes = durability == "power", keep_bytes
        lock = self._beside("lock")
        is_new = not lock.exists()
        self._closing = ExitStack()
        self._closing.enter_context(_lock(file, lock))
        self._reserve = Reserve(self._beside("reserve"))
        # a path may hold anything
        self._engine = sa.create_engine(sa.URL.create("sqlite", database=str(file)))
        self._closing.callback(self._engine.dispose)
        event.listen(self._engine, "connect", self._set_up)
        try:
            self._segments = self._open(segment_bytes)
        except BaseException as error:
            if is_new:  # what cannot be opened is left as it was; nobody else holds this lock
                lock.unlink(missing_ok=True)
            self.close()
            if isinstance(error, DBAPIError | sqlite3.Error | OSError):
                raise _unusable(file, _cause(error)) from error
            raise

    @property
    def is_full(self) -> bool:
        """See `Store`."""
        return self._reserve.is_full

    def commit(self, changes: Sequence[Change]) -> None:
        """See `Store`. On a full disk no group comes in; whatever else is asked for is written into
        the reserve.
        """
        if not changes:
            return
        newest = self._segments.newest
        num_tries = 1 if any(isinstance(change, GroupArrived) for change in changes) else NUM_TRIES
        try:
            while not self._write(changes, is_last_try=num_tries == 1):
                num_tries -= 1
                self._reserve.give_back()
                self._checkpoint()
            # what is reserved is for the file: its log is kept to one turn
            if self._reserve.ran_out:
                self._checkpoint()
        except (DBAPIError, sqlite3.Error, OSError) as error:
            why = _cause(error)
            _log.error("%s took nothing: %s", self.file, why)
            raise StoreFailed(
                "It was not stored.",
                f"The database {self.file} answers: {why}.",
                ""
                if "constraint" in str(why)
                else "Make room on the disk; the request can be sent again.",
            ) from error
        if self._segments.newest > newest or not all(
            isinstance(change, GroupArrived) for change in changes
        ):
            self._remove_unwanted()

    def bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        """See `Store`."""
        extents = dict[int, Extent]()
        with self._reading() as connection:
            for ids in chunks(group_ids):
                for group_id, *extent in connection.execute(_EXTENTS.where(groups.c.id.in_(ids))):
                    extents[group_id] = Extent(*extent)
            texts = dict(zip(extents, self._segments.read(list(extents.values())), strict=True))
        if lost := sorted(group_id for group_id, body in texts.items() if body is None):
            _log.error(
                "Tokens of %d groups of %s are damaged; the first is group %d.",
                len(lost),
                self.file,
                lost[0],
            )
        return {
            group_id: body for group_id in group_ids if (body := texts.get(group_id)) is not None
        }

    def close(self) -> None:
        """See `Store`."""
        self._reserve.shrink()
        self._closing.close()

    # -- writing

    def _write(self, changes: Sequence[Change], *, is_last_try: bool) -> bool:
        """False: the disk is full; it may do where some of the reserve is given back."""
        arrived = [change for change in changes if isinstance(change, GroupArrived)]
        extents = list[Extent]()
        try:
            if arrived:
                self._reserve.make()
                extents = self._segments.append([change.body for change in arrived])
            newest = self._segments.newest if arrived else self._vouched
            if self._power:
                self._segments.sync()
            with self._transaction():
                if newest != self._vouched:
                    self._writer.execute(
                        sa.insert(segments), {"number": newest, "first_group": arrived[0].group.id}
                    )
                store.write(self._writer, changes, extents)
        except BaseException as error:
            self._segments.take_back(extents)
            is_full = _is_full(error)
            self._reserve.ran_out |= is_full
            if not is_full or is_last_try:
                raise
            return False
        self._vouched = newest
        return True

    def _remove_unwanted(self) -> None:
        """Bring the folder of tokens within its bound, as far as what is needed allows. A failure
        is only logged.
        """
        keep_bytes = 0 if self._reserve.is_full else self._keep_bytes
        if self._segments.num_bytes <= keep_bytes:
            return
        try:
            for number in self._writer.scalars(_UNWANTED, {"newest": self._segments.newest}).all():
                if self._segments.num_bytes <= keep_bytes:
                    return
                # First what vouches for the file: one that is left over by a crash in between goes
                # at the next start.
                self._writer.execute(segments.delete().where(segments.c.number == number))
                self._segments.unlink(number)
        except (DBAPIError, sqlite3.Error, OSError) as error:
            _log.error(
                "Tokens that nobody wants stay in %s: %s", self._segments.folder, _cause(error)
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, on the one connection that writes."""
        self._driver.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._driver.commit()
        finally:
            if self._driver.in_transaction:
                self._driver.rollback()

    def _checkpoint(self) -> None:
        """Put the log into the file, as far as that can grow: the next turn begins the log anew."""
        with suppress(sqlite3.Error):
            self._driver.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with boundary(StoreFailed, f"The trajectory database {self.file}"):
            try:
                with self._engine.connect() as connection:
                    yield connection
            except (DBAPIError, OSError) as error:
                what = f"The trajectory database {self.file} cannot be read."
                next = "Look at the disk; what was acknowledged may be in a copy."
                raise StoreFailed(what, f"{_cause(error)}.", next) from error

    def _beside(self, what: str) -> Path:
        return self.file.with_name(f"{self.file.name}.{what}")

    def _set_up(self, connection: Any, _: Any) -> None:
        for pragma in (*PRAGMAS, f"synchronous = {'FULL' if self._power else 'NORMAL'}"):
            connection.execute(f"PRAGMA {pragma}")

    def _open(self, segment_bytes: int) -> Segments:
        try:
            self._connect()
        except (DBAPIError, sqlite3.Error) as error:
            if not _is_full(error):
                raise
            self._reserve.ran_out = True
            self._reserve.give_back()
            self._connect()
        with self._reading() as connection:
            vouched = set(connection.scalars(select(segments.c.number)))
            self._vouched = max(vouched, default=0)  # the newest file that has a row
            end = connection.scalar(_LAST_END.where(groups.c.segment == self._vouched)) or 0
        opened = Segments(self._beside("tokens"), vouched, end, segment_bytes)
        self._closing.callback(opened.close)
        if gone := vouched - opened.sizes.keys():
            _log.warning(
                "%d of %d files of tokens are missing in %s: groups in them are set aside when a "
                "batch wants them."
                " Put the folder back beside the database; a copy needs both.",
                *(len(gone), len(vouched), opened.folder),
            )
        return opened

    def _connect(self) -> None:
        """The connection that writes; makes the tables where they are missing."""
        connection = self._closing.enter_context(self._engine.connect())
        self._writer = connection.execution_options(isolation_level="AUTOCOMMIT")
        self._driver: sqlite3.Connection = self._writer.connection.driver_connection  # type: ignore[assignment]
        with self._transaction():
            found = self._writer.scalar(text("PRAGMA user_version"))
            next = "Name another file with --database"
            if found not in (0, SCHEMA_VERSION):
                what = f"The trajectory database {self.file} has version {found}."
                why = f"This server reads version {SCHEMA_VERSION}."
                raise Conflict(what, why, f"{next}, or use the Halteres version that wrote it.")
            if found == 0 and self._writer.scalar(text("SELECT count(*) FROM sqlite_master")):
                why = "It holds tables, and none of a trajectory server's."
                raise Conflict(f"{self.file} is another program's database.", why, f"{next}.")
            store.metadata.create_all(self._writer)
            segments.create(self._writer, checkfirst=True)
            self._writer.execute(text(f"PRAGMA user_version = {SCHEMA_VERSION}"))


class Reserve:
    """Room on the disk, given back by parts once the disk is full so that what waits can still be
    taken out.

    It is made before the first group is stored. Groups may not have the room that it left: once the
    disk was full they are refused until there is as much again beside it.
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
        """Have one before a group is stored. OSError: the disk has no room."""
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
        except OSError as error:
            # a file system that cannot, or a quota: the queue takes groups all the same
            self._path.unlink(missing_ok=True)
            _log.warning(
                "No room is reserved in %s for a full disk: %s", self._path.parent, error.strerror
            )
        self._num_bytes = RESERVE_BYTES

    def shrink(self) -> None:
        """The server ends: keep what it takes to start again, and to begin with taking things
        out.
        """
        with suppress(OSError):
            while self._num_bytes > 2 * PART_BYTES and not self.is_full:
                self.give_back()

    def give_back(self) -> None:
        """Let what is not a group have a part of it."""
        self._num_bytes = max(0, self._num_bytes - PART_BYTES)
        with suppress(OSError):
            os.truncate(self._path, self._num_bytes)


def _cause(error: BaseException) -> object:
    """What the database or the system said; SQLAlchemy's own text has five lines."""
    if isinstance(error, DBAPIError):
        return error.orig
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return error


def _is_full(error: BaseException) -> bool:
    """Whether room may help. SQLite calls a file beside the database that cannot grow, and a quota,
    an I/O error.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in (
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_IOERR,
        )
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _unusable(file: Path, why: object) -> StoreFailed:
    return StoreFailed(
        f"The trajectory database {file} cannot be opened.",
        f"{why}.",
        "Make room on a full disk, or name a file in a folder that can be written: --database "
        "FILE.",
    )


def _lock(file: Path, lock: Path) -> IO[bytes]:
    """Hold the file until closed: two servers would each think that they know what is in it."""
    try:
        # a lock, and the folder of tokens, go by the name
        if file.exists() and file.stat().st_nlink > 1:
            raise Conflict(
                f"The trajectory database {file} has another name, too.",
                "It is a hard link; a server under the other name would not know of this one.",
                "Remove one of the names.",
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        held = lock.open("ab")
    except OSError as error:
        raise _unusable(file, error.strerror) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.close()
        what, next = (
            f"The trajectory database {file} is in use.",
            "Stop that one, or name another file with --database.",
        )
        raise Conflict(what, "Another trajectory server holds it.", next) from error
    return held
