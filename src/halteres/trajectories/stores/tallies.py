"""Counts of the groups of the run that no longer wait, kept as they settle.

Owns: the table `tallies`: per environment, place and reason. A start reads it instead of every group of a long run.
Never: counts what waits (whoever loads that has it in hand).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, bindparam, delete, func, select

from halteres.trajectories.records import GroupRecord, Place, Tally
from halteres.trajectories.stores import tables
from halteres.trajectories.stores.dialects import add, chunks

SETTLED = (Place.DELIVERED, Place.SET_ASIDE)
"""Places that are counted here; what waits is loaded anyway, and what is archived is of no run."""

_groups, _tallies = tables.groups.c, tables.tallies.c
IN_RUN = _groups.id >= func.coalesce(select(tables.run.c.first_group).scalar_subquery(), 0)
"""Of a group: it belongs to the run being served."""

_OF_RUN = select(_groups.env_id, _groups.place, _groups.reason).where(
    _groups.id.in_(bindparam("ids", expanding=True)), IN_RUN
)
"""Counted here, not by the database: with a condition on the place it may read every group at that place."""

_OF_OTHER_RUNS = delete(tables.tallies).where(
    select(tables.run.c.id).where(tables.run.c.first_group != bindparam("first_group")).exists()
)


@contextmanager
def recounted(connection: Connection, group_ids: Sequence[int]) -> Iterator[None]:
    """These groups settle inside; any that had settled before is counted once. None that settled ever waits again."""
    count(connection, group_ids, -1)
    yield
    count(connection, group_ids)


def count(connection: Connection, group_ids: Iterable[int], sign: int = 1) -> None:
    """Count those of the groups that are settled, by their rows."""
    counted = Counter[tuple[int, str, str]]()
    for ids in chunks(group_ids):
        for row in connection.execute(_OF_RUN, {"ids": ids}):
            if row.place in SETTLED:
                counted[tables.NOBODY if row.env_id is None else row.env_id, row.place, row.reason or ""] += sign
    if counted:
        columns = ("env_id", "place", "reason", "num_groups")
        add(
            connection,
            tables.tallies,
            [dict(zip(columns, (*k, n), strict=True)) for k, n in counted.items()],
            "num_groups",
        )


def forget_other_runs(connection: Connection, first_group: int) -> None:
    """The run begins with this group: if that is another run than before, count from nothing."""
    connection.execute(_OF_OTHER_RUNS, {"first_group": first_group})


def load(connection: Connection, waiting: Iterable[GroupRecord], first_group: int) -> tuple[Tally, ...]:
    """Everything of the run, counted: what settled, and these groups that wait."""
    settled = [
        Tally(
            env_id=None if row.env_id == tables.NOBODY else row.env_id,
            place=Place(row.place),
            reason=row.reason or None,
            num_groups=row.num_groups,
        )
        for row in connection.execute(select(tables.tallies).where(_tallies.num_groups > 0))
    ]
    counted = Counter((group.env_id, group.place, group.reason) for group in waiting if group.id >= first_group)
    return *settled, *(
        Tally(env_id=env_id, place=place, reason=reason, num_groups=num)
        for (env_id, place, reason), num in counted.items()
    )
