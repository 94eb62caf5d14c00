"""The trajectory store of one server: rows in an SQLite file, tokens in segment files beside it.

Tokens are written first, so that a committed row vouches for its extent. What was committed survives kill -9 of the
process; with durability "power" also the loss of power.

Wanted are the tokens of groups that wait or are out, and of the batch delivered last, because its reply may have been
lost. Others are evidence, kept while there is room. A group whose tokens are not wanted is never wanted again, so each
file is searched once, from front to end.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from sqlalchemy import Connection, insert, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError

from halteres.trajectories.records import (
    Change,
    Delivery,
    DeliverySaved,
    GroupArrived,
    GroupMoved,
    GroupRecord,
    Remembered,
    RunSaved,
    Standing,
)
from halteres.trajectories.stores import loading, rows, tables
from halteres.trajectories.stores.segments import SEGMENT_BYTES, Extent, Segments
from halteres.trajectories.stores.sqlite_file import (
    PART_BYTES,
    RESERVE_BYTES,
    Durability,
    SqliteFile,
    cause_of,
    is_full,
    unusable,
)
from halteres.trajectories.stores.store import GroupsQuery, News, StoreFailed
from halteres.trajectories.stores.tables import chunks

_log = logging.getLogger(__name__)

_FIRST_WANTED = f"""
SELECT id FROM groups
WHERE id >= ? AND id < ? AND segment = ? AND (
    place IN ({", ".join(f"'{place}'" for place in loading.WAITING)})
    OR delivery = (SELECT last_delivery FROM run))
ORDER BY id LIMIT 1
"""  # noqa: S608 - our own words
"""As text, for the driver: over a queue larger than the bounds it is asked once for every file and batch."""

_SPAN_OF = """
SELECT first_group, coalesce((SELECT min(first_group) FROM segments AS later WHERE later.number > segments.number), ?)
FROM segments WHERE number = ?
"""
"""Groups come into files in order: those of a file end where those of the next begin."""

BEYOND = 2**63 - 1
"""Any group's id is smaller."""

_FORGET = "DELETE FROM segments WHERE number = ?"

KEEP_BYTES = 1024**3

NUM_TRIES = RESERVE_BYTES // PART_BYTES + 2
"""On a full disk, of what brings no groups: one, one for each part of the reserve, one with a log begun anew."""

_DIALECT = sqlite.dialect()

_INSERT_GROUP = str(insert(tables.groups).compile(dialect=_DIALECT))

_INSERT_SEGMENT = str(insert(tables.segments).compile(dialect=_DIALECT))
"""Compiled once: this is the way of every group, and SQLAlchemy's share of it would be larger than SQLite's."""

_groups, _segments = tables.groups.c, tables.segments.c

_EXTENTS = select(_groups.id, _groups.segment, _groups.start, _groups.length, _groups.checksum).join(
    tables.segments, (_segments.number == _groups.segment) & (_groups.id >= _segments.first_group)
)
"""Of a file that is there: a number may be used again after a start, and what groups before it say of it is of old."""

_LAST_END = select(_groups.start + _groups.length).order_by(_groups.id.desc()).limit(1)


def releases(changes: Iterable[Change]) -> bool:
    """Whether tokens may no longer be wanted after these changes."""
    for change in changes:
        match change:
            case DeliverySaved(delivery) if delivery.standing is Standing.DELIVERED:
                return True
            case GroupMoved(group) if group.place.value not in loading.WAITING:
                return True
            case RunSaved(run) if run.last is None:
                return True
            case _:
                pass
    return False


