"""A posted group: from bytes to what the server keeps of it.

Owns: which reader reads it, the batch element kept for delivery, its fingerprint.
Never: queues anything. A group that cannot train anybody is data with a `Problem`, not an error.

    body ──▶ glance (the usual body: no object per number) ──▶ contents: what is wrong with it ──▶ Scored
                └── unusual ──▶ longhand (every coercion) ──┘
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec
from isal import isal_zlib

from halteres.trajectories.records import Versions
from halteres.trajectories.wire import glance, longhand
from halteres.trajectories.wire.contents import Problem, find_problem
from halteres.trajectories.wire.schema import UNREADABLE, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A posted group that fits the schema."""

    element: bytes  # JSON object with all 14 keys; never a non-finite number
    size: int  # sequences
    env_id: int | None
    versions: Versions | None
    key: str | None
    fingerprint: int  # of the bytes as posted
    problem: Problem | None


def parse(body: bytes, key: str | None = None) -> Scored:
    """Read one posted group.

    Raises:
        Unprocessable: the body does not fit the schema.
        RecursionError: it nests too deeply.
    """
    outline, element = glance.read(body) or longhand.read(body)
    problem = find_problem(outline)
    return Scored(
        element=element,
        size=len(outline.tokens),
        env_id=outline.possible_env_id,
        versions=None if problem else outline.versions,
        key=key or outline.key,
        fingerprint=isal_zlib.crc32(body) << 31 ^ len(body),
        problem=problem,
    )


def parse_list(body: bytes) -> list[Scored]:
    """Read a list of posted groups; one that does not fit refuses them all."""
    try:
        bodies = msgspec.json.decode(body, type=list[msgspec.Raw])
    except UNREADABLE as error:
        values = longhand.read_python(body, error)
        if not isinstance(values, list):
            raise refusal(error, "body") from error
        return [parse(json.dumps(value).encode()) for value in values]
    return [parse(bytes(each)) for each in bodies]
