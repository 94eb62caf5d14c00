"""What all routes share: from a request to the service, JSON replies, errors as replies."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from isal import isal_zlib
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from halteres.errors import HalteresError, as_http
from halteres.loopback import is_loopback
from halteres.trajectories.options import Gzip
from halteres.trajectories.request_bodies import BadBody, Bodies
from halteres.trajectories.schema import Unprocessable, convert, decode
from halteres.trajectories.service import QueueFull, TrajectoryService

SMALLEST_GZIPPED = 1000
"""Bytes from which a reply is gzipped if the client accepts that."""

LARGE_TO_PACK = 256 * 1024
"""Bytes from which a reply is compressed in a thread: 400 MB/s are 0.7 ms up to here, and a thread costs 0.1."""

LEVEL = 1
"""The original compresses at 9: many times the time for a tenth of the size."""

T = TypeVar("T")

Endpoint = Callable[[Request], Awaitable[Response]]

CLIENT = "halteres-client"
"""Header of a client that knows our extensions."""

RETRY_AFTER_S = 1
"""What a 503 advises where the error does not say."""

JSON = "application/json"

TOO_DEEP = Unprocessable(
    [{"type": "json_too_deep", "loc": ["body"], "msg": "The body is nested too deeply to be read."}]
)

TRAINERS = ("/v1/batches/",)
"""Where only trainers post; what else is refused to a client says what an environment does wrong."""

_CLOSING = frozenset({408, 413})  # the rest of the body is not waited for


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


@dataclass(frozen=True, slots=True)
class AppContext:
    """What the routes of one app have at hand."""

    service: TrajectoryService
    bodies: Bodies
    gzip: Gzip


def context_of(request: Request) -> AppContext:
    """Of the app that was asked."""
    return request.app.state.context


def service_of(request: Request) -> TrajectoryService:
    """The service of the app that was asked."""
    return context_of(request).service


def is_ours(request: Request) -> bool:
    """Whether the client understands what the original never says."""
    return CLIENT in request.headers


async def body_of(request: Request, kind: type[T]) -> T:
    """The JSON body.

    Raises:
        Unprocessable: it does not fit.
    """
    async with context_of(request).bodies.of(request.scope, request.receive) as body:
        return decode(body, kind)


def query_of(request: Request, kind: type[T], *lists: str) -> T:
    """The query; the parameters of `lists` may be repeated.

    Raises:
        Unprocessable: it does not fit.
    """
    given: dict[str, Any] = dict(request.query_params)
    given |= {name: request.query_params.getlist(name) for name in lists}
    return convert(given, kind, "query")


async def replied(request: Request, body: bytes) -> Response:
    """A JSON reply that may be large, gzipped where the client accepts it and the operator wants it."""
    gzip = context_of(request).gzip
    if gzip == "never" or (gzip == "auto" and _is_here(request)):
        return Response(body, media_type="application/json")
    return await large_reply(request, body)


def _is_here(request: Request) -> bool:
    """Whether the client is on this machine, where compressing costs more than it saves."""
    try:
        return request.client is None or is_loopback(request.client.host)
    except ValueError:  # no IP address: another transport's name for its other end
        return False


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
