"""Lists of records: pages and timestamps.

Owns: the cursor of a page, the form of a time, of metadata.
Never: knows what is listed.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from halteres.errors import InvalidData

T = TypeVar("T")


def timestamp(at: float) -> str:
    """A time with its zone, as the SDK insists.

    >>> timestamp(0.0)
    '1970-01-01T00:00:00+00:00'
    """
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata as the SDK insists: nothing but texts.

    >>> texts({"run": "r1", "seed": 3})
    {'run': 'r1', 'seed': '3'}
    """
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in metadata.items()
    }


def page_of(items: Sequence[T], request: Request) -> tuple[Sequence[T], dict[str, int]]:
    """The part of a list that limit and offset name, and its cursor."""
    try:
        limit = int(request.query_params.get("limit", 20))
        offset = int(request.query_params.get("offset", 0))
    except ValueError as error:
        raise InvalidData("limit and offset are numbers.") from error
    if limit < 0 or offset < 0:
        raise InvalidData("limit and offset are not negative.")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor
