"""Errors as replies.

Owns: the form of each: plain text, `detail`, or what / why / next; the headers that belong to a status.
Never: decides what is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from halteres.errors import HalteresError, as_http
from halteres.trajectories.request_bodies import BadBody
from halteres.trajectories.routes.reach import service_of
from halteres.trajectories.service import QueueFull
from halteres.trajectories.wire.schema import Unprocessable

RETRY_AFTER_S = 1
"""What a 503 advises where the error does not say."""

JSON = "application/json"

TOO_DEEP = Unprocessable(
    [{"type": "json_too_deep", "loc": ["body"], "msg": "The body is nested too deeply to be read."}]
)

TRAINERS = ("/v1/batches/",)
"""Where only trainers post; what else is refused to a client says what an environment does wrong."""

_CLOSING = frozenset({408, 413})  # the rest of the body is not waited for


def answer_to(error: Exception) -> Response:
    """The reply to a request that ended in one of `ANSWERED`."""
    match error:
        case BadBody():
            return PlainTextResponse(error.sentence, error.status, _headers(error))
        case Unprocessable():
            return _json({"detail": error.problems}, error.status)
        case HalteresError():
            return _json(as_http(error), error.status, _headers(error))
        case HTTPException():
            return _json({"detail": error.detail}, error.status_code, error.headers)
        case RecursionError():
            return answer_to(TOO_DEEP)
        case _:
            return Response(status_code=400)  # the client hung up: nobody reads it


def _headers(error: HalteresError) -> dict[str, str]:
    if error.status == 503:
        seconds = error.retry_after_s if isinstance(error, QueueFull) else RETRY_AFTER_S
        return {"retry-after": str(math.ceil(seconds))}
    if error.status == 401:
        return {"www-authenticate": 'Basic realm="halteres", charset="UTF-8"'}
    return {"connection": "close"} if error.status in _CLOSING else {}


def _json(value: Any, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, JSON)


async def _handle(request: Request, error: Exception) -> Response:
    reply, is_gone = answer_to(error), isinstance(error, ClientDisconnect)
    asked_by_environment = request.method == "POST" and not request.url.path.startswith(TRAINERS)
    if asked_by_environment and 400 <= reply.status_code < 500 and reply.status_code != 408 and not is_gone:
        service_of(request).note_refusal(request.url.path, reply.status_code, _sentence(error))
    return reply


def _sentence(error: Exception) -> str:
    match error:
        case HalteresError():
            return error.sentence
        case HTTPException():
            return error.detail
        case _:
            return TOO_DEEP.sentence


ANSWERED = (HalteresError, HTTPException, RecursionError, ClientDisconnect)
"""What a request may end in without being our fault."""

HANDLERS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(ANSWERED, _handle)
