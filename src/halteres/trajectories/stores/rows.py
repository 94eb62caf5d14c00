"""Records and rows: how each change is written, how each row is read.

Owns: the translation between `records` and `tables`, both ways.
Never: opens or commits (`sqlite` does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Column, ColumnElement, Connection, Row, delete, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from halteres.trajectories.records import (
    Change,
    Delivered,
    EnvRecord,
    EnvSaved,
    GroupArrived,
    GroupMoved,
    GroupRecord,
    Place,
    RunSaved,
)
from halteres.trajectories.stores import tables
from halteres.trajectories.wire.schema import EnvRegistration


def env_of(row: Row[Any]) -> EnvRecord:
    """The record of a row of `environments`."""
    registration = msgspec.json.decode(row.registration, type=EnvRegistration) if row.registration else None
    return EnvRecord(
        id=row.id,
        name=row.name,
        desired_name=row.desired_name,
        registration=registration,
        connected=row.connected,
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
        key=row.key,
        fingerprint=row.fingerprint,
        verdict=row.verdict,
    )


def is_one_of(column: Column[int], ids: Sequence[int]) -> ColumnElement[bool]:
    """Whether the column is one of any number of ids: a list of parameters ends at SQLite's 32,766."""
    listed = func.json_each(msgspec.json.encode(ids).decode()).table_valued("value")
    return column.in_(select(listed.c.value))


def write(connection: Connection, change: Change) -> None:
    """Write one change inside the connection's transaction."""
    _WRITERS[type(change)](connection, change)


def _save_run(connection: Connection, change: RunSaved) -> None:
    run = change.run
    values = {
        "registration": msgspec.json.encode(run.registration).decode() if run.registration else None,
        "uuid": run.uuid,
        "started": run.started,
        "step": run.step,
        "first_group": run.first_group,
        "asked_version": run.asked_version,
        "last_delivery": run.last.id if run.last else None,
        "parked": run.parked,
    }
    statement = upsert(tables.run).on_conflict_do_update(index_elements=["id"], set_=values)
    connection.execute(statement, {"id": 1, **values})


def _save_env(connection: Connection, change: EnvSaved) -> None:
    env = change.env
    values = {
        "name": env.name,
        "desired_name": env.desired_name,
        "registration": msgspec.json.encode(env.registration).decode() if env.registration else None,
        "connected": env.connected,
    }
    statement = upsert(tables.environments).on_conflict_do_update(index_elements=["id"], set_=values)
    connection.execute(statement, {"id": env.id, **values})


def _insert_group(connection: Connection, change: GroupArrived) -> None:
    group = change.group
    low, high = group.versions or (None, None)
    connection.execute(
        insert(tables.groups),
        {
            "id": group.id,
            "env_id": group.env_id,
            "size": group.size,
            "num_bytes": group.num_bytes,
            "received_at": group.received_at,
            "place": group.place,
            "position": group.position,
            "version_min": low,
            "version_max": high,
            "reason": group.reason,
            "why": group.why,
            "delivery": None,
            "key": group.key,
            "fingerprint": group.fingerprint,
            "verdict": group.verdict,
        },
    )
    connection.execute(insert(tables.bodies), {"group_id": group.id, "element": change.body})


def _move_group(connection: Connection, change: GroupMoved) -> None:
    group = change.group
    values = {"place": group.place, "position": group.position, "reason": group.reason, "why": group.why}
    connection.execute(update(tables.groups).where(tables.groups.c.id == group.id).values(values))
    if group.place is Place.SET_ASIDE:
        connection.execute(delete(tables.bodies).where(tables.bodies.c.group_id == group.id))


def _deliver(connection: Connection, change: Delivered) -> None:
    made = change.delivery
    connection.execute(
        insert(tables.deliveries),
        {
            "id": made.id,
            "step": made.step,
            "version": made.version,
            "num_sequences": made.num_sequences,
            "delivered_at": made.delivered_at,
        },
    )
    connection.execute(
        update(tables.groups)
        .where(is_one_of(tables.groups.c.id, made.groups))
        .values(place=Place.DELIVERED, delivery=made.id)
    )
    connection.execute(delete(tables.bodies).where(is_one_of(tables.bodies.c.group_id, change.before)))


_WRITERS: dict[type[Change], Callable[[Connection, Any], None]] = {
    RunSaved: _save_run,
    EnvSaved: _save_env,
    GroupArrived: _insert_group,
    GroupMoved: _move_group,
    Delivered: _deliver,
}
