"""The trajectory server: its app over a store, and one socket that it answers on until it is told
to end.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.middleware import Middleware

from halteres.access_policy import AccessControl, AccessPolicy
from halteres.errors import InvalidConfig
from halteres.loopback import HOST, MOST_HEAD_BYTES, Server, url_of
from halteres.process import steady_time
from halteres.trajectories.diagnostics import status
from halteres.trajectories.http import HANDLERS, AppContext, Bodies, answer_to
from halteres.trajectories.options import Options
from halteres.trajectories.routes import ROUTES
from halteres.trajectories.service import TrajectoryService
from halteres.trajectories.stores.store import Store, StoreFailed

GRACE_S = 3  # how long requests may take to end after SIGTERM
KEEP_ALIVE_S = 75  # longer than the clients': who closes first leaves the other a broken request


def create_app(
    store: Store,
    clock: Callable[[], float] | None = None,
    on_loss: Callable[[StoreFailed], None] = lambda failure: None,
    *,
    options: Options | None = None,
    address: str = HOST,
    on_ready: Callable[[TrajectoryService], None] = lambda service: None,
) -> Starlette:
    """The app over a store. Its lifespan owns the turns; `app.state.service` is there from the
    start of it.

    Args:
        store: closed by its owner, after the app.
        clock: unix s; `clock_of` the store where none is given.
        on_loss: the store neither takes changes nor can be read: whoever owns the process ends it.
        options: rules, token, names, limits; where it listens is not the app's business.
        address: the IP address it is reached at, which decides whose requests are served.
        on_ready: the state was read.
    """
    chosen = options or Options(database="")

    async def take_turns(service: TrajectoryService) -> None:
        if (failure := await service.decisions.run()) is not None:
            on_loss(failure)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            service = app.state.service = TrajectoryService(
                store, clock or clock_of(store), chosen.rules
            )
        except StoreFailed as failure:
            on_loss(failure)
            raise
        app.state.context = AppContext(service, Bodies(largest=chosen.max_body), chosen.gzip)
        on_ready(service)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take_turns(service), name="turns")
            try:
                yield
            finally:
                service.decisions.stop()

    policy = AccessPolicy.of(address, chosen.token, chosen.allowed_hosts)
    access = Middleware(AccessControl, policy=policy, answer_to=answer_to)
    return Starlette(
        routes=ROUTES, lifespan=lifespan, middleware=[access], exception_handlers=HANDLERS
    )


def clock_of(store: Store) -> Callable[[], float]:
    """Unix s. One server's never jump. Those of several on one queue are compared with each other,
    so they are what the machines' clocks say: each server's own steady ones would part for good at
    the first correction.
    """
    return time.time if store.is_shared else steady_time


def open_store(options: Options) -> Store:
    """The database, made if it is missing.

    Raises:
        InvalidConfig: what it needs is not installed.
        Conflict, StoreFailed: it cannot be opened.
    """
    if options.is_shared:
        from halteres.trajectories.stores.postgres import PostgresStore

        return PostgresStore(options.database, durability=options.durability)
    if "://" in options.database:
        raise InvalidConfig(
            "--database names no database that is known: "
            f"'{options.database.partition('://')[0]}://'.",
            "A queue lies in an SQLite file, or in PostgreSQL.",
            "Name a file, or postgresql://USER@HOST/DATABASE.",
        )
    from halteres.trajectories.stores.sqlite import SqliteStore

    return SqliteStore(Path(options.database).expanduser(), durability=options.durability)


def serve(options: Options, listening: socket.socket) -> None:
    """Serve on a socket.

    Raises:
        InvalidConfig, Conflict, StoreFailed: the database cannot be opened.
        StoreFailed: it was lost on the way; whoever starts the process again finds what was
            acknowledged.
    """
    lost: list[StoreFailed] = []

    def end(failure: StoreFailed) -> None:
        lost.append(failure)
        server.end()

    def greet(service: TrajectoryService) -> None:
        run, waiting = service.state.run, status(service.state).queue_size
        trainer = f"step {run.step}" if run.registration else "no trainer yet"
        sys.stdout.write(
            f"The trajectory server answers on {url_of(listening)}: {waiting} groups wait, "
            f"{trainer}.\n"
        )
        sys.stdout.flush()

    def release() -> None:  # whoever is held is answered now
        if hasattr(app.state, "service"):  # it has begun
            app.state.service.decisions.release()

    with listening, closing(open_store(options)) as store:
        app = create_app(
            store, on_loss=end, options=options, address=listening.getsockname()[0], on_ready=greet
        )
        server = Server(_config(app), on_end=release)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve(sockets=[listening]))
        except SystemExit:  # uvicorn's, when the app does not start; ours says why
            if not lost:
                raise
    if lost:
        raise lost[0]


def _config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type] - an ASGI app
        http="h11",  # which bounds a request's head
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        ws="none",
        loop="none",
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        proxy_headers=False,  # whoever sends X-Forwarded-For would choose who it is
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