class TokenRetention:
    """The bounds on a folder of tokens.

    Args:
        database: whose rows vouch for the tokens.
        segments: the folder.
        keep_bytes: what all tokens may take before those that nobody wants are removed, the oldest first; on a full
            disk none are kept.
    """

    def __init__(self, database: SqliteFile, segments: Segments, keep_bytes: int) -> None:
        self._database, self._segments, self._keep_bytes = database, segments, keep_bytes
        self._searched: dict[int, int] = {}  # per file the first group that was wanted when last looked at

    def reclaim(self) -> None:
        """Bring the folder within its bounds, as far as what is wanted allows. A failure is only logged."""
        keep_bytes = 0 if self._database.reserve.is_full else self._keep_bytes
        try:
            for segment in self._segments.full:
                if self._segments.num_bytes <= keep_bytes:
                    return
                if not self._is_wanted(segment):
                    self._remove(segment)
        except (sqlite3.Error, OSError) as error:
            _log.error("Tokens that nobody wants stay in %s: %s", self._segments.folder, cause_of(error))

    def _is_wanted(self, segment: int) -> bool:
        first, end = self._database.driver.execute(_SPAN_OF, (BEYOND, segment)).fetchone() or (0, 0)  # or nobody's
        first = self._searched.get(segment, first)
        found = self._database.driver.execute(_FIRST_WANTED, (first, end, segment)).fetchone()
        if found is not None:
            self._searched[segment] = found[0]
        return found is not None

    def _remove(self, segment: int) -> None:
        """First what vouches for the file: one that is left over by a crash in between goes at the next start."""
        with self._database.transaction():
            self._database.driver.execute(_FORGET, (segment,))
        self._segments.unlink(segment)
        self._searched.pop(segment, None)


