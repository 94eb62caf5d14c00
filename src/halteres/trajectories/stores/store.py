"""Durable memory: what every store can do, the tables that all of them have, how changes are
written and read back.

    turn:  begin ── what others did meanwhile ──▶ decide in memory ── changes ──▶ commit, or abandon

The same tables and queries serve SQLite and PostgreSQL. Tokens are beside the rows: SQLite's name
their place in a segment file (`segments`), PostgreSQL holds them in a table of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from itertools import groupby
from typing import Any, Literal, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    String,
    Table,
    Text,
    bindparam,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

from halteres.errors import NotReady
from halteres.trajectories.records import (
    OPEN,
    WAITING,
    Change,
    Delivery,
    EnvRecord,
    EnvSeen,
    GroupArrived,
    GroupRecord,
    KnownKey,
    Place,
    Remembered,
    RunRecord,
    Standing,
    Tally,
    Update,
)
from halteres.trajectories.schema import EnvRegistration, GroupsRequest, Registration

SCHEMA_VERSION = 3

# settled batches known after a start, the newest: their trainers may still ask for them
KEPT_SETTLED = 256
LARGEST_LIST = 500  # values in one IN list: every dialect takes that many parameters
# what committed data survive: the process's death; the loss of power, too
Durability = Literal["process", "power"]
T = TypeVar("T")


# -- tables


class _Json(sa.TypeDecorator[Any]):  # a value of a type as JSON text
    impl, cache_ok = Text, True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Any) -> str | None:
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Any) -> Any:
        return msgspec.json.decode(value, type=self.kind) if value else None


class _Word(sa.TypeDecorator[Any]):  # a member of an enumeration by its value
    impl, cache_ok = String(16), True

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Any) -> str:
        return str(value.value)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return self.kind(value)


metadata = sa.MetaData()

# there the row's own number, without an index of its own
_Id = BigInteger().with_variant(Integer, "sqlite")

run = Table(
    "run",
    metadata,
    Column("id", Integer, primary_key=True),  # always 1: the run being served
    Column("registration", _Json(Registration)),  # null before /register
    Column("uuid", String(40), nullable=False),
    Column("started", Boolean, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("first_group", BigInteger, nullable=False),
    Column("asked_version", BigInteger),
    Column("last_delivery", BigInteger),
    Column("parked", Boolean, nullable=False),
)

environments = Table(
    "environments",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("desired_name", Text, nullable=False),
    Column("registration", _Json(EnvRegistration)),  # null if adopted
    Column("connected", Boolean, nullable=False),
    Column("adopted_size", Integer, nullable=False),
    Column("last_seen", Float),  # unix s, coarse
)

groups = Table(
    "groups",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=False),
    Column("env_id", BigInteger),
    Column("size", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("received_at", Float, nullable=False),
    Column("place", _Word(Place), nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("version_min", BigInteger),
    Column("version_max", BigInteger),
    Column("reason", String(64)),
    Column("why", Text),
    Column("delivery", BigInteger),
    Column("key", Text),  # unique in its run; another run may use it again
    Column("fingerprint", BigInteger, nullable=False),
    Column("verdict", sa.LargeBinary, nullable=False),
    Column("segment", Integer),  # number of the file that holds the tokens, where a store has files
    Column("start", BigInteger),  # byte in it
    Column("length", BigInteger),  # bytes
    Column("checksum", BigInteger),  # CRC-32 of them
)
# every further index costs each group a page
sa.Index("groups_by_place", groups.c.place, groups.c.id)
_is_keyed = groups.c.key.is_not(None)
sa.Index("groups_by_key", groups.c.key, sqlite_where=_is_keyed, postgresql_where=_is_keyed)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=False),
    Column("standing", _Word(Standing), nullable=False, index=True),
    Column("step", BigInteger),
    Column("version", BigInteger),
    Column("group_ids", _Json(tuple[int, ...]), nullable=False),  # in the order of the batch
    Column("num_sequences", Integer, nullable=False),
    Column("made_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("version_min", BigInteger),
    Column("version_max", BigInteger),
    Column("held", BigInteger),
)

# what every store has; where the tokens are comes beside it
RECORDS = (run, environments, groups, deliveries)
_PLACE_OF_TOKENS = {"segment", "start", "length", "checksum"}
_GROUPS = select(*(column for column in groups.c if column.name not in _PLACE_OF_TOKENS))
_ENVIRONMENTS = select(*(column for column in environments.c if column.name != "last_seen"))
_DELIVERIES = select(*(c.label("groups") if c.name == "group_ids" else c for c in deliveries.c))
_IN_RUN = groups.c.id >= sa.func.coalesce(select(run.c.first_group).scalar_subquery(), 0)
"""Of a group: it belongs to the run being served."""


def _row_of(record: GroupRecord | EnvRecord | Delivery) -> dict[str, Any]:
    """A record's fields by their columns."""
    row = {name: getattr(record, name) for name in type(record).__slots__}
    if "versions" in row:
        row["version_min"], row["version_max"] = row.pop("versions") or (None, None)
    return row


