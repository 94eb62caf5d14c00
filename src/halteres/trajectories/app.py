"""The trajectory API as a Starlette app: every route of the original, and our extensions.

Owns: which path is whose, the life of the service.
Never: decides; `create_app` reads nothing and starts nothing until the server does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from halteres.loopback import LocalOnly
from halteres.trajectories.routes import environments, observation, trainer
from halteres.trajectories.routes.errors import HANDLERS
from halteres.trajectories.service import TrajectoryService
from halteres.trajectories.stores.store import Store, StoreFailed
from halteres.trajectories.wire import openapi
from halteres.trajectories.wire.encoding import reply


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

    return Starlette(routes=ROUTES, lifespan=lifespan, middleware=[Middleware(LocalOnly)], exception_handlers=HANDLERS)


async def _write(service: TrajectoryService, on_loss: Callable[[StoreFailed], None]) -> None:
    failure = await service.writer.run()
    if failure is not None:
        on_loss(failure)


async def openapi_json(request: Request) -> Response:
    """GET /openapi.json: this API for programs."""
    return reply(openapi.openapi(ROUTES))


async def docs_page(request: Request) -> Response:
    """GET /docs: this API for people."""
    return HTMLResponse(openapi.page(ROUTES))


_post = partial(Route, methods=["POST"])


def _get(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    """A route without the HEAD that Starlette adds: HEAD /batch would deliver a batch to nobody."""
    route = Route(path, endpoint, methods=["GET"])
    route.methods = {"GET"}
    return route


ROUTES = [
    _get("/", observation.root),
    _post("/register", trainer.register),
    _post("/register-env", environments.register_env),
    _post("/disconnect-env", environments.disconnect_env),
    _get("/wandb_info", trainer.wandb_info),
    _get("/info", trainer.info),
    _get("/batch", trainer.batch),
    _get("/latest_example", observation.latest_example),
    _post("/scored_data", environments.scored_data),
    _post("/scored_data_list", environments.scored_data_list),
    _get("/status", observation.get_status),
    _get("/status-env", environments.status_env),
    _get("/reset_data", trainer.reset_data),
    _get("/v1/diagnostics", observation.diagnostics),
    _get("/openapi.json", openapi_json),
    _get("/docs", docs_page),
]
