"""A posted group: what the server keeps of it, and where its body is read, on the event loop or in a thread.

A group that cannot train anybody is data with a `Problem`, not an error.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sized
from dataclasses import dataclass

import msgspec
from isal import isal_zlib

from halteres.trajectories import scored_data
from halteres.trajectories.group_checks import Problem, find_flaw, find_problem, possible_env_id, why_not_json
from halteres.trajectories.records import Versions
from halteres.trajectories.schema import UNREADABLE, Unprocessable, refusal
from halteres.trajectories.scored_data import ScoredData, given

LARGE = 512 * 1024
"""Bytes from which a body is read in a thread, which costs 0.1 ms; reading takes 2 ms up to here."""

LARGE_LENIENT = 64 * 1024
"""Bytes from which a body that needs coercions is read in a thread: at 80 ns per byte, 5 ms up to here."""

MANY = 64
"""Objects of a list, its groups and those within them, from which a thread reads it: a group costs 40 us and more."""

MOST_GROUPS = 16_384
"""Groups of one list: all are decided upon at once, while everybody else waits."""

_one_large = threading.Lock()
"""The numbers of a body take five times its bytes while they are checked: of large ones, one at a time."""


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


def parse(body: bytes, key: str | None = None) -> Scored:
    """Read one posted group.

    Raises:
        Unprocessable: the body does not fit the schema.
        RecursionError: it nests too deeply.
    """
    return _scored(body, key, *(scored_data.read_strictly(body) or scored_data.read_leniently(body)))


async def read(body: bytes, key: str | None = None) -> Scored:
    """As `parse`; what takes long, in a thread."""
    if len(body) > LARGE:
        return await asyncio.to_thread(_parse_large, body, key)
    found = scored_data.read_strictly(body)
    if found is None and len(body) > LARGE_LENIENT:
        return await asyncio.to_thread(_parse_large, body, key)
    return _scored(body, key, *(found or scored_data.read_leniently(body)))


async def read_list(body: bytes) -> list[Scored]:
    """As `parse_list`; what takes long, in a thread."""
    if len(body) > LARGE_LENIENT or body.count(b"{") > MANY:
        return await asyncio.to_thread(parse_list, body)
    return parse_list(body)


def parse_list(body: bytes) -> list[Scored]:
    """Read a list of posted groups; one that does not fit refuses them all.

    Raises:
        Unprocessable: it is no list, or too long; a group does not fit the schema.
        RecursionError: it nests too deeply.
    """
    return [_item(each, index) for index, each in enumerate(_bodies(body))]


def _parse_large(body: bytes, key: str | None) -> Scored:
    with _one_large:
        return parse(body, key)


def _item(body: bytes, index: int) -> Scored:
    try:
        return parse(body)
    except Unprocessable as refused:
        raise refused.of_item(index) from refused


def _bodies(body: bytes) -> list[bytes]:
    try:
        bodies = msgspec.json.decode(body, type=list[msgspec.Raw])
    except UNREADABLE as error:
        values = scored_data.read_python(body, error)
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


def _scored(body: bytes, key: str | None, group: ScoredData, element: bytes | None) -> Scored:
    problem = find_problem(group) if element is not None else why_not_json(group)
    episodes = given(group.episodes)
    return Scored(
        element=b"null" if element is None else element,
        size=len(group.tokens) if problem or not episodes else episodes[-1] + 1,
        env_id=possible_env_id(group),
        versions=None if problem else _versions(group),
        key=key or given(group.halteres_key),
        fingerprint=isal_zlib.crc32(body) << 31 ^ len(body),
        problem=problem,
        flaw=find_flaw(group),
    )


def _versions(group: ScoredData) -> Versions | None:
    """The smallest and the largest policy version."""
    tag = given(group.policy_version)
    if tag is None or isinstance(tag, int):
        return None if tag is None else (tag, tag)
    return min(low for low, _ in tag), max(high for _, high in tag)