def _records(connection: Connection, kind: type[T], query: Any) -> list[T]:
    """The records of rows; the query gives each of their fields."""
    found, rows = list[T](), connection.execute(query)
    names = list(rows.keys())
    for row in rows.all():
        fields = dict(zip(names, row, strict=True))
        if "version_min" in fields:
            low, high = fields.pop("version_min"), fields.pop("version_max")
            fields["versions"] = None if low is None else (low, high)
        found.append(kind(**fields))
    return found


def chunks(values: Iterable[T]) -> Iterator[list[T]]:
    """Lists that fit into an IN list."""
    listed = list(values)
    return (listed[first : first + LARGEST_LIST] for first in range(0, len(listed), LARGEST_LIST))


# -- writing

_MOVING = ("place", "position", "reason", "why", "delivery")
_MOVE = sa.update(groups).where(groups.c.id == bindparam("group_id"))  # to what the parameters name
_SEE = sa.update(environments).where(environments.c.id == bindparam("env_id"))
_INSERT = sa.insert(groups)

_PLACES = {
    Standing.OFFERED: Place.OUT,
    Standing.LEASED: Place.OUT,
    Standing.DELIVERED: Place.DELIVERED,
}
"""Where a batch of that standing puts its groups; others leave them where they are."""


def write(connection: Connection, changes: Sequence[Change], extents: Sequence[Any] = ()) -> None:
    """Write changes in order, all but tokens, inside the connection's transaction.

    `extents`: where the tokens of the groups that arrived are, of a store that has files.
    """
    arrived = [_row_of(change.group) for change in changes if isinstance(change, GroupArrived)]
    for row, extent in zip(arrived, extents, strict=False):
        row |= extent._asdict()
    if arrived:
        connection.execute(_INSERT, arrived)
    for kind, alike in groupby(changes, type):
        some: list[Any] = list(alike)
        if kind is RunRecord:
            saved: RunRecord = some[-1]
            fields = {name: getattr(saved, name) for name in RunRecord.__slots__ if name != "last"}
            upsert(
                connection,
                run,
                [{"id": 1, **fields, "last_delivery": saved.last.id if saved.last else None}],
            )
        elif kind is EnvRecord:
            upsert(connection, environments, [_row_of(env) for env in some])
        elif kind is EnvSeen:
            connection.execute(
                _SEE, [{"env_id": change.env_id, "last_seen": change.at} for change in some]
            )
        elif kind is GroupRecord:
            moved = ({"group_id": group.id, **_row_of(group)} for group in some)
            connection.execute(
                _MOVE, [{name: row[name] for name in ("group_id", *_MOVING)} for row in moved]
            )
        elif kind is Delivery:
            for made in some:
                row = _row_of(made)
                upsert(connection, deliveries, [{"group_ids": row.pop("groups"), **row}])
                place = _PLACES.get(made.standing)
                if place is not None and made.groups:
                    put = {"place": place, "delivery": made.id}
                    connection.execute(
                        _MOVE, [{"group_id": group_id, **put} for group_id in made.groups]
                    )


