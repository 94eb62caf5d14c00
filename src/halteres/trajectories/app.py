"""The trajectory API as a Starlette app: every route of the original, and our extensions.

Owns: which path is whose, the life of the service.
Never: decides; `create_app` reads nothing and starts nothing until the server does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from halteres.access_policy import AccessControl, AccessPolicy
from halteres.loopback import HOST
from halteres.process import steady_time
from halteres.trajectories.options import Options
from halteres.trajectories.request_bodies import Bodies
from halteres.trajectories.routes import environments, groups, observation, trainer
from halteres.trajectories.routes.errors import HANDLERS, answer_to
from halteres.trajectories.routes.reach import Endpoint, Reach
from halteres.trajectories.service import TrajectoryService
from halteres.trajectories.stores.store import Store, StoreFailed
from halteres.trajectories.wire import openapi


def create_app(
    store: Store,
    clock: Callable[[], float] | None = None,
    on_loss: Callable[[StoreFailed], None] = lambda failure: None,
    *,
    options: Options | None = None,
    address: str = HOST,
    on_ready: Callable[[TrajectoryService], None] = lambda service: None,
) -> Starlette:
    """The app over a store. Its lifespan owns the turns; `app.state.service` is there from the start of it.

    Args:
        store: closed by its owner, after the app.
        clock: unix s; `clock_of` the store where none is given.
        on_loss: called when the store neither takes changes nor can be read: nothing can be promised any more, so
            whoever owns the process ends it.
        options: rules, token, names, limits; where it listens is not the app's business.
        address: the IP address it is reached at, which decides how careful the door is.
        on_ready: called when the state was read.
    """
    chosen = options or Options(database="")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            service = app.state.service = TrajectoryService(store, clock or clock_of(store), chosen.rules)
        except StoreFailed as failure:
            on_loss(failure)
            raise
        app.state.reach = Reach(service, Bodies(largest=chosen.max_body), chosen.gzip)
        on_ready(service)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_take_turns(service, on_loss), name="turns")
            try:
                yield
            finally:
                service.stop()

    policy = AccessPolicy.of(address, chosen.token, chosen.allowed_hosts)
    access = Middleware(AccessControl, policy=policy, answer_to=answer_to)
    return Starlette(routes=ROUTES, lifespan=lifespan, middleware=[access], exception_handlers=HANDLERS)


def clock_of(store: Store) -> Callable[[], float]:
    """Unix s. One server's never jump. Those of several on one queue are compared with each other, so they are what the
    machines' clocks say: each server's own steady ones would part for good at the first correction."""
    return time.time if store.is_shared else steady_time


def release(app: Starlette) -> None:
    """The app is to end: whoever is held is answered now."""
    if hasattr(app.state, "service"):  # it has begun
        app.state.service.release()


async def _take_turns(service: TrajectoryService, on_loss: Callable[[StoreFailed], None]) -> None:
    failure = await service.run()
    if failure is not None:
        on_loss(failure)


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
    _post("/scored_data", environments.ScoredData()),
    _get("/status-env", environments.status_env),
    _get("/batch", trainer.batch),
    _post("/scored_data_list", environments.scored_data_list),
    _get("/", observation.root),
    _post("/register", trainer.register),
    _post("/register-env", environments.register_env),
    _post("/disconnect-env", environments.disconnect_env),
    _get("/wandb_info", trainer.wandb_info),
    _get("/info", trainer.info),
    _get("/latest_example", observation.latest_example),
    _get("/status", observation.get_status),
    _get("/reset_data", trainer.reset_data),
    _post("/v1/batches/{batch_id}/ack", trainer.acknowledge),
    _post("/v1/batches/{batch_id}/nack", trainer.nack),
    _post("/v1/batches/{batch_id}/extend", trainer.extend),
    _get("/v1/groups", groups.groups),
    _get("/v1/groups/{group_id}", groups.group),
    _get("/v1/diagnostics", observation.diagnostics),
    _get("/metrics", observation.get_metrics),
    _get("/openapi.json", openapi_json),
    _get("/docs", docs_page),
]
