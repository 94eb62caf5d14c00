"""The HTTP face: the app is a value.

Owns: which routes there are, and how errors are answered.
Never: opens or closes what is behind the routes.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from halteres.errors import HalteresError
from halteres.loopback import LocalOnly
from halteres.service.inference import Inference
from halteres.service.routes.answers import on_bug, on_error, on_missing
from halteres.service.routes.connection import ConnectionRoutes
from halteres.service.routes.inference import InferenceRoutes
from halteres.service.routes.promises import PromiseRoutes
from halteres.service.routes.records import RecordRoutes
from halteres.service.routes.sampling import SamplingRoutes
from halteres.service.routes.training import TrainingRoutes
from halteres.service.service import Service


def create_app(service: Service) -> Starlette:
    """The routes over an open service; those called most come first."""
    inference = Inference(
        base=service.base,
        tokenizer=service.tokenizer,
        journal=service.journal,
        checkpoints=service.checkpoints,
        snapshots=service.snapshots,
        samplers=service.samplers,
        samples=service.samples,
    )
    rooms = (
        PromiseRoutes(service),
        SamplingRoutes(service),
        InferenceRoutes(inference),
        TrainingRoutes(service),
        ConnectionRoutes(service),
        RecordRoutes(service),
    )
    return Starlette(
        routes=[route for room in rooms for route in room.table()],
        middleware=[Middleware(LocalOnly)],
        exception_handlers={HalteresError: on_error, HTTPException: on_missing, Exception: on_bug},
    )
