"""The HTTP face: the app is a value.

Owns: which routes there are, and how errors are answered.
Never: opens or closes what is behind the routes.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from halteres.errors import HalteresError
from halteres.service.answers import on_bug, on_error, on_gone, on_missing
from halteres.service.inference.answering import Inference
from halteres.service.inference.http import Shutdown
from halteres.service.inference.routes import InferenceRoutes
from halteres.service.routes.access import AccessRoutes
from halteres.service.routes.books import BookRoutes
from halteres.service.routes.checkpoints import CheckpointRoutes
from halteres.service.routes.connection import ConnectionRoutes
from halteres.service.routes.downloads import DownloadRoutes
from halteres.service.routes.futures import FutureRoutes
from halteres.service.routes.guard import Guard, Meter
from halteres.service.routes.immediate import ImmediateRoutes
from halteres.service.routes.records import RecordRoutes
from halteres.service.routes.run_requests import CountRequests, RequestCounts
from halteres.service.routes.sampling import SamplingRoutes
from halteres.service.routes.searches import SearchRoutes
from halteres.service.routes.training import TrainingRoutes
from halteres.service.service import Service
from halteres.service.tenancy.keys import Keys


def create_app(service: Service, shutdown: Shutdown | None = None) -> Starlette:
    """The routes over an open service, those called most first; `shutdown` cuts answers short."""
    counts = RequestCounts()
    rooms = (
        FutureRoutes(service),
        SamplingRoutes(service),
        InferenceRoutes(Inference(service)),
        TrainingRoutes(service),
        ImmediateRoutes(service),
        ConnectionRoutes(service),
        AccessRoutes(service),
        CheckpointRoutes(service),
        DownloadRoutes(service),
        SearchRoutes(service),
        RecordRoutes(service),
        BookRoutes(service),
        counts,
    )
    keys = Keys(service.state, required=service.options.require_keys, own=service.options.own_key)
    app = Starlette(
        routes=[route for room in rooms for route in room.table()],
        middleware=[
            Middleware(CountRequests, counts=counts),
            Middleware(Guard, keys=keys, meter=Meter(service.options.limits)),
        ],
        exception_handlers={
            HalteresError: on_error,
            HTTPException: on_missing,
            ClientDisconnect: on_gone,
            Exception: on_bug,
        },
    )
    app.state.shutdown = shutdown or Shutdown()
    return app
