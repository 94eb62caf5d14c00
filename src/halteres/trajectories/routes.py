"""The routes: what each reads of a request, and the shape of its reply. The service decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from halteres.errors import NotFound
from halteres.observe.prometheus import MEDIA_TYPE
from halteres.trajectories import batches, openapi, posted_group, schema
from halteres.trajectories.diagnostics import metrics_text
from halteres.trajectories.http import (
    CLIENT,
    JSON,
    AppContext,
    body_of,
    large_reply,
    query_of,
    reply,
    service_of,
)
from halteres.trajectories.ingest import Verdict
from halteres.trajectories.openapi import Described
from halteres.trajectories.posted_group import ScoredData
from halteres.trajectories.records import Delivery, GroupRecord, Place
from halteres.trajectories.service import Batch, TrajectoryService
from halteres.trajectories.state import State

KEY = "Idempotency-Key"
NO_BATCH = b'{"batch":null}'
NO_EXAMPLE = msgspec.json.encode(schema.Example())
PAGE = 32 * 1024 * 1024  # bytes of elements on one page; one group is always on it
GONE = msgspec.Raw(b"null")
KEYED = {KEY: "Of this group, kept for its retries: the same key never counts twice."}
OURS = {
    "Halteres-Client": (
        "Any value: the client knows our extensions, and registers again when it is answered 410."
    )
}

_KEY, _CLIENT = KEY.lower().encode(), CLIENT.encode()
_QUEUED = Verdict(place=Place.QUEUED)
# to nearly every group; a response may be sent more than once
_RECEIVED = reply(schema.Received(status="received"))

T = TypeVar("T")

ROUTES: list[Described] = []


def _route(method: str, path: str, **takes: Any) -> Callable[[T], T]:
    """Enter an endpoint among the routes, with what it takes and replies."""

    def entered(endpoint: T) -> T:
        handler: Any = endpoint
        if isinstance(endpoint, type):
            handler = endpoint()
        ROUTES.append(Described(method, path, handler, **takes))
        return endpoint

    return entered


@_route(
    "POST",
    "/register-env",
    body=schema.EnvRegistration,
    answer=[schema.EnvRegistered, schema.EnvWaits],
)
async def register_env(request: Request) -> Response:
    """POST /register-env: an environment, as soon as a trainer has asked for a batch."""
    service = service_of(request)
    registration = await body_of(request, schema.EnvRegistration)
    record = await service.register_env(registration)
    run = service.state.run
    if record is None or run.registration is None:
        return reply(schema.EnvWaits())
    return reply(
        schema.EnvRegistered(
            env_id=record.id,
            wandb_name=record.name,
            checkpoint_dir=run.registration.checkpoint_dir,
            starting_step=run.step,
            checkpoint_interval=run.registration.save_checkpoint_interval,
            num_steps=run.registration.num_steps,
        )
    )


@_route(
    "POST", "/disconnect-env", body=schema.EnvReference, answer=[schema.Succeeded, schema.Failed]
)
async def disconnect_env(request: Request) -> Response:
    """POST /disconnect-env: an environment ends; failures are 200 too."""
    env_id = (await body_of(request, schema.EnvReference)).env_id
    is_known = await service_of(request).disconnect_env(env_id)
    if is_known:
        return reply(schema.Succeeded())
    return reply(schema.Failed(error=f"There is no environment {env_id}."))


@_route(
    "GET",
    "/status-env",
    body=schema.EnvReference,
    headers=OURS,
    answer=[schema.EnvStatus],
    statuses=(410,),
)
async def status_env(request: Request) -> Response:
    """GET /status-env: the run's step, and what waits, for one environment; which one, a JSON body
    says.
    """
    env = await body_of(request, schema.EnvReference)
    ours = CLIENT in request.headers  # it understands what the original never says
    return reply(
        await service_of(request).status_env(env.env_id, ours=ours, asked_for=env.asked_for)
    )


@_route(
    "POST",
    "/scored_data",
    body=ScoredData,
    headers=KEYED | OURS,
    answer=[schema.Received, schema.Buffered],
    statuses=(409, 410),
)
class PostScoredData:
    """POST /scored_data: one group."""

    # An ASGI app: a `Request` would cost as much as the decision.
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        here: AppContext = scope["app"].state.context
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of two, the first
        key = None
        if _KEY in headers:
            posted = {KEY: headers[_KEY].decode("latin-1")}
            key = schema.convert(posted, schema.PostHeaders, "header").key
        async with here.bodies.of(scope, receive) as body:
            group = await posted_group.read(body, key)
            (verdict,) = await here.service.accept([group], ours=_CLIENT in headers)
        if verdict == _QUEUED:
            answer = _RECEIVED
        elif verdict.place is Place.BUFFERED:
            answer = reply(schema.Buffered(buffer_size=verdict.buffered))
        else:
            answer = reply(schema.Received(status="received", set_aside=_reason(verdict)))
        await answer(scope, receive, send)


def _reason(verdict: Verdict) -> schema.SetAside | UnsetType:
    """Why a group was set aside, where it was."""
    if verdict.problem is None:
        return UNSET
    return schema.SetAside(verdict.problem.code, verdict.problem.why)


@_route(
    "POST",
    "/scored_data_list",
    body=list[ScoredData],
    headers=OURS,
    answer=[schema.ListReceived],
    statuses=(409, 410),
)
async def scored_data_list(request: Request) -> Response:
    """POST /scored_data_list: all groups, or none if one does not fit the schema; at most
    16,384.
    """
    if KEY in request.headers:
        raise schema.refusal(
            msgspec.ValidationError("A list has none: give each group its own, halteres_key."),
            "header",
            KEY,
        )
    async with request.app.state.context.bodies.of(request.scope, request.receive) as body:
        groups = await posted_group.read_list(body)
        verdicts = await service_of(request).accept(groups, ours=CLIENT in request.headers)
    buffered = [verdict.buffered for verdict in verdicts if verdict.place is Place.BUFFERED]
    last_buffer_size = UNSET
    if buffered:
        last_buffer_size = buffered[-1]
    return reply(
        schema.ListReceived(
            status="received",
            groups_processed=len(verdicts),
            buffered=len(buffered) or UNSET,
            last_buffer_size=last_buffer_size,
            set_aside=[verdict.problem.why for verdict in verdicts if verdict.problem] or UNSET,
        )
    )


@_route("POST", "/register", body=schema.Registration, answer=[schema.Registered])
async def register(request: Request) -> Response:
    """POST /register: a trainer begins a run, or goes on with its own."""
    registration = (await body_of(request, schema.Registration)).checked()
    decisions = service_of(request).decisions
    return reply(
        schema.Registered(
            uuid=await decisions.submit(lambda state: batches.register(state, registration))
        )
    )


@_route("GET", "/wandb_info", answer=[schema.WandbInfo])
async def wandb_info(request: Request) -> Response:
    """GET /wandb_info: group and project that the trainer registered; null before."""
    registration = await service_of(request).registration()
    if registration is None:
        return reply(schema.WandbInfo())
    return reply(
        schema.WandbInfo(group=registration.wandb_group, project=registration.wandb_project)
    )


@_route("GET", "/info", answer=[schema.Info])
async def info(request: Request) -> Response:
    """GET /info: sequences of a batch, tokens of the longest sequence, as the trainer registered
    them; -1 before.
    """
    registration = await service_of(request).registration()
    if registration is None:
        return reply(schema.Info())
    return reply(
        schema.Info(batch_size=registration.batch_size, max_token_len=registration.max_token_len)
    )


@_route("GET", "/batch", query=schema.BatchQuery, answer=[schema.BatchAnswer, schema.NotRegistered])
async def batch(request: Request) -> Response:
    """GET /batch: exactly batch_size sequences, or null. Ours: ?lease, ?policy_version, ?after,
    ?wait.
    """
    query = query_of(request, schema.BatchQuery)
    service = service_of(request)
    made = None
    if await service.registration():
        made = await service.batch(query, request.is_disconnected)
    registration = service.state.run.registration
    if made is None and registration is None:
        return reply(schema.NotRegistered())
    if made is None:
        return Response(NO_BATCH, media_type=JSON)
    # The elements are JSON already.
    body = b'{"batch":[' + b",".join(made.elements) + b"]"
    if query.extended:
        body += b"," + msgspec.json.encode(_batch_tail(made, query, service.state))[1:]
    else:
        body += b"}"
    try:
        whole = await large_reply(request, body)
    except BaseException:
        service.give_back(made.delivery)
        raise
    if query.lease is not None:
        # Acknowledged by the trainer, or back when its lease ends.
        return whole
    return _PlainBatch(whole, request, service, made.delivery)


def _batch_tail(made: Batch, query: schema.BatchQuery, state: State) -> schema.BatchTail:
    """What our own clients get next to a batch: until when it is leased, else its step."""
    registration = state.run.registration
    run_id = ""
    if registration is not None and registration.run_id is not None:
        run_id = registration.run_id
    step, lease_expires = made.step, UNSET
    expires_at = made.delivery.expires_at
    if query.lease is not None and expires_at is not None:
        step, lease_expires = UNSET, expires_at
    return schema.BatchTail(
        batch_id=made.delivery.id,
        step=step,
        lease_expires=lease_expires,
        num_stale=state.set_aside["stale"],
        run_id=run_id,
    )


class _PlainBatch(Response):
    """The reply of a batch without a lease, and how it is known to have arrived.

        everything but the last byte ──▶ is the client there, the batch still its own? ──▶ the last
                                             byte ──▶ counted │ no ▼ given back: it answers the next
                                             question

    A client that left before the last byte cannot have the batch. One that got it is served it
    again only where the server dies, or the store fails, in the instant between the last byte and
    the count; leases close that gap.
    """

    def __init__(
        self, whole: Response, request: Request, service: TrajectoryService, batch: Delivery
    ) -> None:
        self.status_code, self.background = whole.status_code, None
        self.body, self.raw_headers = whole.body, whole.raw_headers
        self._gone, self._service, self._batch = request.is_disconnected, service, batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it."""
        written = False
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await send(
                {
                    "type": "http.response.body",
                    "body": memoryview(self.body)[:-1],
                    "more_body": True,
                }
            )
            # waits until the rest is sent
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            if await self._gone() or not await self._service.is_out(self._batch):
                return
            with self._service.handing_over():
                await send(
                    {"type": "http.response.body", "body": self.body[-1:], "more_body": False}
                )
                written = True
                await self._service.count(self._batch)
        finally:
            if not written:
                self._service.give_back(self._batch)


