"""The trajectory API as a Starlette app: every route of the original, and our extensions.

Owns: routes, the shapes of their replies; a batch whose reply was not written whole is given back.
Never: decides; `create_app` reads nothing and starts nothing until the server does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from halteres.errors import HalteresError, NotFound, as_atropos, as_http
from halteres.loopback import LocalOnly
from halteres.trajectories import docs, scored
from halteres.trajectories.encoding import LARGE, BadBody, large_reply, read_body, reply
from halteres.trajectories.handover import BatchReply
from halteres.trajectories.intake import Verdict
from halteres.trajectories.records import Place
from halteres.trajectories.schema import (
    BatchQuery,
    EnvReference,
    EnvRegistration,
    Registration,
    Unprocessable,
    convert,
    decode,
)
from halteres.trajectories.service import TrajectoryService
from halteres.trajectories.status import status
from halteres.trajectories.store import Store, StoreFailed

NOT_REGISTERED: dict[str, Any] = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}
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


def create_app(
    store: Store,
    clock: Callable[[], float] = time.time,
    on_loss: Callable[[StoreFailed], None] = lambda failure: None,
) -> Starlette:
    """The app over a store. Its lifespan owns the writer; `app.state.service` is there from the start of it.

    `on_loss` is called when the store neither takes changes nor can be read: nothing can be promised any more, so
    whoever owns the process ends it.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            service = app.state.service = TrajectoryService(store, clock)
        except StoreFailed as failure:
            on_loss(failure)
            raise
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_write(service, on_loss), name="writer")
            try:
                yield
            finally:
                service.writer.stop()

    handlers: Mapping[Any, Any] = {
        BadBody: _as_text,
        Unprocessable: _as_detail,
        HalteresError: _as_error,
        HTTPException: _as_http_error,
        RecursionError: _as_too_deep,
    }
    return Starlette(routes=ROUTES, lifespan=lifespan, middleware=[Middleware(LocalOnly)], exception_handlers=handlers)


async def _write(service: TrajectoryService, on_loss: Callable[[StoreFailed], None]) -> None:
    failure = await service.writer.run()
    if failure is not None:
        on_loss(failure)


def _service(request: Request) -> TrajectoryService:
    return request.app.state.service


# -- the trainer's routes ----------------------------------------------------------------------------------------------


async def root(request: Request) -> Response:
    """GET /"""
    return reply({"message": "AtroposLib API"})


async def register(request: Request) -> Response:
    """POST /register: a trainer."""
    registration = decode(await read_body(request), Registration).checked()
    return reply({"uuid": await _service(request).register(registration)})


async def wandb_info(request: Request) -> Response:
    """GET /wandb_info"""
    registration = _service(request).state.run.registration
    if registration is None:
        return reply({"group": None, "project": None})
    return reply({"group": registration.wandb_group, "project": registration.wandb_project})


async def info(request: Request) -> Response:
    """GET /info"""
    registration = _service(request).state.run.registration
    if registration is None:
        return reply({"batch_size": -1, "max_token_len": -1})
    return reply({"batch_size": registration.batch_size, "max_token_len": registration.max_token_len})


async def batch(request: Request) -> Response:
    """GET /batch: exactly batch_size sequences, or null. Ours: ?policy_version, ?after, ?wait."""
    query = convert(dict(request.query_params), BatchQuery, "query")
    service = _service(request)
    if service.state.run.registration is None:
        return reply(NOT_REGISTERED)
    made = await service.batch(query, request.is_disconnected)
    if made is None:
        return reply({"batch": None} if service.state.run.registration else NOT_REGISTERED)
    tail = b',"batch_id":%d,"step":%d}' % (made.delivery.id, made.delivery.step) if query.extended else b"}"
    body = b'{"batch":[' + b",".join(made.elements or ()) + b"]" + tail
    return BatchReply(await large_reply(request, body), request.is_disconnected, lambda: service.give_back(made))


async def latest_example(request: Request) -> Response:
    """GET /latest_example"""
    body = await _service(request).latest_example()
    return await large_reply(request, body if body is not None else msgspec.json.encode(NO_EXAMPLE))


