"""How requests are read and answered.

Owns: the JSON object of a body, its limits; compact JSON; errors in the tools' own form, whatever raised them.
Never: knows a route; answers HTML.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from halteres.agent.call import recorded
from halteres.errors import HalteresError, NotFound, UserError, as_answer
from halteres.loopback import body_within
from halteres.redaction import Redactor

JSON: Final = "application/json"

MAX_BODY_BYTES = 2**20
"""Arguments are short; the longest are prompts to try."""

CLIENT_GONE = 499
"""Written to nobody; the number is nginx's."""


class _TooLarge(UserError):
    status = 413


_LIMIT = ("The body is too large.", f"{MAX_BODY_BYTES // 2**10} KiB are the limit.", "Send less.")


def answer(body: Any, status: int = 200) -> Response:
    """A JSON answer."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), status, media_type=JSON)


def refused(error: HalteresError, status: int | None = None) -> Response:
    """An error outside any tool, in the tools' form: it too tells no secret."""
    return answer(Redactor.of_this_process().json(as_answer(error)), status or error.status)


async def arguments_of(request: Request) -> dict[str, Any]:
    """The JSON object in the body, whatever its declared type; an empty body holds no arguments.

    Raises:
        UserError: it is no JSON object, or too large.
    """
    body = await body_within(request, MAX_BODY_BYTES, _TooLarge(*_LIMIT))
    if not body.strip():
        return {}
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise _unusable(f"{error}") from error
    if not isinstance(value, dict):
        raise _unusable(f"It is {_KINDS.get(type(value), 'no object')}")
    return value


_KINDS = {list: "an array", str: "a text", type(None): "null", bool: "a boolean", int: "a number", float: "a number"}


def _unusable(why: str) -> UserError:
    return UserError("The body is no JSON object of arguments.", f"{why}.", 'Send {"argument": value, ...}.')


async def on_error(_: Request, error: Exception) -> Response:
    """A HalteresError raised in a route."""
    if not isinstance(error, HalteresError):
        raise error
    return refused(error)


async def on_missing(request: Request, error: Exception) -> Response:
    """No such route, or not this method."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    what = f"There is no {request.method} {request.url.path} here."
    return refused(NotFound(what, "", "GET /api/tools lists the tools."), status)


async def on_gone(_: Request, __: Exception) -> Response:
    """The client left while its body was read."""
    return Response(status_code=CLIENT_GONE)


async def on_bug(request: Request, error: Exception) -> Response:
    """A defect of ours, which is in the log."""
    return refused(recorded(f"{request.method} {request.url.path} raised {type(error).__name__}.", error))