@_route(
    "POST",
    "/v1/batches/{batch_id}/ack",
    in_path=schema.BatchReference,
    answer=[schema.Settled],
    statuses=(404, 409),
)
async def acknowledge(request: Request) -> Response:
    """POST /v1/batches/{batch_id}/ack: a leased batch is the trainer's for good."""
    service, batch_id = service_of(request), _batch_id(request)
    long_ago = None
    if batch_id not in service.state.out and batch_id not in service.state.settled:
        long_ago = await asyncio.to_thread(service.store.delivery, batch_id)
    return await _settled(
        request, lambda state, batch_id: batches.acknowledge(state, batch_id, long_ago)
    )


@_route(
    "POST",
    "/v1/batches/{batch_id}/nack",
    in_path=schema.BatchReference,
    answer=[schema.Settled],
    statuses=(404, 409),
)
async def nack(request: Request) -> Response:
    """POST /v1/batches/{batch_id}/nack: a leased batch goes back; it answers the next question."""
    return await _settled(request, batches.nack)


@_route(
    "POST",
    "/v1/batches/{batch_id}/extend",
    in_path=schema.BatchReference,
    query=schema.LeaseRequest,
    body=schema.LeaseRequest,
    needs_body=False,
    answer=[schema.Settled],
    statuses=(404, 409),
)
async def extend(request: Request) -> Response:
    """POST /v1/batches/{batch_id}/extend: the lease ends so many seconds from now."""
    if "lease" in request.query_params:
        until = query_of(request, schema.LeaseRequest)
    else:
        until = await body_of(request, schema.LeaseRequest)
    return await _settled(
        request, lambda state, batch_id: batches.extend(state, batch_id, until.lease)
    )