class SqliteStore:
    """One database file and its folder of tokens, held by one server at a time.

    Args:
        file: the database; its tokens are in `FILE.tokens/`.
        durability: "process" survives kill -9, "power" also the loss of power, for two fsyncs per turn.
        keep_bytes: what all tokens may take before those that nobody wants any more are removed.
        segment_bytes: size of a file of tokens.

    Raises:
        Conflict: another server holds it, or it is of another version.
        StoreFailed: it cannot be opened.
    """

    is_shared = False

    def __init__(
        self,
        file: Path,
        durability: Durability = "process",
        keep_bytes: int = KEEP_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        file = file.resolve()  # tokens lie beside the file itself, whatever names lead to it
        self.file, self._power = file, durability == "power"
        self._database = SqliteFile(file, durability, (*tables.RECORDS, tables.segments))
        try:
            with self._database.reading() as connection:
                vouched, end = _vouched(connection)
            self._vouched = max(vouched, default=0)  # the newest file that has a row
            self._segments = Segments(file.with_name(f"{file.name}.tokens"), vouched, end, segment_bytes)
            if gone := vouched - self._segments.numbers:
                _log.warning(
                    "%d of %d files of tokens are missing in %s: groups in them are set aside when a batch wants them."
                    " Put the folder back beside the database; a copy needs both.",
                    *(len(gone), len(vouched), self._segments.folder),
                )
            self._retention = TokenRetention(self._database, self._segments, keep_bytes)
        except OSError as error:
            self._database.close()
            raise unusable(file, f"{error.filename}: {error.strerror}") from error
        except BaseException:
            self._database.close()
            raise

    @property
    def is_quick(self) -> bool:
        """See `Store`."""
        return not self._power

    @property
    def is_full(self) -> bool:
        """See `Store`."""
        return self._database.reserve.is_full

    def load(self) -> Remembered:
        """See `Store`."""
        with self._database.reading() as connection:
            return loading.everything(connection)

    def begin(self, keys: Sequence[str] = ()) -> News:
        """See `Store`. Nobody else writes: there is nothing to wait for."""
        if not keys:
            return News()
        with self._database.reading() as connection:
            return News(known=loading.known_keys(connection, keys))

    def commit(self, changes: Sequence[Change]) -> None:
        """See `Store`."""
        if not changes:
            return
        newest = self._segments.newest
        with self._database.reporting_failures():
            self._write_or_make_room(changes)
        if releases(changes) or self._segments.newest > newest:
            self._retention.reclaim()

    def abandon(self) -> None:
        """See `Store`."""

    def news(self) -> News:
        """See `Store`. Nobody else writes."""
        return News()

    def bodies(self, group_ids: Sequence[int]) -> list[bytes]:
        """See `Store`."""
        found = self.find_bodies(group_ids)
        gone = [group_id for group_id in group_ids if group_id not in found]
        if gone:
            raise StoreFailed(
                f"The tokens of {len(gone)} groups cannot be read, or are not kept any more.",
                f"The first is group {gone[0]}, of {self.file}.",
            )
        return [found[group_id] for group_id in group_ids]

    def find_bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        """See `Store`."""
        with self._database.reading() as connection:
            extents = _extents_of(connection, group_ids)
            texts = self._segments.read(list(extents.values()))
        found = {group_id: text for group_id, text in zip(extents, texts, strict=True) if text is not None}
        if len(found) < len(extents):
            lost = sorted(extents.keys() - found.keys())
            _log.error("Tokens of %d groups of %s are damaged; the first is group %d.", len(lost), self.file, lost[0])
        return found

    def latest_body(self) -> bytes | None:
        """See `Store`."""
        with self._database.reading() as connection:
            newest = loading.newest(connection)
        return next(iter(self.find_bodies(newest).values()), None)

    def delivery(self, batch_id: int) -> Delivery | None:
        """See `Store`."""
        with self._database.reading() as connection:
            return loading.delivery(connection, batch_id)

    def groups(self, query: GroupsQuery) -> list[GroupRecord]:
        """See `Store`."""
        with self._database.reading() as connection:
            return loading.listed(connection, query)

    def num_bytes(self) -> int:
        """See `Store`."""
        return self._database.num_bytes() + self._segments.num_bytes

    def close(self) -> None:
        """See `Store`."""
        self._segments.close()
        self._database.close()

    def _write_or_make_room(self, changes: Sequence[Change]) -> None:
        """On a full disk nothing comes in; whatever else is asked for is written into what was reserved."""
        num_tries = 1 if any(isinstance(change, GroupArrived) for change in changes) else NUM_TRIES
        while True:
            try:
                self._write(changes)
                if self._database.reserve.ran_out:  # what is reserved is for the file: its log is kept to one turn
                    self._database.checkpoint()
                return
            except (DBAPIError, sqlite3.Error, OSError) as error:
                if not is_full(error):
                    raise
                self._database.reserve.ran_out, num_tries = True, num_tries - 1
                if not num_tries:
                    raise
                self._database.make_room()

    def _write(self, changes: Sequence[Change]) -> None:
        arrived = [change for change in changes if isinstance(change, GroupArrived)]
        if arrived:
            self._database.reserve.make()
        extents = self._segments.append([change.body for change in arrived])
        try:
            if self._power:
                self._segments.sync()
            if self._is_one_row(changes):
                self._insert([change.group for change in arrived], extents)
            else:
                with self._database.transaction() as connection:
                    if arrived:
                        self._insert([change.group for change in arrived], extents)
                    rows.write_but_arrivals(connection, changes)
        except BaseException:
            self._segments.take_back(extents)
            raise
        self._vouched = self._segments.newest if extents else self._vouched

    def _is_one_row(self, changes: Sequence[Change]) -> bool:
        """Whether one statement writes it all, which is a transaction by itself: the usual turn."""
        (first, *more) = changes
        in_queue = isinstance(first, GroupArrived) and first.group.place not in rows.SETTLED
        return in_queue and not more and self._segments.newest == self._vouched

    def _insert(self, groups: Sequence[GroupRecord], extents: Sequence[Extent]) -> None:
        """Rows of groups that arrived; one for their file, if it is new. All of a turn are in one."""
        if self._segments.newest != self._vouched:
            self._database.driver.execute(_INSERT_SEGMENT, (self._segments.newest, groups[0].id))
        values = [(*rows.row_of(group), *extent) for group, extent in zip(groups, extents, strict=True)]
        self._database.driver.executemany(_INSERT_GROUP, values)


def _vouched(connection: Connection) -> tuple[set[int], int]:
    """Numbers of the files of tokens, and the byte behind the last of the newest."""
    numbers = set(connection.scalars(select(_segments.number)))
    return numbers, connection.scalar(_LAST_END.where(_groups.segment == max(numbers, default=0))) or 0


def _extents_of(connection: Connection, group_ids: Sequence[int]) -> dict[int, Extent]:
    """Where the tokens of those groups are that are kept still."""
    found: dict[int, Extent] = {}
    for ids in chunks(group_ids):
        query = _EXTENTS.where(_groups.id.in_(ids))
        found.update((row[0], Extent(*row[1:])) for row in connection.execute(query))
    return {group_id: found[group_id] for group_id in group_ids if group_id in found}
