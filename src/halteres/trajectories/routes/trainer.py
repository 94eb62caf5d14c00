"""The trainer's routes.

Owns: their bodies and the shapes of their replies; a batch whose reply was not written whole is given back.
Never: decides.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from halteres.trajectories.delivering.handover import BatchReply
from halteres.trajectories.routes.reach import service_of
from halteres.trajectories.wire.encoding import large_reply, read_body, reply
from halteres.trajectories.wire.schema import BatchQuery, Registration, convert, decode

NOT_REGISTERED: dict[str, Any] = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}


async def register(request: Request) -> Response:
    """POST /register: a trainer."""
    registration = decode(await read_body(request), Registration).checked()
    return reply({"uuid": await service_of(request).register(registration)})


async def wandb_info(request: Request) -> Response:
    """GET /wandb_info"""
    registration = service_of(request).state.run.registration
    if registration is None:
        return reply({"group": None, "project": None})
    return reply({"group": registration.wandb_group, "project": registration.wandb_project})


async def info(request: Request) -> Response:
    """GET /info"""
    registration = service_of(request).state.run.registration
    if registration is None:
        return reply({"batch_size": -1, "max_token_len": -1})
    return reply({"batch_size": registration.batch_size, "max_token_len": registration.max_token_len})


async def batch(request: Request) -> Response:
    """GET /batch: exactly batch_size sequences, or null. Ours: ?policy_version, ?after, ?wait."""
    query = convert(dict(request.query_params), BatchQuery, "query")
    service = service_of(request)
    if service.state.run.registration is None:
        return reply(NOT_REGISTERED)
    made = await service.batch(query, request.is_disconnected)
    if made is None:
        return reply({"batch": None} if service.state.run.registration else NOT_REGISTERED)
    tail = b',"batch_id":%d,"step":%d}' % (made.delivery.id, made.delivery.step) if query.extended else b"}"
    body = b'{"batch":[' + b",".join(made.elements or ()) + b"]" + tail
    return BatchReply(await large_reply(request, body), request.is_disconnected, lambda: service.give_back(made))


async def reset_data(request: Request) -> Response:
    """GET /reset_data"""
    await service_of(request).reset()
    return PlainTextResponse("Reset successful")
