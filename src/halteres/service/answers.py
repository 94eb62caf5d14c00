"""How answers look, also those to requests that no route answers: there is none, it raised, or the guard refused it.

Source: OpenAI's and Anthropic's API references, errors.

    /v1/…, /runs/RUN/v1/…, /oai/api/…             OpenAI's, /tokenize and /detokenize too
    …/v1/messages…, /anthropic/api/…              Anthropic's
    everything else                               {"detail": …}, which the others have beside
"""

from __future__ import annotations

import datetime
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from halteres.errors import HalteresError, InvalidData, NotFound, ServerError, UserError, as_http, shortened
from halteres.loopback import body_within
from halteres.service.tenancy.limits import TooLarge, size_text
from halteres.service.wire.codec import JSON, SMALL_BYTES

_encode = msgspec.json.Encoder().encode


log = logging.getLogger(__name__)


def answer(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(_encode(value), status, media_type=JSON)


def encoded(value: Any) -> msgspec.Raw:
    """A part of a JSON answer: whoever encodes it holds Python's lock, and lets go of it between two parts."""
    return msgspec.Raw(_encode(value))


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


ANTHROPIC = re.compile(r"/anthropic/api(/|$)|(/runs/[^/]+)?/v1/messages(/|$)")
OPENAI = re.compile(r"/oai/api(/|$)|(/runs/[^/]+)?/(v1|tokenize|detokenize)(/|$)")

ROUTES = "The routes are those of the Tinker API (SDK 0.38), /v1/… of OpenAI's and Anthropic's, and /runs/RUN/…."


class NoMethod(UserError):
    """The path is there, the method is not."""

    code, status = "no_such_method", 405


def refusal_at(path: str, error: HalteresError) -> Response:
    """The answer to a request for this path, in the shape that its clients read."""
    shape = anthropic_error if ANTHROPIC.match(path) else openai_error if OPENAI.match(path) else None
    return with_status(as_http(error) if shape is None else {"detail": error.sentence, **shape(error)}, error)


async def on_error(request: Request, error: Exception) -> Response:
    """A HalteresError raised in a route."""
    if not isinstance(error, HalteresError):
        raise error
    return refusal_at(request.url.path, error)


async def on_missing(request: Request, error: Exception) -> Response:
    """No such route or method."""
    wrong_method = isinstance(error, HTTPException) and error.status_code == NoMethod.status
    what = f"There is no {_named(request)} here."
    return refusal_at(request.url.path, (NoMethod if wrong_method else NotFound)(what, ROUTES))


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
