"""The routes: what each reads of a request, and the shape of its reply. The service decides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from halteres.errors import NotFound
from halteres.observe.prometheus import MEDIA_TYPE
from halteres.trajectories import openapi, posted_group
from halteres.trajectories.batch_reply import Batch, BatchReply
from halteres.trajectories.http import (
    CLIENT,
    AppContext,
    Endpoint,
    body_of,
    context_of,
    is_ours,
    query_of,
    replied,
    reply,
    service_of,
)
from halteres.trajectories.ingest import Verdict
from halteres.trajectories.records import Delivery, GroupRecord, Place
from halteres.trajectories.replies import (
    BatchTail,
    Buffered,
    EnvRegistered,
    EnvWaits,
    Example,
    Failed,
    Group,
    Groups,
    Info,
    ListReceived,
    Message,
    NotRegistered,
    Received,
    Registered,
    SetAside,
    Settled,
    Succeeded,
    WandbInfo,
)
from halteres.trajectories.schema import (
    BatchQuery,
    BatchReference,
    EnvReference,
    EnvRegistration,
    GroupReference,
    GroupsRequest,
    LeaseRequest,
    PostHeaders,
    Registration,
    convert,
    refusal,
)
from halteres.trajectories.state import State
from halteres.trajectories.status import metrics_text
from halteres.trajectories.stores.store import GroupsQuery

KEY = "Idempotency-Key"

_KEY, _CLIENT = KEY.lower().encode(), CLIENT.encode()
_QUEUED = Verdict(place=Place.QUEUED)
_RECEIVED = reply(Received(status="received"))
"""What is answered to nearly every group; a response may be sent again."""

NO_BATCH = b'{"batch":null}'

NO_EXAMPLE = msgspec.json.encode(Example())

PAGE = 32 * 1024 * 1024
"""Bytes of elements on one page; one group is always on it."""

GONE = msgspec.Raw(b"null")


async def register_env(request: Request) -> Response:
    """POST /register-env: an environment, as soon as a trainer has asked for a batch."""
    service = service_of(request)
    record = await service.register_env(await body_of(request, EnvRegistration))
    run = service.state.run
    if record is None or run.registration is None:
        return reply(EnvWaits())
    return reply(
        EnvRegistered(
            env_id=record.id,
            wandb_name=record.name,
            checkpoint_dir=run.registration.checkpoint_dir,
            starting_step=run.step,
            checkpoint_interval=run.registration.save_checkpoint_interval,
            num_steps=run.registration.num_steps,
        )
    )


async def disconnect_env(request: Request) -> Response:
    """POST /disconnect-env: an environment ends; failures are 200 too."""
    env_id = (await body_of(request, EnvReference)).env_id
    known = await service_of(request).disconnect_env(env_id)
    return reply(Succeeded() if known else Failed(error=f"There is no environment {env_id}."))


async def status_env(request: Request) -> Response:
    """GET /status-env: the run's step, and what waits, for one environment; which one, a JSON body says."""
    asked = await body_of(request, EnvReference)
    answer = await service_of(request).status_env(asked.env_id, ours=is_ours(request), asked_for=asked.asked_for)
    return reply(answer)


class PostScoredData:
    """POST /scored_data: one group."""

    # An ASGI app: a `Request` would cost as much as the decision.
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        here: AppContext = scope["app"].state.context
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of two, the first
        key = _key_of(headers[_KEY]) if _KEY in headers else None
        async with here.bodies.of(scope, receive) as body:
            group = await posted_group.read(body, key)
            (verdict,) = await here.service.accept([group], ours=_CLIENT in headers)
        answer = _RECEIVED if verdict == _QUEUED else reply(_received(verdict))
        await answer(scope, receive, send)


async def scored_data_list(request: Request) -> Response:
    """POST /scored_data_list: all groups, or none if one does not fit the schema; at most 16,384."""
    if KEY in request.headers:
        raise refusal(msgspec.ValidationError("A list has none: give each group its own, halteres_key."), "header", KEY)
    async with context_of(request).bodies.of(request.scope, request.receive) as body:
        groups = await posted_group.read_list(body)
        verdicts = await service_of(request).accept(groups, ours=is_ours(request))
    buffered = [verdict for verdict in verdicts if verdict.place is Place.BUFFERED]
    return reply(
        ListReceived(
            status="received",
            groups_processed=len(verdicts),
            buffered=len(buffered) or UNSET,
            last_buffer_size=buffered[-1].buffered if buffered else UNSET,
            set_aside=[verdict.problem.why for verdict in verdicts if verdict.problem] or UNSET,
        )
    )


def _key_of(value: bytes) -> str | None:
    return convert({KEY: value.decode("latin-1")}, PostHeaders, "header").key


def _received(verdict: Verdict) -> Received | Buffered:
    if verdict.place is Place.BUFFERED:
        return Buffered(buffer_size=verdict.buffered)
    problem = verdict.problem
    return Received(status="received", set_aside=SetAside(problem.code, problem.why) if problem else UNSET)


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
        service.batch_replies.give_back(made)
        raise
    if query.lease is not None:  # acknowledged by the trainer, or back when its lease ends
        return whole
    return BatchReply(whole, request.is_disconnected, service.batch_replies, made)


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


