"""Routes that only look: status, diagnostics, the newest example, the description of the API.

Owns: the shapes of their replies.
Never: changes anything.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from halteres.trajectories.reporting.status import status
from halteres.trajectories.routes.reach import service_of
from halteres.trajectories.wire.encoding import large_reply, reply

NO_EXAMPLE: dict[str, Any] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}


async def root(request: Request) -> Response:
    """GET /"""
    return reply({"message": "AtroposLib API"})


async def get_status(request: Request) -> Response:
    """GET /status"""
    return reply(status(service_of(request).state))


async def latest_example(request: Request) -> Response:
    """GET /latest_example"""
    body = await service_of(request).latest_example()
    return await large_reply(request, body if body is not None else msgspec.json.encode(NO_EXAMPLE))


async def diagnostics(request: Request) -> Response:
    """GET /v1/diagnostics: why there is no batch, in sentences."""
    return reply(service_of(request).diagnose())
