"""Records and rows: how each change is written, how each row is read, and the counts of what no longer waits.

A start reads those counts (`tallies`: per environment, place and reason) instead of every group of a long run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from halteres.trajectories.records import (
    Change,
    Delivery,
    DeliverySaved,
    EnvRecord,
    EnvSaved,
    EnvSeen,
    GroupArrived,
    GroupMoved,
    GroupRecord,
    Place,
    RunRecord,
    RunSaved,
    Standing,
    Tally,
)
from halteres.trajectories.schema import EnvRegistration, Registration
from halteres.trajectories.stores import tables
from halteres.trajectories.stores.tables import add, chunks, upsert

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

PLACES = {Standing.OFFERED: Place.OUT, Standing.LEASED: Place.OUT, Standing.DELIVERED: Place.DELIVERED}
"""Where a batch of that standing puts its groups; others leave them where they are."""

_SEEN = (
    update(tables.environments)
    .where(tables.environments.c.id == bindparam("env_id"))
    .values(last_seen=bindparam("at"))
)  # fmt: skip

_MOVED = (
    update(tables.groups)
    .where(tables.groups.c.id == bindparam("group_id"))
    .values({name: bindparam(f"new_{name}") for name in ("place", "position", "reason", "why", "delivery")})
)

_PUT = (
    update(tables.groups)
    .where(tables.groups.c.id == bindparam("group_id"))
    .values(place=bindparam("new_place"), delivery=bindparam("new_delivery"))
)


@contextmanager
def recounted(connection: Connection, group_ids: Sequence[int]) -> Iterator[None]:
    """These groups settle inside; any that had settled before is counted once. None that settled ever waits again."""
    count_settled(connection, group_ids, -1)
    yield
    count_settled(connection, group_ids)


def count_settled(connection: Connection, group_ids: Iterable[int], sign: int = 1) -> None:
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


def load_tallies(connection: Connection, waiting: Iterable[GroupRecord], first_group: int) -> tuple[Tally, ...]:
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


def run_of(row: Row[Any], last: Delivery | None) -> RunRecord:
    """The record of the row of `run`; `last` is what `last_delivery` names."""
    return RunRecord(
        registration=msgspec.json.decode(row.registration, type=Registration) if row.registration else None,
        uuid=row.uuid,
        started=row.started,
        step=row.step,
        first_group=row.first_group,
        asked_version=row.asked_version,
        last=last,
        parked=row.parked,
    )


def env_of(row: Row[Any]) -> EnvRecord:
    """The record of a row of `environments`."""
    return EnvRecord(
        id=row.id,
        name=row.name,
        desired_name=row.desired_name,
        registration=msgspec.json.decode(row.registration, type=EnvRegistration) if row.registration else None,
        connected=row.connected,
        adopted_size=row.adopted_size,
    )


def group_of(row: Row[Any]) -> GroupRecord:
    """The record of a row of `groups`."""
    return GroupRecord(
        id=row.id,
        env_id=row.env_id,
        size=row.size,
        num_bytes=row.num_bytes,
        received_at=row.received_at,
        place=Place(row.place),
        position=row.position,
        versions=None if row.version_min is None else (row.version_min, row.version_max),
        reason=row.reason,
        why=row.why,
        delivery=row.delivery,
        key=row.key,
        fingerprint=row.fingerprint,
        verdict=row.verdict,
    )


def delivery_of(row: Row[Any]) -> Delivery:
    """The record of a row of `deliveries`."""
    return Delivery(
        id=row.id,
        standing=Standing(row.standing),
        step=row.step,
        version=row.version,
        groups=msgspec.json.decode(row.group_ids, type=tuple[int, ...]),
        num_sequences=row.num_sequences,
        made_at=row.made_at,
        expires_at=row.expires_at,
        versions=None if row.version_min is None else (row.version_min, row.version_max),
        held=row.held,
    )


def row_of(group: GroupRecord) -> tuple[Any, ...]:
    """The row of `groups` of a record, in the table's order; without the place of its tokens."""
    low, high = group.versions or (None, None)
    return (
        group.id,
        group.env_id,
        group.size,
        group.num_bytes,
        group.received_at,
        group.place.value,
        group.position,
        low,
        high,
        group.reason,
        group.why,
        group.delivery,
        group.key,
        group.fingerprint,
        group.verdict,
    )