@_route("GET", "/reset_data", media_type="text/plain")
async def reset_data(request: Request) -> Response:
    """GET /reset_data: forget the run; its groups are archived."""
    await service_of(request).decisions.submit(batches.reset)
    return PlainTextResponse("Reset successful")


def _batch_id(request: Request) -> int:
    return schema.convert(dict(request.path_params), schema.BatchReference, "path").batch_id


async def _settled(request: Request, settle: Callable[[State, int], Delivery]) -> Response:
    batch_id = _batch_id(request)
    delivery = await service_of(request).decisions.submit(lambda state: settle(state, batch_id))
    step = lease_expires = UNSET
    if delivery.step is not None:
        step = delivery.step
    if delivery.expires_at is not None:
        lease_expires = delivery.expires_at
    return reply(
        schema.Settled(
            batch_id=delivery.id,
            standing=delivery.standing.value,  # type: ignore[arg-type] - a batch just settled has no other
            step=step,
            lease_expires=lease_expires,
        )
    )


@_route("GET", "/", answer=[schema.Message])
async def root(request: Request) -> Response:
    """GET /: a greeting, as the original's."""
    return reply(schema.Message("AtroposLib API"))


@_route("GET", "/status", answer=[schema.Status])
async def get_status(request: Request) -> Response:
    """GET /status: the run's step, and how many groups wait."""
    return reply(await service_of(request).status())


