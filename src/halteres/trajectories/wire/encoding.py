"""Bodies on the wire: gzip both ways, JSON that is always finite.

Owns: how a request's body becomes bytes and an answer becomes a response; the limits of both.
Never: knows a route.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from isal import isal_zlib
from starlette.requests import Request
from starlette.responses import Response

from halteres.errors import HalteresError

LARGEST_BODY = 256 * 1024 * 1024
"""Bytes of a request, inflated."""

MOST_MEMBERS = 16
"""Members of a gzipped request. Clients send one; what follows it is copied for each."""

SMALLEST_GZIPPED = 1000
"""Bytes from which a reply is gzipped if the client accepts that."""

LARGE_TO_PACK = 256 * 1024
"""Bytes from which a reply is compressed in a thread: 400 MB/s are 0.7 ms up to here, and a thread costs 0.1."""

LEVEL = 1
"""The original compresses at 9: many times the time for a tenth of the size."""


class BadBody(HalteresError):
    """The body cannot be read; answered as plain text, as the original does."""

    code, status = "bad_body", 400


class TooLarge(BadBody):
    """The body is beyond the limit."""

    status = 413


def inflate(body: bytes | memoryview, limit: int = LARGEST_BODY) -> bytes:
    """A gzip body, one member or a few.

    Raises:
        BadBody: the gzip stream is broken or ends early.
        TooLarge: it is beyond the limit.
    """
    parts, left = [], limit
    while body or not parts:
        if len(parts) == MOST_MEMBERS:
            raise BadBody(f"The gzip body has more than {MOST_MEMBERS} members.", "", "Send it as one.")
        stream = isal_zlib.decompressobj(wbits=31)
        try:
            part = stream.decompress(body, left + 1)
        except isal_zlib.error as error:  # pyright: ignore[reportGeneralTypeIssues] - its stubs call the class a value
            raise BadBody("Invalid gzip payload") from error
        left -= len(part)
        if left < 0:
            raise TooLarge(f"The body is larger than {limit} bytes when inflated.")
        if not stream.eof:
            raise BadBody("Invalid gzip payload")
        parts.append(part)
        body = stream.unused_data.lstrip(b"\0")
    return b"".join(parts)


def reply(value: Any, status: int = 200) -> Response:
    """A JSON reply; `value` holds finite numbers only."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def large_reply(request: Request, body: bytes) -> Response:
    """A JSON reply that may be large: gzipped off the event loop if the client accepts it."""
    response = Response(body, media_type="application/json")
    if len(body) < SMALLEST_GZIPPED or "gzip" not in request.headers.get("accept-encoding", "").lower():
        return response
    packed = await asyncio.to_thread(deflate, body) if len(body) > LARGE_TO_PACK else deflate(body)
    headers = {"content-encoding": "gzip", "vary": "Accept-Encoding"}
    return Response(packed, headers=headers, media_type="application/json")


def deflate(body: bytes) -> bytes:
    """The body as one gzip member."""
    stream = isal_zlib.compressobj(LEVEL, wbits=31)
    return stream.compress(body) + stream.flush()