def write(connection: Connection, changes: Sequence[Change]) -> None:
    """Write changes inside the connection's transaction, all but tokens: a `GroupArrived` may come without a body."""
    names = tables.groups.columns.keys()
    groups = (change.group for change in changes if isinstance(change, GroupArrived))
    if arrived := [dict(zip(names, row_of(group), strict=False)) for group in groups]:
        connection.execute(insert(tables.groups), arrived)
    write_but_arrivals(connection, changes)


def write_but_arrivals(connection: Connection, changes: Sequence[Change]) -> None:
    """As `write`, where the groups that arrived have their rows already."""
    for kind, alike in groupby(changes, type):
        _WRITERS[kind](connection, list(alike))


def _count_arrivals(connection: Connection, changes: Sequence[GroupArrived]) -> None:
    settled = [change.group.id for change in changes if change.group.place in SETTLED]
    if settled:
        count_settled(connection, settled)


def _save_runs(connection: Connection, changes: Sequence[RunSaved]) -> None:
    run = changes[-1].run
    forget_other_runs(connection, run.first_group)
    values = {
        "id": 1,
        "registration": msgspec.json.encode(run.registration).decode() if run.registration else None,
        "uuid": run.uuid,
        "started": run.started,
        "step": run.step,
        "first_group": run.first_group,
        "asked_version": run.asked_version,
        "last_delivery": run.last.id if run.last else None,
        "parked": run.parked,
    }
    upsert(connection, tables.run, [values])


def _save_envs(connection: Connection, changes: Sequence[EnvSaved]) -> None:
    values = [
        {
            "id": env.id,
            "name": env.name,
            "desired_name": env.desired_name,
            "registration": msgspec.json.encode(env.registration).decode() if env.registration else None,
            "connected": env.connected,
            "adopted_size": env.adopted_size,
        }
        for env in (change.env for change in changes)
    ]
    upsert(connection, tables.environments, values)


def _see_envs(connection: Connection, changes: Sequence[EnvSeen]) -> None:
    connection.execute(_SEEN, [{"env_id": change.env_id, "at": change.at} for change in changes])


def _move_groups(connection: Connection, changes: Sequence[GroupMoved]) -> None:
    values = [
        {
            "group_id": group.id,
            "new_place": group.place.value,
            "new_position": group.position,
            "new_reason": group.reason,
            "new_why": group.why,
            "new_delivery": group.delivery,
        }
        for group in (change.group for change in changes)
    ]
    settled = [change.group.id for change in changes if change.group.place in SETTLED]
    with recounted(connection, settled):
        connection.execute(_MOVED, values)


def _save_deliveries(connection: Connection, changes: Sequence[DeliverySaved]) -> None:
    for change in changes:
        _save_delivery(connection, change.delivery)


def _save_delivery(connection: Connection, made: Delivery) -> None:
    low, high = made.versions or (None, None)
    values = {
        "id": made.id,
        "standing": made.standing.value,
        "step": made.step,
        "version": made.version,
        "group_ids": msgspec.json.encode(made.groups).decode(),
        "num_sequences": made.num_sequences,
        "made_at": made.made_at,
        "expires_at": made.expires_at,
        "version_min": low,
        "version_max": high,
        "held": made.held,
    }
    upsert(connection, tables.deliveries, [values])
    place = PLACES.get(made.standing)
    if place is not None and made.groups:
        put = [{"group_id": group_id, "new_place": place.value, "new_delivery": made.id} for group_id in made.groups]
        with recounted(connection, made.groups if place in SETTLED else ()):
            connection.execute(_PUT, put)


_WRITERS: dict[type[Change], Callable[[Connection, Any], None]] = {
    GroupArrived: _count_arrivals,
    RunSaved: _save_runs,
    EnvSaved: _save_envs,
    EnvSeen: _see_envs,
    GroupMoved: _move_groups,
    DeliverySaved: _save_deliveries,
}