async def reset_data(request: Request) -> Response:
    """GET /reset_data"""
    await _service(request).reset()
    return PlainTextResponse("Reset successful")


# -- the environments' routes ------------------------------------------------------------------------------------------


async def register_env(request: Request) -> Response:
    """POST /register-env"""
    service = _service(request)
    record = await service.register_env(decode(await read_body(request), EnvRegistration))
    run = service.state.run
    if record is None or run.registration is None:
        return reply({"status": "wait for trainer to start"})
    return reply(
        {
            "status": "success",
            "env_id": record.id,
            "wandb_name": record.name,
            "checkpoint_dir": run.registration.checkpoint_dir,
            "starting_step": run.step,
            "checkpoint_interval": run.registration.save_checkpoint_interval,
            "num_steps": run.registration.num_steps,
        }
    )


async def disconnect_env(request: Request) -> Response:
    """POST /disconnect-env: failures are 200 too."""
    env_id = decode(await read_body(request), EnvReference).env_id
    if await _service(request).disconnect_env(env_id):
        return reply({"status": "success"})
    return reply(as_atropos(NotFound(f"There is no environment {env_id}.")))


async def scored_data(request: Request) -> Response:
    """POST /scored_data"""
    body = await read_body(request)
    key = request.headers.get("idempotency-key")
    group = await asyncio.to_thread(scored.parse, body, key) if len(body) > LARGE else scored.parse(body, key)
    (verdict,) = await _service(request).accept([group])
    return reply(_received(verdict))


async def scored_data_list(request: Request) -> Response:
    """POST /scored_data_list: all groups, or none if one does not fit the schema."""
    groups = await asyncio.to_thread(scored.parse_list, await read_body(request))
    verdicts = await _service(request).accept(groups)
    buffered = [verdict for verdict in verdicts if verdict.place is Place.BUFFERED]
    aside = [verdict.problem.why for verdict in verdicts if verdict.problem]
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(verdicts)}
    if buffered:
        answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1].buffered}
    return reply(answer | ({"set_aside": aside} if aside else {}))


def _received(verdict: Verdict) -> dict[str, Any]:
    if verdict.place is Place.BUFFERED:
        return {"status": "buffered", "buffer_size": verdict.buffered}
    problem = verdict.problem
    return {"status": "received"} | ({"set_aside": {"code": problem.code, "why": problem.why}} if problem else {})


async def get_status(request: Request) -> Response:
    """GET /status"""
    return reply(status(_service(request).state))


async def status_env(request: Request) -> Response:
    """GET /status-env, with a JSON body."""
    env_id = decode(await read_body(request), EnvReference).env_id
    return reply(await _service(request).status_env(env_id))


async def diagnostics(request: Request) -> Response:
    """GET /v1/diagnostics: why there is no batch, in sentences."""
    return reply(_service(request).diagnose())


async def openapi_json(request: Request) -> Response:
    """GET /openapi.json: this API for programs."""
    return reply(docs.openapi(ROUTES))


async def docs_page(request: Request) -> Response:
    """GET /docs: this API for people."""
    return HTMLResponse(docs.page(ROUTES))


# -- errors ------------------------------------------------------------------------------------------------------------


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


_post = partial(Route, methods=["POST"])


def _get(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    """A route without the HEAD that Starlette adds: HEAD /batch would deliver a batch to nobody."""
    route = Route(path, endpoint, methods=["GET"])
    route.methods = {"GET"}
    return route


ROUTES = [
    _get("/", root),
    _post("/register", register),
    _post("/register-env", register_env),
    _post("/disconnect-env", disconnect_env),
    _get("/wandb_info", wandb_info),
    _get("/info", info),
    _get("/batch", batch),
    _get("/latest_example", latest_example),
    _post("/scored_data", scored_data),
    _post("/scored_data_list", scored_data_list),
    _get("/status", get_status),
    _get("/status-env", status_env),
    _get("/reset_data", reset_data),
    _get("/v1/diagnostics", diagnostics),
    _get("/openapi.json", openapi_json),
    _get("/docs", docs_page),
]