def upsert(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows, or overwrite these columns of those with the same primary key. All rows name the
    same columns.
    """
    made = (
        postgresql.insert(table)
        if connection.dialect.name == "postgresql"
        else sqlite.insert(table)
    )
    keys = [column.name for column in table.primary_key]
    new = {name: made.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(made.on_conflict_do_update(index_elements=keys, set_=new), rows)


# -- reading

_KEYS = select(groups.c.key, groups.c.fingerprint, groups.c.verdict).where(
    groups.c.key.is_not(None), _IN_RUN
)

_TALLIES = (
    select(groups.c.env_id, groups.c.place, groups.c.reason, sa.func.count())
    .where(_IN_RUN, groups.c.place != Place.ARCHIVED)
    .group_by(groups.c.env_id, groups.c.place, groups.c.reason)
)

# or it was set aside as it came
_taken = sa.or_(groups.c.place != Place.SET_ASIDE, groups.c.position > 0)
_FIRST_GROUP_AT = select(groups.c.received_at).where(_IN_RUN, _taken).order_by(groups.c.id).limit(1)


def everything(connection: Connection) -> Remembered:
    """All that the state needs to go on."""
    waiting = _records(connection, GroupRecord, _GROUPS.where(groups.c.place.in_(WAITING)))
    waiting.sort(key=lambda group: (group.position, group.id))
    standings, newest_first = deliveries.c.standing, _DELIVERIES.order_by(deliveries.c.id.desc())
    settled = _records(
        connection, Delivery, newest_first.where(standings.not_in(OPEN)).limit(KEPT_SETTLED)
    )
    seen = select(environments.c.id, environments.c.last_seen).where(
        environments.c.last_seen.is_not(None)
    )
    served = RunRecord()
    if (row := connection.execute(select(run)).one_or_none()) is not None:
        fields = {name: getattr(row, name) for name in RunRecord.__slots__ if name != "last"}
        last = delivery(connection, row.last_delivery) if row.last_delivery else None
        served = RunRecord(**fields, last=last)
    return Remembered(
        run=served,
        envs=tuple(_records(connection, EnvRecord, _ENVIRONMENTS.order_by(environments.c.id))),
        waiting=tuple(waiting),
        deliveries=tuple(
            _records(connection, Delivery, newest_first.where(standings.in_(OPEN)))[::-1]
        ),
        settled=tuple(settled[::-1]),
        keyed=tuple(map(KnownKey._make, connection.execute(_KEYS).all())),
        seen=tuple(EnvSeen(*row) for row in connection.execute(seen.order_by(environments.c.id))),
        tallies=tuple(Tally(*row) for row in connection.execute(_TALLIES)),
        first_group_at=connection.scalar(_FIRST_GROUP_AT),
        last_group=connection.scalar(select(sa.func.max(groups.c.id))) or 0,
        last_position=max((group.position for group in waiting), default=0),
        last_delivery=connection.scalar(select(sa.func.max(deliveries.c.id))) or 0,
    )


def delivery(connection: Connection, batch_id: int) -> Delivery | None:
    """A batch by its id."""
    found = _records(connection, Delivery, _DELIVERIES.where(deliveries.c.id == batch_id))
    return found[0] if found else None


# -- what every store can do


class StoreFailed(NotReady):
    """Nothing was remembered, or it cannot be read; the request may succeed when it is sent
    again.
    """

    code = "store_failed"


class Store(ABC):
    """Durable memory in a database of SQL. `load` to `catch_up` are called one after another; the
    others by any thread.

    Every method raises StoreFailed where the store cannot be read or written.
    """

    is_quick = False  # a commit usually takes less than waking a thread for it
    # other servers write to it too: every turn must `begin`, and followers `catch_up`
    is_shared = False

    @property
    def is_full(self) -> bool:
        """It takes no groups until its disk has room; what waits can be taken out."""
        return False

    def load(self) -> Remembered:
        """Everything the state needs to go on."""
        with self._reading() as connection:
            return everything(connection)

    def begin(self) -> Update:
        """Begin a turn: nobody else decides until it ends."""
        return Update()

    @abstractmethod
    def commit(self, changes: Sequence[Change]) -> None:
        """End the turn: remember these changes, all or none. When it returns they survive the death
        of the process.

        A store that is not shared may be committed to without `begin`.
        """

    def abandon(self) -> None:
        """End a turn that changed nothing."""
        return

    def catch_up(self) -> Update:
        """What others changed since the last `begin` or `catch_up`, outside a turn."""
        return Update()

    @abstractmethod
    def bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        """The JSON elements of those groups whose tokens are still kept, in this order."""

    def latest_body(self) -> bytes | None:
        """The element of the group that entered the queue last, of those still kept."""
        with self._reading() as connection:
            last = select(sa.func.max(groups.c.id)).where(_IN_RUN)
            # one that completed others came after them
            entered = (Place.QUEUED, Place.OUT, Place.DELIVERED)
            found = [connection.scalar(last.where(groups.c.place == place)) for place in entered]
        newest = sorted(filter(None, found), reverse=True)  # and others, if its tokens are gone
        return next(iter(self.bodies(newest).values()), None)

    def delivery(self, batch_id: int) -> Delivery | None:
        """A batch by its id, also one that was settled long ago; None: there never was one."""
        with self._reading() as connection:
            return delivery(connection, batch_id)

    def groups(self, query: GroupsRequest) -> list[GroupRecord]:
        """Records of groups, also of those that no longer wait, the oldest first."""
        found: list[GroupRecord] = []
        order: Any = groups.c.id
        if query.newest:
            order = groups.c.id.desc()
        with self._reading() as connection:
            # Each by its index.
            for place in query.place or (None,):
                matching = (
                    _GROUPS.where(groups.c.id > query.after).limit(query.limit).order_by(order)
                )
                if place is not None:
                    matching = matching.where(groups.c.place == Place(place))
                if query.env_id is not None:
                    matching = matching.where(groups.c.env_id == query.env_id)
                found += _records(connection, GroupRecord, matching)
        found.sort(key=lambda group: group.id)
        if query.newest:
            return found[-query.limit :]
        return found[: query.limit]

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Connection]:
        """A connection for whatever thread asks."""
