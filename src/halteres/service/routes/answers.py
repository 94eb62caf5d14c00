"""How answers look.

Owns: JSON by msgspec, errors as `{"detail": what why next}`.
Never: knows a route.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from halteres.errors import HalteresError, as_http
from halteres.loopback import body_within
from halteres.service.tenancy.limits import TooLarge, size_text
from halteres.service.wire.codec import JSON, SMALL_BYTES

_encode = msgspec.json.Encoder().encode


def answer(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(_encode(value), status, media_type=JSON)


def encoded(value: Any) -> msgspec.Raw:
    """A part of a JSON answer: whoever encodes it holds Python's lock, and lets go of it between two parts."""
    return msgspec.Raw(_encode(value))


def refused(error: HalteresError) -> Response:
    """An error's answer."""
    return with_status(as_http(error), error)


def with_status(body: dict[str, Any], error: HalteresError) -> Response:
    """An error told in this body."""
    headers = {"Retry-After": str(error.details.get("retry_after_s", 1))} if error.status in (429, 503) else None
    return Response(_encode(body), error.status, headers, JSON)


async def body_of(request: Request, most: int = SMALL_BYTES) -> bytes:
    """The request's body, of at most so many bytes.

    Raises:
        TooLarge: it is larger than any client sends.
    """
    too_large = TooLarge("The body is too large.", f"{size_text(most)} are the limit.", "Send less.")
    return await body_within(request, most, too_large)
