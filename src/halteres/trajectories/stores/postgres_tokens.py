"""Tokens in PostgreSQL: the table `bodies`, one JSON element per group that is not released.

Owns: writing and reading them; which of them are given up, and when.
Never: looks into them; decides where a group is (their rows say so).

Kept are the tokens of everything that waits and of the batch delivered last, which may be asked for again; of groups
that were set aside, archived or left over from another run the newest, within a budget: they are evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import BigInteger, Connection, any_, bindparam, delete, insert, select, text
from sqlalchemy.dialects.postgresql import ARRAY

from halteres.trajectories.records import Change, DeliverySaved, GroupArrived, Standing
from halteres.trajectories.stores import loading, tables

_is_asked_for = tables.bodies.c.group_id == any_(bindparam("ids", type_=ARRAY(BigInteger)))  # one parameter for all
_FIND = select(tables.bodies).where(_is_asked_for)
_DELETE = delete(tables.bodies).where(_is_asked_for)
_LAST_DELIVERED = select(tables.deliveries.c.group_ids).join(
    tables.run, tables.run.c.last_delivery == tables.deliveries.c.id
)

_PRUNE = text("""
DELETE FROM bodies WHERE group_id IN (
    SELECT id FROM (
        SELECT groups.id, sum(groups.num_bytes) OVER (ORDER BY groups.id DESC) AS num_bytes_from_here
        FROM bodies JOIN groups ON groups.id = bodies.group_id
        WHERE groups.place NOT IN ('queued', 'buffered', 'out')
          AND groups.delivery IS DISTINCT FROM (SELECT last_delivery FROM run)
    ) AS evidence
    WHERE num_bytes_from_here > :keep_bytes
)
""")


def write(connection: Connection, changes: Sequence[Change]) -> None:
    """Write the tokens of groups that arrived."""
    arrived = (change for change in changes if isinstance(change, GroupArrived))
    values = [{"group_id": change.group.id, "element": change.body} for change in arrived]
    if values:
        connection.execute(insert(tables.bodies), values)


def find(connection: Connection, group_ids: Iterable[int]) -> dict[int, bytes]:
    """The elements of those groups that have them still."""
    return {row.group_id: row.element for row in connection.execute(_FIND, {"ids": list(group_ids)})}


def newest(connection: Connection) -> bytes | None:
    """The element of the group of the run that entered the queue last, of those still kept."""
    newest = loading.newest(connection)
    found = find(connection, newest)
    return next((found[group_id] for group_id in newest if group_id in found), None)


def release(connection: Connection, changes: Sequence[Change]) -> None:
    """Delete the tokens of every batch that is not the last delivered any more. Before the changes are written."""
    saved = (change.delivery for change in changes if isinstance(change, DeliverySaved))
    delivered = [delivery.groups for delivery in saved if delivery.standing is Standing.DELIVERED]
    if not delivered:
        return
    before = connection.scalar(_LAST_DELIVERED)
    if before is not None:
        delivered.insert(0, msgspec.json.decode(before, type=tuple[int, ...]))
    released = {group_id for groups in delivered[:-1] for group_id in groups} - set(delivered[-1])
    if released:
        connection.execute(_DELETE, {"ids": list(released)})


def prune(connection: Connection, keep_bytes: int) -> None:
    """Delete evidence, the oldest first, until no more than so many bytes of it are left."""
    connection.execute(_PRUNE, {"keep_bytes": keep_bytes})
