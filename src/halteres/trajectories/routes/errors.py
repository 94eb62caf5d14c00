"""Errors as replies.

Owns: the form of each: plain text, `detail`, or what / why / next.
Never: decides what is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from halteres.errors import HalteresError, as_http
from halteres.trajectories.wire.encoding import BadBody, reply
from halteres.trajectories.wire.schema import Unprocessable


async def _as_text(request: Request, error: BadBody) -> Response:
    return PlainTextResponse(error.sentence, error.status)


async def _as_detail(request: Request, error: Unprocessable) -> Response:
    return reply({"detail": error.problems}, error.status)


async def _as_error(request: Request, error: HalteresError) -> Response:
    return reply(as_http(error), error.status)


async def _as_http_error(request: Request, error: HTTPException) -> Response:
    return reply({"detail": error.detail}, error.status_code)


async def _as_too_deep(request: Request, error: RecursionError) -> Response:
    problem = {"type": "json_too_deep", "loc": ["body"], "msg": "The body is nested too deeply to be read."}
    return reply({"detail": [problem]}, 422)


HANDLERS: Mapping[Any, Any] = {
    BadBody: _as_text,
    Unprocessable: _as_detail,
    HalteresError: _as_error,
    HTTPException: _as_http_error,
    RecursionError: _as_too_deep,
}
