"""How answers look.

Owns: JSON by msgspec, errors as `{"detail": what why next}`.
Never: knows a route.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from halteres.errors import HalteresError, InvalidData, ServerError, as_http
from halteres.loopback import body_within
from halteres.service.wire.codec import JSON, MAX_BODY_BYTES

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode


def answer(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(_encode(value), status, media_type=JSON)


def refused(error: HalteresError) -> Response:
    """An error's answer."""
    headers = {"Retry-After": str(error.details.get("retry_after_s", 1))} if error.status in (429, 503) else None
    return Response(_encode(as_http(error)), error.status, headers, JSON)


async def body_of(request: Request) -> bytes:
    """The request's body.

    Raises:
        InvalidData: it is larger than any client sends.
    """
    why = f"{MAX_BODY_BYTES // 2**20} MiB are the limit."
    return await body_within(request, MAX_BODY_BYTES, InvalidData("The body is too large.", why, "Send less."))


async def on_error(_: Request, error: Exception) -> Response:
    """A HalteresError raised in a route."""
    if not isinstance(error, HalteresError):
        raise error
    return refused(error)


async def on_missing(request: Request, error: Exception) -> Response:
    """No such route or method."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    what = f"There is no {request.method} {request.url.path} here."
    return answer({"detail": f"{what} The routes are those of the Tinker API (SDK 0.38) and /runs/RUN/…."}, status)


async def on_bug(request: Request, error: Exception) -> Response:
    """A bug of ours, with an id that is also in the log."""
    name = uuid.uuid4().hex[:8]
    log.error("%s %s failed, error id %s.", request.method, request.url.path, name, exc_info=error)
    what = f"{request.method} {request.url.path} failed (error id {name})."
    return refused(ServerError(what, f"{type(error).__name__}: {error}.", "See the service's log."))
