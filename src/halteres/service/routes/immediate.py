"""Custom losses on the server, and a model that its client needs no more for now.

Source: tinker SDK 0.38.0, lib/public_interfaces/custom_loss.py; 0.3.0 to 0.22, resources/models.py, for unload_model.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.service.answers import answer, body_of
from halteres.service.durable.futures import (
    CREATE_LOSS,
    UNLOAD_MODEL,
    Outcome,
    loss_created,
    new_id,
    settled_at_once,
    unloaded,
)
from halteres.service.durable.journal import Entry
from halteres.service.service import Service
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire import bodies
from halteres.service.wire.codec import JSON, PROMPT_BYTES


class ImmediateRoutes:
    """Requests that are settled at once."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/create_custom_loss", self.create_custom_loss, methods=["POST"]),
            Route("/api/v1/unload_model", self.unload_model, methods=["POST"]),
        ]

    async def create_custom_loss(self, request: Request) -> Response:
        """POST create_custom_loss: what is wrong with the graph is its future's failure."""
        body, tenant = await body_of(request, PROMPT_BYTES), tenant_of(request)
        asked = await self._service.threads.run(tenant, len(body), lambda: bodies.read(body, bodies.CreateCustomLoss))
        session = self._service.sessions.find(asked.session_id, tenant)

        async def create() -> Outcome:
            seq, inputs = asked.custom_loss_seq_id, asked.inputs
            return loss_created(await self._service.losses.create(session.id, seq, asked.name, inputs, asked.graph))

        entry = Entry(
            id=new_id(),
            key=f"{session.id}:loss:{asked.custom_loss_seq_id}",
            kind=CREATE_LOSS,
            subject=session.id,
            tenant=session.tenant,
            seq=asked.custom_loss_seq_id,
            content_type=JSON,
            body=body,
        )
        future = await settled_at_once(self._service.futures, entry, create)
        return answer({"request_id": future.request_id})

    async def unload_model(self, request: Request) -> Response:
        """POST unload_model: its adapter leaves the engine, and comes back when it is asked for."""
        body = await body_of(request)
        model = self._service.models.find(bodies.read(body, bodies.ModelId).model_id, tenant_of(request))

        async def unload() -> Outcome:
            await self._service.adapters.unload(model)
            return unloaded(model.id)

        name = new_id()
        entry = Entry(
            id=name,
            key=f"{model.id}/unload/{name}",
            kind=UNLOAD_MODEL,
            subject=f"{model.id}/unload",
            tenant=model.tenant,
            seq=None,
            content_type=JSON,
            body=body,
        )
        future = await settled_at_once(self._service.futures, entry, unload)
        return answer({"request_id": future.request_id, "model_id": model.id})
