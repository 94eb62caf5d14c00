"""The way from a request to what serves it.

Owns: where the app keeps it; what a request says of itself: its JSON body, its query, who its client is.
Never: makes any of it (`app` does).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from halteres.loopback import is_loopback
from halteres.trajectories.options import Gzip
from halteres.trajectories.request_bodies import Bodies
from halteres.trajectories.service import TrajectoryService
from halteres.trajectories.wire.encoding import large_reply
from halteres.trajectories.wire.schema import convert, decode

T = TypeVar("T")

Endpoint = Callable[[Request], Awaitable[Response]]

CLIENT = "halteres-client"
"""Header of a client that knows our extensions."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What the routes of one app have at hand."""

    service: TrajectoryService
    bodies: Bodies
    gzip: Gzip


def reach(request: Request) -> Reach:
    """Of the app that was asked."""
    return request.app.state.reach


def service_of(request: Request) -> TrajectoryService:
    """The service of the app that was asked."""
    return reach(request).service


def is_ours(request: Request) -> bool:
    """Whether the client understands what the original never says."""
    return CLIENT in request.headers


async def body_of(request: Request, kind: type[T]) -> T:
    """The JSON body.

    Raises:
        Unprocessable: it does not fit.
    """
    async with reach(request).bodies.of(request.scope, request.receive) as body:
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
    gzip = reach(request).gzip
    if gzip == "never" or (gzip == "auto" and _is_here(request)):
        return Response(body, media_type="application/json")
    return await large_reply(request, body)


def _is_here(request: Request) -> bool:
    """Whether the client is on this machine, where compressing costs more than it saves."""
    try:
        return request.client is None or is_loopback(request.client.host)
    except ValueError:  # no IP address: another transport's name for its other end
        return False
