"""Tokens that nobody will ask for again, kept while there is room.

Owns: which tokens are still wanted; which files of tokens go, and when.
Never: unlinks a file that holds anything wanted; decides that a group is done with (its place says so).

Wanted are the tokens of groups that wait or are out, and of the batch delivered last, because its reply may have been
lost. A group whose tokens are not wanted is never wanted again, so each file is searched once, from front to end.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable

from halteres.trajectories.records import Change, DeliverySaved, GroupMoved, RunSaved, Standing
from halteres.trajectories.stores import loading
from halteres.trajectories.stores.segments import Segments
from halteres.trajectories.stores.sqlite_file import SqliteFile, cause_of

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


class Evidence:
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
