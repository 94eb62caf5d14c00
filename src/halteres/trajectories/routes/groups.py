"""Routes that list groups, with or without their tokens.

Owns: pages: how many groups, and how many bytes of them, one reply holds.
Never: changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from halteres.errors import NotFound
from halteres.trajectories.records import GroupRecord, Place
from halteres.trajectories.routes.reach import query_of, replied, service_of
from halteres.trajectories.stores.store import GroupsQuery
from halteres.trajectories.wire.answers import Group, Groups
from halteres.trajectories.wire.schema import GroupReference, GroupsRequest, convert

PAGE = 32 * 1024 * 1024
"""Bytes of elements on one page; one group is always on it."""

GONE = msgspec.Raw(b"null")


async def groups(request: Request) -> Response:
    """GET /v1/groups: what became of posted groups, oldest first; ?bodies=1 with what the trainer gets of them."""
    wanted = query_of(request, GroupsRequest, "place")
    found = await service_of(request).groups(
        GroupsQuery(
            after=max(0, wanted.after),
            limit=wanted.limit + 1,  # one more tells whether there are more
            places=tuple(map(Place, wanted.place)),
            env_id=wanted.env_id,
            newest=wanted.newest,
        )
    )
    page = fitting(found, wanted)
    elements = await service_of(request).bodies_of([group.id for group in page]) if wanted.bodies and page else {}
    told = [_told(group, elements.get(group.id) if wanted.bodies else b"") for group in page]
    more = len(page) < len(found) and not wanted.newest
    return await replied(request, msgspec.json.encode(Groups(groups=told, next=page[-1].id if more else None)))


async def group(request: Request) -> Response:
    """GET /v1/groups/{group_id}: one group, with its element while that is kept."""
    group_id = convert(dict(request.path_params), GroupReference, "path").group_id
    found = await service_of(request).groups(GroupsQuery(after=group_id - 1, limit=1)) if group_id > 0 else []
    if not found or found[0].id != group_id:
        raise NotFound(f"There is no group {group_id}.", "", "GET /v1/groups lists them.")
    element = (await service_of(request).bodies_of([group_id])).get(group_id)
    return await replied(request, msgspec.json.encode(_told(found[0], element)))


def fitting(found: Sequence[GroupRecord], wanted: GroupsRequest, most: int = PAGE) -> list[GroupRecord]:
    """Those of the found ones that fit on the page: the first, or the last of the newest; the order stays."""
    within = list(found[-wanted.limit :] if wanted.newest else found[: wanted.limit])
    if not wanted.bodies:
        return within
    page, left = list[GroupRecord](), most
    for each in reversed(within) if wanted.newest else within:
        left -= each.num_bytes
        if left < 0 and page:
            break
        page.append(each)
    return page[::-1] if wanted.newest else page


def _told(group: GroupRecord, element: bytes | None) -> Group:
    """Without an element where that is b"", with null where it is None."""
    return Group(
        id=group.id,
        env_id=group.env_id,
        size=group.size,
        num_bytes=group.num_bytes,
        received_at=group.received_at,
        place=group.place.value,
        policy_version=group.versions,
        reason=group.reason,
        why=group.why,
        batch_id=group.delivery,
        element=GONE if element is None else msgspec.Raw(element) if element else UNSET,
    )