async def root(request: Request) -> Response:
    """GET /: a greeting, as the original's."""
    return reply(Message("AtroposLib API"))


async def get_status(request: Request) -> Response:
    """GET /status: the run's step, and how many groups wait."""
    return reply(await service_of(request).status())


async def latest_example(request: Request) -> Response:
    """GET /latest_example: the group that entered the queue last."""
    return await replied(request, await service_of(request).latest_example() or NO_EXAMPLE)


async def diagnostics(request: Request) -> Response:
    """GET /v1/diagnostics: why there is no batch, in sentences."""
    return reply(service_of(request).diagnose())


async def get_metrics(request: Request) -> Response:
    """GET /metrics: counters and gauges for Prometheus."""
    return Response(metrics_text(service_of(request).state), media_type=MEDIA_TYPE)


async def groups(request: Request) -> Response:
    """GET /v1/groups: what became of posted groups, oldest first; ?bodies=1 with what the trainer gets of them."""
    wanted = query_of(request, GroupsRequest, "place")
    found = await service_of(request).groups(
        GroupsQuery(
            after=max(0, wanted.after),
            limit=wanted.limit + 1,  # one more tells whether there are more
            places=tuple(map(Place, wanted.place)),
            env_id=wanted.env_id,
            newest=wanted.newest,
        )
    )
    page = fitting(found, wanted)
    elements = await service_of(request).bodies_of([group.id for group in page]) if wanted.bodies and page else {}
    listed = [_group_reply(group, elements.get(group.id) if wanted.bodies else b"") for group in page]
    more = len(page) < len(found) and not wanted.newest
    return await replied(request, msgspec.json.encode(Groups(groups=listed, next=page[-1].id if more else None)))


async def group(request: Request) -> Response:
    """GET /v1/groups/{group_id}: one group, with its element while that is kept."""
    group_id = convert(dict(request.path_params), GroupReference, "path").group_id
    found = await service_of(request).groups(GroupsQuery(after=group_id - 1, limit=1)) if group_id > 0 else []
    if not found or found[0].id != group_id:
        raise NotFound(f"There is no group {group_id}.", "", "GET /v1/groups lists them.")
    element = (await service_of(request).bodies_of([group_id])).get(group_id)
    return await replied(request, msgspec.json.encode(_group_reply(found[0], element)))


def fitting(found: Sequence[GroupRecord], wanted: GroupsRequest, most: int = PAGE) -> list[GroupRecord]:
    """Those of the found ones that fit on the page: the first, or the last of the newest; the order stays."""
    within = list(found[-wanted.limit :] if wanted.newest else found[: wanted.limit])
    if not wanted.bodies:
        return within
    page, left = list[GroupRecord](), most
    for each in reversed(within) if wanted.newest else within:
        left -= each.num_bytes
        if left < 0 and page:
            break
        page.append(each)
    return page[::-1] if wanted.newest else page


def _group_reply(group: GroupRecord, element: bytes | None) -> Group:
    """Without an element where that is b"", with null where it is None."""
    return Group(
        id=group.id,
        env_id=group.env_id,
        size=group.size,
        num_bytes=group.num_bytes,
        received_at=group.received_at,
        place=group.place.value,
        policy_version=group.versions,
        reason=group.reason,
        why=group.why,
        batch_id=group.delivery,
        element=GONE if element is None else msgspec.Raw(element) if element else UNSET,
    )


async def openapi_json(request: Request) -> Response:
    """GET /openapi.json: this API for programs."""
    return Response(_description(), media_type="application/json")


async def docs_page(request: Request) -> Response:
    """GET /docs: this API for people."""
    return HTMLResponse(openapi.page(ROUTES))


@cache
def _description() -> bytes:
    return msgspec.json.encode(openapi.openapi(ROUTES))


def _post(path: str, endpoint: Endpoint | ASGIApp) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _get(path: str, endpoint: Endpoint) -> Route:
    """A route without the HEAD that Starlette adds: HEAD /batch would deliver a batch to nobody."""
    route = Route(path, endpoint, methods=["GET"])
    route.methods = {"GET"}
    return route


ROUTES = [  # looked through in this order: first what is asked for all the time
    _post("/scored_data", PostScoredData()),
    _get("/status-env", status_env),
    _get("/batch", batch),
    _post("/scored_data_list", scored_data_list),
    _get("/", root),
    _post("/register", register),
    _post("/register-env", register_env),
    _post("/disconnect-env", disconnect_env),
    _get("/wandb_info", wandb_info),
    _get("/info", info),
    _get("/latest_example", latest_example),
    _get("/status", get_status),
    _get("/reset_data", reset_data),
    _post("/v1/batches/{batch_id}/ack", acknowledge),
    _post("/v1/batches/{batch_id}/nack", nack),
    _post("/v1/batches/{batch_id}/extend", extend),
    _get("/v1/groups", groups),
    _get("/v1/groups/{group_id}", group),
    _get("/v1/diagnostics", diagnostics),
    _get("/metrics", get_metrics),
    _get("/openapi.json", openapi_json),
    _get("/docs", docs_page),
]