@_route("GET", "/latest_example", answer=[schema.Example])
async def latest_example(request: Request) -> Response:
    """GET /latest_example: the group that entered the queue last."""
    body = await asyncio.to_thread(service_of(request).store.latest_body)
    return await large_reply(request, body or NO_EXAMPLE)


@_route("GET", "/v1/diagnostics", answer=[schema.Diagnostics])
async def diagnostics(request: Request) -> Response:
    """GET /v1/diagnostics: why there is no batch, in sentences."""
    return reply(service_of(request).diagnose())


@_route("GET", "/metrics", media_type="text/plain")
async def get_metrics(request: Request) -> Response:
    """GET /metrics: counters and gauges for Prometheus."""
    return Response(metrics_text(service_of(request).state), media_type=MEDIA_TYPE)


@_route("GET", "/v1/groups", query=schema.GroupsRequest, answer=[schema.Groups])
async def groups(request: Request) -> Response:
    """GET /v1/groups: what became of posted groups, oldest first; ?bodies=1 with what the trainer
    gets of them.
    """
    query = query_of(request, schema.GroupsRequest, "place")
    store = service_of(request).store
    # One more than is asked for tells whether there are more.
    one_more = msgspec.structs.replace(query, limit=query.limit + 1)
    found = await asyncio.to_thread(store.groups, one_more)
    page = page_of(found, query)
    listed = [_group_reply(group) for group in page]
    if query.bodies and page:
        elements = await asyncio.to_thread(store.bodies, [group.id for group in page])
        listed = [_group_reply(group, _element(elements.get(group.id))) for group in page]
    following = None
    if len(page) < len(found) and not query.newest:
        following = page[-1].id
    answer = schema.Groups(groups=listed, next=following)
    return await large_reply(request, msgspec.json.encode(answer))


@_route(
    "GET",
    "/v1/groups/{group_id}",
    in_path=schema.GroupReference,
    answer=[schema.Group],
    statuses=(404,),
)
async def group(request: Request) -> Response:
    """GET /v1/groups/{group_id}: one group, with its element while that is kept."""
    group_id = schema.convert(dict(request.path_params), schema.GroupReference, "path").group_id
    store = service_of(request).store
    found: list[GroupRecord] = []
    if group_id > 0:
        query = schema.GroupsRequest(after=group_id - 1, limit=1)
        found = await asyncio.to_thread(store.groups, query)
    if not found or found[0].id != group_id:
        raise NotFound(f"There is no group {group_id}.", "", "GET /v1/groups lists them.")
    elements = await asyncio.to_thread(store.bodies, [group_id])
    answer = _group_reply(found[0], _element(elements.get(group_id)))
    return await large_reply(request, msgspec.json.encode(answer))


def page_of(
    found: Sequence[GroupRecord], query: schema.GroupsRequest, most: int = PAGE
) -> list[GroupRecord]:
    """Those of the found ones that fit on the page: the first, or the last of the newest; the order
    stays.
    """
    if query.newest:
        # From the newest on, since those are to be on the page.
        return list(reversed(_within(found[: -query.limit - 1 : -1], query, most)))
    return _within(found[: query.limit], query, most)


def _within(
    groups: Sequence[GroupRecord], query: schema.GroupsRequest, most: int
) -> list[GroupRecord]:
    """The first groups, whose elements have at most so many bytes together; at least one."""
    if not query.bodies:
        return list(groups)
    page: list[GroupRecord] = []
    left = most
    for group in groups:
        left -= group.num_bytes
        if left < 0 and page:
            break
        page.append(group)
    return page


def _element(body: bytes | None) -> msgspec.Raw:
    """A group's element as its reply has it: null where it is not kept any more."""
    if body is None:
        return GONE
    return msgspec.Raw(body)


def _group_reply(group: GroupRecord, element: msgspec.Raw | UnsetType = UNSET) -> schema.Group:
    return schema.Group(
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
        element=element,
    )


@_route("GET", "/openapi.json", answer=[dict[str, Any]])
async def openapi_json(request: Request) -> Response:
    """GET /openapi.json: this API for programs."""
    return Response(_openapi(), media_type=JSON)


@_route("GET", "/docs", media_type="text/html")
async def docs_page(request: Request) -> Response:
    """GET /docs: this API for people."""
    return HTMLResponse(openapi.page(ROUTES))


@cache
def _openapi() -> bytes:
    return msgspec.json.encode(openapi.openapi(ROUTES))
