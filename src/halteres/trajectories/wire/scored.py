"""A posted group: from bytes to what the server keeps of it.

Owns: which reader reads it, the batch element kept for delivery, its fingerprint.
Never: queues anything. A group that cannot train anybody is data with a `Problem`, not an error.

    body ──▶ glance (the usual body: no object per number) ──▶ contents: what is wrong with it ──▶ Scored
                └── unusual ──▶ longhand (every coercion) ──┘
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sized
from dataclasses import dataclass

import msgspec
from isal import isal_zlib

from halteres.trajectories.records import Versions
from halteres.trajectories.wire import glance, longhand
from halteres.trajectories.wire.contents import Outline, Problem, find_flaw, find_problem
from halteres.trajectories.wire.schema import UNREADABLE, Unprocessable, refusal

LARGE = 512 * 1024
"""Bytes from which a body is read in a thread, which costs 0.1 ms. Up to here a glance takes 1 ms as a rule, and 15 of
rows with a token each; what takes long in a thread gives way to the event loop between calls of C."""

LARGE_LONGHAND = 64 * 1024
"""Bytes from which a body is read the long way in a thread: at 80 ns per byte, 5 ms up to here."""

MANY = 64
"""Objects of a list, its groups and those within them, from which a thread reads it: a group costs 40 us and more."""

MOST_GROUPS = 16_384
"""Groups of one list: all are decided upon at once, while everybody else waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A posted group that fits the schema."""

    element: bytes  # JSON object with all 14 keys; never a non-finite number
    size: int  # rollouts: what it counts for in a batch
    env_id: int | None
    versions: Versions | None
    key: str | None
    fingerprint: int  # of the bytes as posted
    problem: Problem | None  # it is of no use
    flaw: Problem | None = None  # it is of use all the same


def parse(body: bytes | memoryview, key: str | None = None) -> Scored:
    """Read one posted group.

    Raises:
        Unprocessable: the body does not fit the schema.
        RecursionError: it nests too deeply.
    """
    return _scored(body, key, *(glance.read(body) or longhand.read(bytes(body))))


async def read(body: bytes | memoryview, key: str | None = None) -> Scored:
    """As `parse`; what takes long, in a thread."""
    if len(body) > LARGE:
        return await asyncio.to_thread(parse, body, key)
    if (seen := glance.read(body)) is None and len(body) > LARGE_LONGHAND:
        seen = await asyncio.to_thread(longhand.read, bytes(body))
    return _scored(body, key, *(seen or longhand.read(bytes(body))))


async def read_list(body: bytes) -> list[Scored]:
    """As `parse_list`; what takes long, in a thread."""
    if len(body) > LARGE_LONGHAND or body.count(b"{") > MANY:
        return await asyncio.to_thread(parse_list, body)
    return parse_list(body)


def parse_list(body: bytes) -> list[Scored]:
    """Read a list of posted groups; one that does not fit refuses them all.

    Raises:
        Unprocessable: it is no list, or too long; a group does not fit the schema.
        RecursionError: it nests too deeply.
    """
    return [_item(each, index) for index, each in enumerate(_bodies(body))]


def _item(body: bytes, index: int) -> Scored:
    try:
        return parse(body)
    except Unprocessable as refused:
        raise refused.of_item(index) from refused


def _bodies(body: bytes) -> list[bytes]:
    try:
        bodies = msgspec.json.decode(body, type=list[msgspec.Raw])
    except UNREADABLE as error:
        values = longhand.read_python(body, error)
        if not isinstance(values, list):
            raise refusal(error, "body") from error
        _check_length(values)
        return [json.dumps(value).encode() for value in values]
    _check_length(bodies)
    return [bytes(each) for each in bodies]


def _check_length(groups: Sized) -> None:
    if len(groups) > MOST_GROUPS:
        text = f"A list has at most {MOST_GROUPS} groups, not {len(groups)}: send several."
        raise refusal(msgspec.ValidationError(text), "body")


def _scored(body: bytes | memoryview, key: str | None, outline: Outline, element: bytes) -> Scored:
    problem = find_problem(outline)
    return Scored(
        element=element,
        size=len(outline.tokens) if problem else outline.num_rollouts,
        env_id=outline.possible_env_id,
        versions=None if problem else outline.versions,
        key=key or outline.key,
        fingerprint=isal_zlib.crc32(body) << 31 ^ len(body),
        problem=problem,
        flaw=find_flaw(outline),
    )
