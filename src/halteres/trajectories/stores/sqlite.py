"""The trajectory store on SQLite, through SQLAlchemy core.

Owns: one database file, its pragmas, the translation of records to rows.
Never: decides; keeps tokens that nobody will ask for again.

Write-ahead log, synchronous NORMAL: what was committed survives kill -9 of the process. The tokens of the last batch
stay until the next one is served, because its reply may have been lost; those of groups set aside for their contents
stay as evidence.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
from sqlalchemy import Connection, create_engine, event, func, select, text
from sqlalchemy.exc import DatabaseError

from halteres.errors import Conflict, boundary
from halteres.trajectories.records import (
    Change,
    Delivery,
    GroupRecord,
    Place,
    Remembered,
    RunRecord,
    Tally,
)
from halteres.trajectories.stores import rows, tables
from halteres.trajectories.stores.store import StoreFailed
from halteres.trajectories.wire.schema import Registration

KEPT_KEYS = 65_536
"""Idempotency keys known after a restart: the newest."""

PRAGMAS = (
    "page_size = 16384",  # groups are large: four times fewer writes than with the default
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "wal_autocheckpoint = 2000",  # pages
    "busy_timeout = 5000",  # ms
)

_log = logging.getLogger(__name__)


class SqliteStore:
    """One database file, held by one server at a time.

    Raises:
        Conflict: another server holds it, or it is of another version.
        StoreFailed: it cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = _lock(file)
        self._engine = create_engine(f"sqlite:///{file}")
        event.listen(self._engine, "connect", _set_pragmas)
        try:
            with self._engine.begin() as connection:
                self._check_version(connection)
                tables.metadata.create_all(connection)
                connection.execute(text(f"PRAGMA user_version = {tables.SCHEMA_VERSION}"))
        except Conflict:
            self.close()
            raise
        except DatabaseError as error:
            self.close()
            raise _unusable(file, error.orig) from error

    def load(self) -> Remembered:
        """See `Store`."""
        with self._reading() as connection:
            run = _load_run(connection)
            own = tables.groups.c.id >= run.first_group
            return Remembered(
                run=run,
                envs=tuple(rows.env_of(row) for row in connection.execute(select(tables.environments))),
                waiting=tuple(_waiting(connection)),
                keyed=tuple(_keyed(connection)),
                tallies=tuple(_tallies(connection, own)),
                first_group_at=connection.scalar(
                    select(func.min(tables.groups.c.received_at)).where(own, tables.groups.c.place != Place.SET_ASIDE)
                ),
                last_group=connection.scalar(select(func.max(tables.groups.c.id))) or 0,
                last_position=connection.scalar(select(func.max(tables.groups.c.position))) or 0,
                last_delivery=connection.scalar(select(func.max(tables.deliveries.c.id))) or 0,
            )

    def commit(self, changes: Sequence[Change]) -> None:
        """See `Store`."""
        try:
            with self._engine.begin() as connection:
                for change in changes:
                    rows.write(connection, change)
        except DatabaseError as error:
            _log.error("%s did not take %d changes: %s", self.file, len(changes), error.orig)
            raise StoreFailed(
                "The group was not stored.",
                f"The database {self.file} answers: {error.orig}.",
                "Make room on the disk; the request can be sent again.",
            ) from error

    def bodies(self, group_ids: Sequence[int]) -> list[bytes]:
        """See `Store`."""
        query = select(tables.bodies).where(rows.is_one_of(tables.bodies.c.group_id, group_ids))
        with self._reading() as connection:
            found = {row.group_id: row.element for row in connection.execute(query)}
        gone = [group_id for group_id in group_ids if group_id not in found]
        if gone:
            raise StoreFailed(f"The tokens of {len(gone)} groups are not kept any more.", f"The first is {gone[0]}.")
        return [found[group_id] for group_id in group_ids]

    def latest_body(self) -> bytes | None:
        """See `Store`."""
        query = (
            select(tables.bodies.c.element)
            .join(tables.groups, tables.groups.c.id == tables.bodies.c.group_id)
            .where(tables.groups.c.place.in_([Place.QUEUED, Place.DELIVERED]))
            .order_by(tables.groups.c.position.desc())
            .limit(1)
        )
        with self._reading() as connection:
            return connection.scalar(query)

    def close(self) -> None:
        """See `Store`."""
        self._engine.dispose()
        self._lock.close()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with boundary(StoreFailed, f"The trajectory database {self.file}"):
            try:
                with self._engine.connect() as connection:
                    yield connection
            except DatabaseError as error:  # whose own text has five lines
                raise StoreFailed(
                    f"The trajectory database {self.file} cannot be read.",
                    f"{error.orig}.",
                    "Look at the disk; what was acknowledged may be in a copy.",
                ) from error

    def _check_version(self, connection: Connection) -> None:
        found = connection.scalar(text("PRAGMA user_version"))
        if found not in (0, tables.SCHEMA_VERSION):
            raise Conflict(
                f"The trajectory database {self.file} has version {found}.",
                f"This server reads version {tables.SCHEMA_VERSION}.",
                "Name another file with --database, or use the Halteres version that wrote it.",
            )


