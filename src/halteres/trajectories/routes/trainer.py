"""The trainer's routes.

Owns: their bodies and the shapes of their replies; a batch whose reply was not written whole is given back.
Never: decides.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from halteres.trajectories.delivering.handover import Batch, BatchReply
from halteres.trajectories.records import Delivery
from halteres.trajectories.routes.reach import body_of, query_of, replied, service_of
from halteres.trajectories.state import State
from halteres.trajectories.wire.answers import BatchTail, Info, NotRegistered, Registered, Settled, WandbInfo
from halteres.trajectories.wire.encoding import reply
from halteres.trajectories.wire.schema import BatchQuery, BatchReference, LeaseRequest, Registration, convert

NO_BATCH = b'{"batch":null}'


async def register(request: Request) -> Response:
    """POST /register: a trainer begins a run, or goes on with its own."""
    registration = (await body_of(request, Registration)).checked()
    return reply(Registered(uuid=await service_of(request).register(registration)))


async def wandb_info(request: Request) -> Response:
    """GET /wandb_info: group and project that the trainer registered; null before."""
    registration = await service_of(request).registration()
    if registration is None:
        return reply(WandbInfo())
    return reply(WandbInfo(group=registration.wandb_group, project=registration.wandb_project))


async def info(request: Request) -> Response:
    """GET /info: sequences of a batch, tokens of the longest sequence, as the trainer registered them; -1 before."""
    registration = await service_of(request).registration()
    if registration is None:
        return reply(Info())
    return reply(Info(batch_size=registration.batch_size, max_token_len=registration.max_token_len))


async def batch(request: Request) -> Response:
    """GET /batch: exactly batch_size sequences, or null. Ours: ?lease, ?policy_version, ?after, ?wait."""
    query = query_of(request, BatchQuery)
    service = service_of(request)
    made = await service.batch(query, request.is_disconnected) if await service.registration() else None
    if made is None:
        known = service.state.run.registration is not None
        return Response(NO_BATCH, media_type="application/json") if known else reply(NotRegistered())
    try:
        whole = await replied(request, _written(made, query, service.state))
    except BaseException:
        service.handovers.give_back(made)
        raise
    return BatchReply(whole, request.is_disconnected, service.handovers, made)


async def acknowledge(request: Request) -> Response:
    """POST /v1/batches/{batch_id}/ack: a leased batch is the trainer's for good."""
    return _settled(await service_of(request).acknowledge(_batch_id(request)))


async def nack(request: Request) -> Response:
    """POST /v1/batches/{batch_id}/nack: a leased batch goes back; it answers the next question."""
    return _settled(await service_of(request).nack(_batch_id(request)))


async def extend(request: Request) -> Response:
    """POST /v1/batches/{batch_id}/extend: the lease ends so many seconds from now."""
    in_query = "lease" in request.query_params
    wanted = query_of(request, LeaseRequest) if in_query else await body_of(request, LeaseRequest)
    return _settled(await service_of(request).extend(_batch_id(request), wanted.lease))


async def reset_data(request: Request) -> Response:
    """GET /reset_data: forget the run; its groups are archived."""
    await service_of(request).reset()
    return PlainTextResponse("Reset successful")


def _written(made: Batch, query: BatchQuery, state: State) -> bytes:
    """The reply's body. The elements are JSON already."""
    head = b'{"batch":[' + b",".join(made.elements) + b"]"
    if not query.extended:
        return head + b"}"
    delivery, registration = made.delivery, state.run.registration
    is_leased = query.lease is not None and delivery.expires_at is not None
    tail = BatchTail(
        batch_id=delivery.id,
        step=msgspec.UNSET if is_leased else made.step,
        lease_expires=delivery.expires_at if is_leased and delivery.expires_at is not None else msgspec.UNSET,
        num_stale=state.set_aside["stale"],
        run_id=(registration.run_id if registration else None) or "",
    )
    return head + b"," + msgspec.json.encode(tail)[1:]


def _batch_id(request: Request) -> int:
    return convert(dict(request.path_params), BatchReference, "path").batch_id


def _settled(delivery: Delivery) -> Response:
    return reply(
        Settled(
            batch_id=delivery.id,
            standing=delivery.standing.value,  # type: ignore[arg-type] - a batch just settled has no other
            step=msgspec.UNSET if delivery.step is None else delivery.step,
            lease_expires=msgspec.UNSET if delivery.expires_at is None else delivery.expires_at,
        )
    )
