"""Training: create_model, get_info, forward_backward, optim_step, saves and loads; custom losses; unload_model.

Every parseable request of a sequence is accepted, and whatever is wrong with it is its future's failure: a 4xx would
leave a gap that its client never fills.
Source: tinker SDK 0.38.0, lib/public_interfaces/training_client.py and custom_loss.py; 0.9.0 to 0.24.1 for the JSON
passes; 0.3.0 to 0.22, resources/models.py, for unload_model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from halteres.errors import HalteresError, InvalidData, NotFound
from halteres.losses import STABLE_REINFORCE
from halteres.service.answers import answer, body_of
from halteres.service.durable.futures import (
    CREATE_LOSS,
    UNLOAD_MODEL,
    Outcome,
    loss_created,
    settled_at_once,
    unloaded,
)
from halteres.service.durable.journal import Drawn, Entry, new_id
from halteres.service.models import Job, Model, model_id_of
from halteres.service.sampling.samples import drawn_seed
from halteres.service.service import Service
from halteres.service.tenancy.fair_queue import LONG
from halteres.service.tenancy.tenants import Tenant, tenant_of
from halteres.service.wire import bodies, codec, training
from halteres.service.wire.codec import PROMPT_BYTES
from halteres.service.wire.training import PASSES, Asked, Request, address_of, read_request

T = TypeVar("T")

STAND_IN = (
    f"The loss {STABLE_REINFORCE} is computed by a formula of Halteres's own (docs/training-service.md): the hosted"
    " service's is not public, and its results may differ."
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """A request of a training sequence as it came."""

    kind: str
    content_type: str
    body: bytes
    tenant: Tenant
    asked: Asked


class TrainingRoutes:
    """What a TrainingClient calls."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        handlers = {
            "forward_backward": self.run_pass,
            "forward": self.run_pass,
            "optim_step": self.numbered,
            "save_weights_for_sampler": self.numbered,
            "save_weights": self.numbered,
            "save_weights_external": self.numbered,
            "load_weights": self.load_weights,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "create_custom_loss": self.create_custom_loss,
            "unload_model": self.unload_model,
        }
        return [Route(f"/api/v1/{name}", handler, methods=["POST"]) for name, handler in handlers.items()]

    async def create_model(self, request: HttpRequest) -> Response:
        """POST create_model: the first request of its model, number 0."""
        posted = await self._read(request)
        asked = _of(bodies.CreateModel, posted)
        session = self._service.sessions.find(asked.session_id, posted.tenant)
        base = self._service.base.check(asked.base_model)
        drawn = {"seed": drawn_seed()} if asked.lora_config.seed is None else None
        model_id = model_id_of(session.id, asked.model_seq_id)
        self._service.refuse_model(session, model_id, asked.lora_config.rank)
        model = await self._service.models.add(model_id, session.id, session.tenant, base, asked.user_metadata)
        return await self._accept(posted, model, 0, drawn)

    async def load_weights(self, request: HttpRequest) -> Response:
        """POST load_weights: into a model, or making one."""
        posted = await self._read(request)
        asked = _of(bodies.LoadWeights, posted)
        if asked.model_id is not None and asked.seq_id is not None:
            return await self._accept(posted, self._service.models.find(asked.model_id, posted.tenant), asked.seq_id)
        if asked.session_id is not None and asked.model_seq_id is not None:
            return await self._accept(posted, await self._model_to_load(asked, posted.tenant), 0)
        raise InvalidData("The load names no model.", next="Send model_id and seq_id, or session_id and model_seq_id.")

    async def _model_to_load(self, asked: bodies.LoadWeights, tenant: Tenant) -> Model:
        session = self._service.sessions.find(asked.session_id or "", tenant)
        base = self._service.base.check(asked.base_model or self._base_of(asked.path, tenant))
        model_id = model_id_of(session.id, asked.model_seq_id or 0)
        self._service.refuse_model(session, model_id)
        return await self._service.models.add(model_id, session.id, tenant, base, asked.user_metadata)

    def _base_of(self, path: str, tenant: Tenant) -> str:
        """The base model as the checkpoint's own client knew it; a path without a checkpoint fails in its turn."""
        try:
            return self._service.checkpoints.find(path, tenant).base_model or self._service.base.name
        except HalteresError:
            return self._service.base.name

    async def run_pass(self, request: HttpRequest) -> Response:
        """POST forward_backward (protobuf, or JSON of SDKs before 0.25), forward (JSON)."""
        posted = await self._read(request)
        asked = _of(training.PassRequest, posted)
        model = self._service.models.find(asked.model_id, posted.tenant)
        response = await self._accept(posted, model, asked.seq_id)
        refused = self._service.options.refuse_stable_reinforce
        if asked.loss == STABLE_REINFORCE and not (refused or model.stand_in_announced):
            model.stand_in_announced = True
            log.warning("Training run %s: %s", model.id, STAND_IN)
            response.headers["x-deprecation-note"] = STAND_IN  # the one header that the SDK shows to its user
        return response

    async def numbered(self, request: HttpRequest) -> Response:
        """POST optim_step, save_weights, save_weights_for_sampler, save_weights_external."""
        posted = await self._read(request)
        asked = posted.asked
        assert isinstance(asked, bodies.OptimStep | bodies.SaveWeights)  # noqa: S101 - for the type checker
        model = self._service.models.find(asked.model_id, posted.tenant)
        return await self._accept(posted, model, asked.seq_id)

    async def get_info(self, request: HttpRequest) -> Response:
        """POST get_info."""
        asked = bodies.read(await body_of(request), bodies.ModelId)
        model = self._service.models.find(asked.model_id, tenant_of(request))
        if model.lora is None:
            raise NotFound(f"The training run {model.id} was never loaded.", next="Make a new training client.")
        data = {"model_name": model.base_model, "tokenizer_id": str(self._service.base.folder)}
        return answer(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_name": model.base_model,
                "is_lora": True,
                "lora_rank": model.lora.rank,
                "model_data": data,
            }
        )

    async def create_custom_loss(self, request: HttpRequest) -> Response:
        """POST create_custom_loss: what is wrong with the graph is its future's failure."""
        body, tenant = await body_of(request, PROMPT_BYTES), tenant_of(request)
        asked = await self._service.threads.run(tenant, len(body), lambda: bodies.read(body, bodies.CreateCustomLoss))
        session = self._service.sessions.find(asked.session_id, tenant)

        async def create() -> Outcome:
            losses, name = self._service.losses, asked.name
            return loss_created(await losses.create(session.id, seq, name, asked.inputs, asked.graph))

        key, seq = f"{session.id}:loss:{asked.custom_loss_seq_id}", asked.custom_loss_seq_id
        entry = Entry(key=key, kind=CREATE_LOSS, subject=session.id, tenant=tenant, seq=seq, body=body)
        future = await settled_at_once(self._service.futures, entry, create)
        return answer({"request_id": future.request_id})

    async def unload_model(self, request: HttpRequest) -> Response:
        """POST unload_model: its adapter leaves the engine, and comes back when it is asked for."""
        body = await body_of(request)
        model = self._service.models.find(bodies.read(body, bodies.ModelId).model_id, tenant_of(request))

        async def unload() -> Outcome:
            await self._service.adapters.unload(model)
            return unloaded(model.id)

        subject = f"{model.id}/unload"
        key = f"{subject}/{new_id()}"
        entry = Entry(key=key, kind=UNLOAD_MODEL, subject=subject, tenant=model.tenant, body=body)
        future = await settled_at_once(self._service.futures, entry, unload)
        return answer({"request_id": future.request_id, "model_id": model.id})

    async def _accept(self, posted: Posted, model: Model, seq: int, drawn: Drawn | None = None) -> Response:
        """Record a request and put it in its model's queue; a repetition gets the same future."""
        key = f"{model.id}/{seq}"
        if self._service.futures.known(key) is None:
            model.queue.refuse_if_full(seq)
            waiting = self._service.futures.open_bytes(model.tenant)
            limits = self._service.options.limits.of(model.tenant)
            limits.check_waiting(waiting, is_next=seq == model.queue.settled + 1)
        forward = isinstance(posted.asked, training.PassRequest) and posted.asked.forward_only
        entry = Entry(
            key=key,
            kind="forward" if forward else posted.kind,
            subject=model.id,
            tenant=model.tenant,
            seq=seq,
            content_type=posted.content_type,
            body=posted.body,
            drawn=drawn,
        )
        future, new = await self._service.futures.accept(entry)
        if new:
            asked = Request(id=entry.id, kind=entry.kind, seq=seq, asked=posted.asked, drawn=drawn or {})
            model.queue.put(Job(model, asked, future))
        return answer({"request_id": future.request_id, "model_id": model.id})

    async def _read(self, request: HttpRequest) -> Posted:
        """The request, by its path and content type; a number that can be read of a broken one is used up."""
        kind, tenant = request.url.path.rsplit("/", 1)[1], tenant_of(request)
        content_type = request.headers.get("content-type", codec.JSON).split(";")[0].strip()
        encoding, sent = request.headers.get("content-encoding"), await body_of(request, codec.MAX_BODY_BYTES)
        aside, plain, most = self._service.threads.run, b"", _most_bytes(kind, content_type)
        size = max(len(sent), LONG) if encoding == "zstd" else len(sent)  # few bytes of zstd may become very many
        try:
            plain = await aside(tenant, size, lambda: codec.decompressed(sent, encoding, most))
            asked = await aside(tenant, len(plain), lambda: read_request(kind, content_type, plain))
        except InvalidData:
            known = plain or await aside(tenant, size, lambda: codec.head_of(sent, encoding))
            address = await aside(tenant, len(known), lambda: address_of(kind, content_type, known))
            if address is not None:
                await self._service.models.burn(*address, tenant)
            raise
        return Posted(kind=kind, content_type=content_type, body=plain, tenant=tenant, asked=asked)


def _most_bytes(kind: str, content_type: str) -> int:
    """That a body may have."""
    if kind not in PASSES:
        return codec.SMALL_BYTES
    return codec.MAX_BODY_BYTES if content_type == codec.PROTOBUF else codec.MAX_JSON_BYTES


def _of(kind: type[T], posted: Posted) -> T:
    """What was posted, as its route's kind of request."""
    assert isinstance(posted.asked, kind)  # noqa: S101 - for the type checker
    return posted.asked
