"""Training: create_model, get_info, forward_backward, optim_step, saves and loads.

Every parseable request of a sequence is accepted, and whatever is wrong with it is its promise's failure: a 4xx would
leave a gap that its client never fills.
Source: tinker SDK 0.38.0, lib/public_interfaces/training_client.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.engine.protocol import LoraConfig
from halteres.errors import HalteresError, InvalidData, NotFound
from halteres.service.journal import Drawn
from halteres.service.lanes import Job
from halteres.service.models import Model, model_id_of
from halteres.service.promises import Outcome, Promise
from halteres.service.routes.answers import answer, body_of
from halteres.service.sampling import drawn_seed
from halteres.service.service import Service
from halteres.service.wire import bodies, codec

T = TypeVar("T")


class TrainingRoutes:
    """What a TrainingClient calls."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._training = service.training

    def table(self) -> list[Route]:
        """The routes."""
        handlers = {
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "save_weights": self.save_weights,
            "save_weights_external": self.save_weights_external,
            "load_weights": self.load_weights,
            "create_model": self.create_model,
            "get_info": self.get_info,
        }
        return [Route(f"/api/v1/{name}", handler, methods=["POST"]) for name, handler in handlers.items()]

    async def create_model(self, request: Request) -> Response:
        """POST create_model: the first request of its model, number 0."""
        body = await body_of(request)
        asked = bodies.read(body, bodies.CreateModel)
        if asked.optimizer_config.type not in ("adamw", "adam"):
            raise InvalidData(f"There is no optimiser '{asked.optimizer_config.type}' here.", next="Use adamw.")
        session = self._service.sessions.find(asked.session_id)
        base = self._service.base.check(asked.base_model)
        drawn: dict[str, Any] = {"seed": drawn_seed()} if asked.lora_config.seed is None else {}
        lora = LoraConfig(**{**msgspec.structs.asdict(asked.lora_config), **drawn})
        model_id = model_id_of(session.id, asked.model_seq_id)
        model = await self._service.models.add(model_id, session.id, base, asked.user_metadata)
        return await self._accept(
            "create_model", model, 0, body, lambda: self._training.create(model, lora), drawn=drawn or None
        )

    async def load_weights(self, request: Request) -> Response:
        """POST load_weights: into a model, or making one."""
        body = await body_of(request)
        asked = await self._read(body, bodies.LoadWeights)
        if asked.model_id is not None and asked.seq_id is not None:
            model, seq = self._service.models.find(asked.model_id), asked.seq_id
        elif asked.session_id is not None and asked.model_seq_id is not None:
            model, seq = await self._model_to_load(asked.session_id, asked.model_seq_id, asked), 0
        else:
            raise InvalidData(
                "The load names no model.", next="Send model_id and seq_id, or session_id and model_seq_id."
            )
        return await self._accept("load_weights", model, seq, body, lambda: self._training.load(model, asked))

    async def _model_to_load(self, session_id: str, seq: int, asked: bodies.LoadWeights) -> Model:
        session = self._service.sessions.find(session_id)
        base = self._service.base.check(asked.base_model or self._base_of(asked.path))
        return await self._service.models.add(model_id_of(session.id, seq), session.id, base, asked.user_metadata)

    def _base_of(self, path: str) -> str:
        """The base model as the checkpoint's own client knew it; a path without a checkpoint fails in its turn."""
        try:
            return self._service.checkpoints.find(path).base_model or self._service.base.name
        except HalteresError:
            return self._service.base.name

    async def forward_backward(self, request: Request) -> Response:
        """POST forward_backward (protobuf)."""
        if request.headers.get("content-type", "").split(";")[0].strip() != codec.PROTOBUF:
            raise InvalidData(
                "The body of forward_backward is no protobuf.",
                "SDKs before 0.25 send JSON; they come later.",
                "Use tinker 0.38.",
            )
        body = codec.decompressed(await body_of(request), request.headers.get("content-encoding"))
        try:
            asked = codec.read_pass(body)
        except InvalidData:
            await self._burn(codec.address_of(body))
            raise
        model = self._service.models.find(asked.model_id)
        kind = "forward" if asked.forward_only else "forward_backward"
        run = lambda: self._training.forward_backward(model, asked)  # noqa: E731
        return await self._accept(kind, model, asked.seq_id, body, run, content_type=codec.PROTOBUF)

    async def optim_step(self, request: Request) -> Response:
        """POST optim_step."""
        body = await body_of(request)
        asked = await self._read(body, bodies.OptimStep)
        model = self._service.models.find(asked.model_id)
        return await self._accept(
            "optim_step", model, asked.seq_id, body, lambda: self._training.optim_step(model, asked)
        )

    async def save_weights(self, request: Request) -> Response:
        """POST save_weights."""
        return await self._save("save_weights", request, self._training.save)

    async def save_weights_for_sampler(self, request: Request) -> Response:
        """POST save_weights_for_sampler: named, or ephemeral with a sampling session of its own."""
        return await self._save("save_weights_for_sampler", request, self._training.publish)

    async def save_weights_external(self, request: Request) -> Response:
        """POST save_weights_external."""
        return await self._save("save_weights_external", request, self._training.save_external)

    async def _save(
        self, kind: str, request: Request, save: Callable[[Model, bodies.SaveWeights], Awaitable[Outcome]]
    ) -> Response:
        body = await body_of(request)
        asked = await self._read(body, bodies.SaveWeights)
        model = self._service.models.find(asked.model_id)
        return await self._accept(kind, model, asked.seq_id, body, lambda: save(model, asked))

    async def get_info(self, request: Request) -> Response:
        """POST get_info."""
        model = self._service.models.find(bodies.read(await body_of(request), bodies.ModelId).model_id)
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

    async def _accept(
        self,
        kind: str,
        model: Model,
        seq: int,
        body: bytes,
        run: Callable[[], Awaitable[Outcome]],
        *,
        content_type: str = codec.JSON,
        drawn: Drawn | None = None,
    ) -> Response:
        """Record a request and put it in its model's lane; a repetition gets the same promise."""
        model.lane.refuse_if_full()
        key = f"{model.id}/{seq}"
        promise, new = await self._service.promises.accept(
            kind, key, model.id, seq=seq, body=body, content_type=content_type, drawn=drawn
        )
        if new:
            model.lane.put(Job(seq, promise, run))
        return answer(_promised(promise, model))

    async def _read(self, body: bytes, kind: type[T]) -> T:
        try:
            return bodies.read(body, kind)
        except InvalidData:
            await self._burn(bodies.address_of(body))
            raise

    async def _burn(self, address: tuple[str, int] | None) -> None:
        if address is not None:
            await self._service.models.burn(*address)


def _promised(promise: Promise, model: Model) -> dict[str, str]:
    return {"request_id": promise.request_id, "model_id": model.id}
