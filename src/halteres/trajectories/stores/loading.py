"""What is read back from the tables, for every SQL dialect that we have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, and_, func, or_, select

from halteres.trajectories.records import (
    OPEN,
    Delivery,
    EnvSeen,
    GroupRecord,
    KnownKey,
    Place,
    Remembered,
    RunRecord,
)
from halteres.trajectories.stores import rows, tables
from halteres.trajectories.stores.rows import IN_RUN
from halteres.trajectories.stores.store import GroupsQuery
from halteres.trajectories.stores.tables import chunks

KEPT_KEYS = 65_536
"""Idempotency keys in memory after a start: the newest of the run."""

KEPT_SETTLED = 256
"""Batches known after a start that are settled: the newest. Their trainers may still ask what became of them."""

WAITING = tuple(place.value for place in (Place.QUEUED, Place.BUFFERED, Place.OUT))
"""Places of groups whose tokens will be asked for."""

_groups, _envs, _deliveries = tables.groups.c, tables.environments.c, tables.deliveries.c
_ENTERED = (Place.QUEUED, Place.OUT, Place.DELIVERED)
_NEWEST = select(func.max(_groups.id)).where(IN_RUN)
_ANY_KEY = select(_groups.key).where(_groups.key >= "").limit(1)
"""A comparison, so that the index answers: clients without keys may have sent millions of groups."""


def everything(connection: Connection) -> Remembered:
    """All that the state needs to go on."""
    run = load_run(connection)
    waiting = _waiting(connection)
    keyed = _newest_keys(connection)
    return Remembered(
        run=run,
        envs=tuple(map(rows.env_of, connection.execute(select(tables.environments).order_by(_envs.id)))),
        waiting=waiting,
        deliveries=_deliveries_of(connection, is_open=True),
        settled=_deliveries_of(connection, is_open=False),
        keyed=keyed[:KEPT_KEYS],
        all_keyed=len(keyed) <= KEPT_KEYS,
        seen=_seen(connection),
        tallies=rows.load_tallies(connection, waiting, run.first_group),
        first_group_at=_first_group_at(connection),
        last_group=connection.scalar(select(func.max(_groups.id))) or 0,
        last_position=max((group.position for group in waiting), default=0),
        last_delivery=connection.scalar(select(func.max(_deliveries.id))) or 0,
    )


def load_run(connection: Connection) -> RunRecord:
    """The run being served."""
    row = connection.execute(select(tables.run)).one_or_none()
    if row is None:
        return RunRecord()
    return rows.run_of(row, None if row.last_delivery is None else delivery(connection, row.last_delivery))


def delivery(connection: Connection, batch_id: int) -> Delivery | None:
    """See `Store.delivery`."""
    row = connection.execute(select(tables.deliveries).where(_deliveries.id == batch_id)).one_or_none()
    return None if row is None else rows.delivery_of(row)


def newest(connection: Connection) -> list[int]:
    """The group of the run that entered the queue last, and others if its tokens are gone; the newest first.

    One that completed others came after them.
    """
    found = (connection.scalar(_NEWEST.where(_groups.place == place.value)) for place in _ENTERED)
    return sorted((group_id for group_id in found if group_id is not None), reverse=True)


def known_keys(connection: Connection, keys: Sequence[str]) -> tuple[KnownKey, ...]:
    """Those of the keys that were used in the run."""
    found: list[KnownKey] = []
    for some in chunks(keys):
        query = select(_groups.key, _groups.fingerprint, _groups.verdict).where(_groups.key.in_(some), IN_RUN)
        found += (KnownKey(*row) for row in connection.execute(query))
    return tuple(found)


def listed(connection: Connection, query: GroupsQuery) -> list[GroupRecord]:
    """See `Store.groups`."""
    places = [place.value for place in query.places]
    found = [group for place in places or [None] for group in _listed_at(connection, query, place)]
    found.sort(key=lambda group: group.id)
    return found[-query.limit :] if query.newest else found[: query.limit]


def _listed_at(connection: Connection, query: GroupsQuery, place: str | None) -> Iterable[GroupRecord]:
    """At one place, by its index; or at all."""
    conditions = [_groups.id > query.after]
    if place is not None:
        conditions.append(_groups.place == place)
    if query.env_id is not None:
        conditions.append(_groups.env_id == query.env_id)
    order = _groups.id.desc() if query.newest else _groups.id
    found = connection.execute(select(tables.groups).where(and_(*conditions)).order_by(order).limit(query.limit))
    return map(rows.group_of, found)


def _waiting(connection: Connection) -> tuple[GroupRecord, ...]:
    query = select(tables.groups).where(_groups.place.in_(WAITING))
    found = map(rows.group_of, connection.execute(query))
    return tuple(sorted(found, key=lambda group: (group.position, group.id)))


def _deliveries_of(connection: Connection, *, is_open: bool) -> tuple[Delivery, ...]:
    """The newest, by id; of those that are open all: a trainer asks for few before it acknowledges one."""
    standings = [standing.value for standing in OPEN]
    query = select(tables.deliveries).order_by(_deliveries.id.desc())
    if is_open:
        found = connection.execute(query.where(_deliveries.standing.in_(standings)))
    else:
        found = connection.execute(query.where(_deliveries.standing.not_in(standings)).limit(KEPT_SETTLED))
    return tuple(map(rows.delivery_of, found))[::-1]


def _newest_keys(connection: Connection) -> tuple[KnownKey, ...]:
    """One more than is kept, if there are more."""
    if connection.scalar(_ANY_KEY) is None:
        return ()
    query = (
        select(_groups.key, _groups.fingerprint, _groups.verdict)
        .where(_groups.key.is_not(None), IN_RUN)
        .order_by(_groups.id.desc())
        .limit(KEPT_KEYS + 1)
    )
    return tuple(KnownKey(*row) for row in connection.execute(query))


def _seen(connection: Connection) -> tuple[EnvSeen, ...]:
    query = select(_envs.id, _envs.last_seen).where(_envs.last_seen.is_not(None)).order_by(_envs.id)
    return tuple(EnvSeen(*row) for row in connection.execute(query))


def _first_group_at(connection: Connection) -> float | None:
    """Groups arrive in the order of their ids: the first that was taken, whatever became of it later.

    What was set aside as it came has never had a position.
    """
    taken = or_(_groups.place != Place.SET_ASIDE.value, _groups.position > 0)
    query = select(_groups.received_at).where(IN_RUN, taken).order_by(_groups.id).limit(1)
    return connection.scalar(query)