def _lock(file: Path) -> IO[bytes]:
    """Hold the file until closed: two servers would each think that they know what is in it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = file.with_name(f"{file.name}.lock").open("ab")
    except OSError as error:
        raise _unusable(file, error.strerror) from error
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


def _unusable(file: Path, why: object) -> StoreFailed:
    return StoreFailed(
        f"The trajectory database {file} cannot be opened.",
        f"{why}.",
        "Name a file in a folder that can be written: --database FILE.",
    )


def _set_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    for pragma in PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _load_run(connection: Connection) -> RunRecord:
    row = connection.execute(select(tables.run)).one_or_none()
    if row is None:
        return RunRecord()
    registration = msgspec.json.decode(row.registration, type=Registration) if row.registration else None
    return RunRecord(
        registration=registration,
        uuid=row.uuid,
        started=row.started,
        step=row.step,
        first_group=row.first_group,
        asked_version=row.asked_version,
        last=_delivery(connection, row.last_delivery),
        parked=row.parked,
    )


def _delivery(connection: Connection, delivery_id: int | None) -> Delivery | None:
    row = connection.execute(select(tables.deliveries).where(tables.deliveries.c.id == delivery_id)).one_or_none()
    if row is None:
        return None
    groups = select(tables.groups.c.id).where(tables.groups.c.delivery == row.id).order_by(tables.groups.c.position)
    return Delivery(
        id=row.id,
        step=row.step,
        version=row.version,
        groups=tuple(connection.scalars(groups)),
        num_sequences=row.num_sequences,
        delivered_at=row.delivered_at,
    )


def _waiting(connection: Connection) -> Iterable[GroupRecord]:
    query = (
        select(tables.groups)
        .where(tables.groups.c.place.in_([Place.QUEUED, Place.BUFFERED]))
        .order_by(tables.groups.c.position, tables.groups.c.id)
    )
    return map(rows.group_of, connection.execute(query))


def _keyed(connection: Connection) -> Iterable[GroupRecord]:
    query = select(tables.groups).where(tables.groups.c.key.is_not(None))
    return map(rows.group_of, connection.execute(query.order_by(tables.groups.c.id.desc()).limit(KEPT_KEYS)))


def _tallies(connection: Connection, own: Any) -> Iterable[Tally]:
    columns = (tables.groups.c.env_id, tables.groups.c.place, tables.groups.c.reason)
    query = select(*columns, func.count().label("num_groups")).where(own).group_by(*columns)
    for row in connection.execute(query):
        yield Tally(env_id=row.env_id, place=Place(row.place), reason=row.reason, num_groups=row.num_groups)
