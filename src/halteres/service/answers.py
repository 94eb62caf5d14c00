"""Routes, bodies and answers of the service, and the one place where errors become HTTP.

Source: OpenAI's and Anthropic's API references, errors.

    /v1/…, /runs/RUN/v1/…, /oai/api/…             OpenAI's, /tokenize and /detokenize too
    …/v1/messages…, /anthropic/api/v1/…           Anthropic's
    everything else                               {"detail": …}

Where no route answered (there is none, it has a bug, the guard refused), OpenAI's and Anthropic's have the detail too.
"""

from __future__ import annotations

import datetime
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.errors import HalteresError, InvalidData, NotFound, ServerError, UserError, as_http, shortened
from halteres.loopback import body_within
from halteres.service.tenancy.limits import TooLarge, size_text
from halteres.service.wire.bodies import read
from halteres.service.wire.codec import JSON, SMALL_BYTES

T = TypeVar("T")

log = logging.getLogger(__name__)


def route(path: str, handler: Callable[[Request], Awaitable[Any]], method: str = "GET") -> Route:
    """A route whose handler returns a response, or what is answered as JSON; None is 204."""

    async def endpoint(request: Request) -> Response:
        found = await handler(request)
        if isinstance(found, Response):
            return found
        return Response(status_code=204) if found is None else answer(found)

    return Route(path, endpoint, methods=[method])


def answer(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


async def body_of(request: Request, most: int = SMALL_BYTES) -> bytes:
    """The request's body, of at most so many bytes.

    Raises:
        TooLarge: it is larger than any client sends.
    """
    too_large = TooLarge("The body is too large.", f"{size_text(most)} are the limit.", "Send less.")
    return await body_within(request, most, too_large)


async def read_body(request: Request, kind: type[T]) -> T:
    """A small body of the Tinker API."""
    return read(await body_of(request), kind)


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def openai_error(error: HalteresError) -> dict[str, Any]:
    """The body of an error in OpenAI's shape."""
    param = error.details.get("param")
    code = "model_not_found" if error.status == 404 and param == "model" else error.code
    kind = _error_type(error, "service_unavailable_error")
    return {"error": {"message": error.sentence, "type": kind, "param": param, "code": code}}


def anthropic_error(error: HalteresError) -> dict[str, Any]:
    """The body of an error in Anthropic's shape."""
    return {"type": "error", "error": {"type": _error_type(error, "overloaded_error"), "message": error.sentence}}


def _error_type(error: HalteresError, unavailable: str) -> str:
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    return unavailable if error.status == 503 else _ERROR_TYPES.get(error.status, fallback)


_SHAPES = (
    (re.compile(r"/anthropic/api(/|$)|(/runs/[^/]+)?/v1/messages(/|$)"), anthropic_error),
    (re.compile(r"/oai/api(/|$)|(/runs/[^/]+)?/(v1|tokenize|detokenize)(/|$)"), openai_error),
)


def refusal_at(path: str, error: HalteresError, *, routed: bool = False) -> Response:
    """The answer to a request for this path, in the shape that its clients read.

    Args:
        routed: a route answers so; otherwise nobody knows whose client asked, and each shape has the detail beside.
    """
    shape = next((shape for paths, shape in _SHAPES if paths.match(path)), None)
    body = as_http(error) if shape is None else shape(error)
    if shape is not None and not routed:
        body = {"detail": error.sentence, **body}
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else dict[str, str]()
    if error.status in (429, 503):
        headers["Retry-After"] = str(error.details.get("retry_after_s", 1))
    return Response(msgspec.json.encode(body), error.status, headers, JSON)


class NoMethod(UserError):
    """The path is there, the method is not."""

    code, status = "no_such_method", 405


async def on_error(request: Request, error: Exception) -> Response:
    """A HalteresError raised in a route."""
    if not isinstance(error, HalteresError):
        raise error
    return refusal_at(request.url.path, error, routed=True)


async def on_missing(request: Request, error: Exception) -> Response:
    """No such route or method."""
    kind = NoMethod if isinstance(error, HTTPException) and error.status_code == NoMethod.status else NotFound
    why = "The routes are those of the Tinker API (SDK 0.38), /v1/… of OpenAI's and Anthropic's, and /runs/RUN/…."
    return refusal_at(request.url.path, kind(f"There is no {_named(request)} here.", why))


async def on_gone(_: Request, __: Exception) -> Response:
    """A client that closed its connection while its request was read; nobody reads this."""
    return Response(status_code=499)


async def on_bug(request: Request, error: Exception) -> Response:
    """A bug of ours, with an id that is also in the log."""
    name = uuid.uuid4().hex[:8]
    log.error("%s failed, error id %s.", _named(request), name, exc_info=error)
    what = f"{_named(request)} failed (error id {name})."
    found = ServerError(what, f"{type(error).__name__}: {error}.", "See the service's log.")
    return refusal_at(request.url.path, found)


def _named(request: Request) -> str:
    return f"{request.method} {shortened(request.url.path)}"


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
