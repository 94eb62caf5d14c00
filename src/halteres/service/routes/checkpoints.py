"""Checkpoints, for RestClient: listed, described, published, given a time to live, copied, deleted.

A copy is a checkpoint of its own, of the kind and name of its source, in a training run of its own without an adapter.
Source: tinker SDK 0.38.0, lib/public_interfaces/rest_client.py, resources/weights.py, resources/models.py; 0.3.0 for
the list of a model's checkpoints.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.engine.folders import copy_linked, size_of
from halteres.engine.protocol import Saved
from halteres.errors import Conflict, InvalidData
from halteres.service.answers import answer, body_of, page_of, timestamp
from halteres.service.checkpoints.paths import LOADABLE, TinkerPath, checked_ttl, end_of_life, refuse_token
from halteres.service.checkpoints.peft_folders import CARD
from halteres.service.checkpoints.store import Checkpoint
from halteres.service.models import Model, model_id_of, record
from halteres.service.service import Service
from halteres.service.sessions import Session
from halteres.service.tenancy.tenants import Tenant, tenant_of
from halteres.service.wire import bodies
from halteres.service.wire.bodies import CopyWeights

EXTERNAL_SINCE = (0, 28, 1)
"""The first tinker SDK that knows the checkpoint type "external"."""


def sdk_version(request: Request) -> tuple[int, ...] | None:
    """(0, 25, 0) of "AsyncTinker/Python 0.25.0"; None for other clients.

    Source: recorded traffic of tinker 0.9.0 to 0.38.0, header User-Agent.
    """
    found = re.match(r"AsyncTinker/Python (\d{1,6})\.(\d{1,6})\.(\d{1,6})", request.headers.get("user-agent", ""))
    return tuple(int(part) for part in found.groups()) if found else None


def listable(found: Sequence[Checkpoint], request: Request) -> Sequence[Checkpoint]:
    """Those that the asking SDK can read: before 0.28.1 one external checkpoint makes its whole list invalid."""
    version = sdk_version(request)
    if version is None or version >= EXTERNAL_SINCE:
        return found
    return [one for one in found if one.path.kind != "external_weights"]


class Copies:
    """Makes copies, one at a time: they are links, and take no time."""

    def __init__(self, service: Service) -> None:
        self._checkpoints, self._sessions, self._models = service.checkpoints, service.sessions, service.models
        self._journal, self._base = service.journal, service.base
        self._turn = asyncio.Lock()

    async def copy(self, asked: CopyWeights, tenant: Tenant, key: str | None) -> TinkerPath:
        """Copy weights that the tenant may read; returns the copy's path. Under the same idempotency key a repetition
        gets the first copy.

        Raises:
            NotFound: no such weights or session.
            InvalidData: no destination, or a time to live that is out of range.
            Conflict: the session's training run of that number is in use.
        """
        async with self._turn:
            made = self._checkpoints.outcome_of(f"copy/{key}", tenant) if key else None
            if made is not None:
                return made.path
            source = self._checkpoints.readable(asked.source_path, tenant)
            checked_ttl(asked.ttl_seconds)
            model = await self._destination(asked, tenant, source)
            return await self._linked(source, model, asked.ttl_seconds, f"copy/{key}" if key else None)

    async def _destination(self, asked: CopyWeights, tenant: Tenant, source: Checkpoint) -> Model:
        """The training run that is made for the copy."""
        if asked.session_id is not None and asked.model_seq_id is not None:
            session, seq = self._sessions.find(asked.session_id, tenant), asked.model_seq_id
        elif asked.destination_project_id is not None:
            session, seq = await self._session_of_project(asked.destination_project_id, tenant), 0
        else:
            raise InvalidData(
                "The copy has no destination.", next="Send destination_project_id, or session_id and model_seq_id."
            )
        model_id = model_id_of(session.id, seq)
        if self._models.of_id(model_id) is not None:
            raise Conflict(f"The training run {model_id} is in use.", next="Send a model_seq_id that is free.")
        metadata = {"copied_from": str(source.path)}
        base = source.base_model or self._base.name
        model = await self._models.add(model_id, session.id, tenant, base, metadata)
        model.lora = source.lora
        await record(self._journal, model)
        return model

    async def _session_of_project(self, project_id: str, tenant: Tenant) -> Session:
        session = await self._sessions.create(tenant, {}, ["copy_weights"], project_id)
        self._sessions.finish(session, "success")
        return session

    async def _linked(self, source: Checkpoint, model: Model, ttl_s: int | None, request_id: str | None) -> TinkerPath:
        path = self._checkpoints.place(
            model.id, source.path.kind, source.path.name, tenant=model.tenant, request_id=request_id
        )
        folder = self._checkpoints.folder(path)
        await asyncio.to_thread(copy_linked, source.folder, folder, leave_out=CARD)  # which names the source's path
        saved = Saved(folder=str(folder), size_bytes=size_of(folder), version=source.version)
        await self._checkpoints.add(
            path,
            saved,
            tenant=model.tenant,
            base_model=model.base_model,
            lora=source.lora,
            ttl_s=ttl_s,
            user_metadata=source.user_metadata,
            request_id=request_id,
        )
        return path


RUN = "/api/v1/training_runs/{run_id}"
CHECKPOINT = f"{RUN}/checkpoints/{{kind}}/{{name}}"

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class CheckpointRoutes:
    """What a RestClient asks of checkpoints."""

    def __init__(self, service: Service) -> None:
        self._service, self._checkpoints = service, service.checkpoints
        self._copies = Copies(service)

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/weights_info", self.weights_info, methods=["POST"]),
            Route("/api/v1/copy_weights", self.copy, methods=["POST"]),
            Route("/api/v1/checkpoints", self.checkpoints),
            Route(f"{RUN}/checkpoints", self.run_checkpoints),
            Route("/api/v1/models/{run_id}/checkpoints", self.run_checkpoints),
            Route(CHECKPOINT, self.delete, methods=["DELETE"]),
            Route(f"{CHECKPOINT}/publish", self.publish, methods=["POST"]),
            Route(f"{CHECKPOINT}/publish", self.unpublish, methods=["DELETE"]),
            Route(f"{CHECKPOINT}/ttl", self.set_ttl, methods=["PUT"]),
        ]

    async def weights_info(self, request: Request) -> Response:
        """POST weights_info."""
        asked = bodies.read(await body_of(request), bodies.WeightsInfo)
        found = self._checkpoints.readable(asked.tinker_path, tenant_of(request))
        lora = found.lora
        return answer(
            {
                "base_model": found.base_model or self._service.base.name,
                "optimizer_config": {"type": "adamw"},
                "is_lora": True,
                "lora_rank": lora.rank,
                "train_unembed": lora.train_unembed,
                "train_mlp": lora.train_mlp,
                "train_attn": lora.train_attn,
            }
        )

    async def run_checkpoints(self, request: Request) -> Response:
        """GET training_runs/{id}/checkpoints; weights that were put here belong to no training run of this service."""
        run, tenant = request.path_params["run_id"], tenant_of(request)
        await self._checkpoints.look_again()
        found = self._checkpoints.all(run, tenant)
        if not found:
            self._service.models.find(run, tenant)
        return answer({"checkpoints": [described(one) for one in listable(found, request)]})

    async def checkpoints(self, request: Request) -> Response:
        """GET checkpoints, newest first."""
        await self._checkpoints.look_again()
        page, cursor = page_of(listable(self._checkpoints.all(tenant=tenant_of(request))[::-1], request), request)
        return answer({"checkpoints": [described(found) for found in page], "cursor": cursor})

    async def copy(self, request: Request) -> Response:
        """POST copy_weights."""
        asked = bodies.read(await body_of(request), bodies.CopyWeights)
        refuse_token(request.headers.get("x-tinker-weights-access-token") or asked.weights_access_token)
        copy = await self._copies.copy(asked, tenant_of(request), request.headers.get("x-idempotency-key"))
        return answer({"tinker_path": str(copy)})

    async def delete(self, request: Request) -> Response:
        """DELETE a checkpoint."""
        await self._checkpoints.remove(self._own(request))
        return Response(status_code=204)

    async def publish(self, request: Request) -> Response:
        """POST …/publish: from now on everybody may load it; repeated, it changes nothing."""
        await self._checkpoints.change(self._own(request), public=True)
        return Response(status_code=204)

    async def unpublish(self, request: Request) -> Response:
        """DELETE …/publish."""
        await self._checkpoints.change(self._own(request), public=False)
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        """PUT …/ttl, counted from now."""
        asked = bodies.read(await body_of(request), bodies.Ttl)
        if isinstance(asked.ttl_seconds, msgspec.UnsetType):
            raise InvalidData("The body has no ttl_seconds.", next="Send seconds, or null for a checkpoint that stays.")
        expires_at = end_of_life(checked_ttl(asked.ttl_seconds), time.time())
        await self._checkpoints.change(self._own(request), expires_at=expires_at)
        return Response(status_code=204)

    def _own(self, request: Request) -> Checkpoint:
        return self._checkpoints.owned(path_in(request), tenant_of(request))


def path_in(request: Request) -> str:
    """The tinker:// path that a route's path names."""
    named = request.path_params
    return f"tinker://{named['run_id']}/{named['kind']}/{named['name']}"


def run_without_model(service: Service, run: str, tenant: Tenant) -> dict[str, Any] | None:
    """A training run that nothing is known of but its checkpoints, as the API tells it; None where there are none."""
    found = service.checkpoints.all(run, tenant)
    if not found:
        return None
    newest = {kind: service.checkpoints.newest(run, kind) for kind in LOADABLE}
    return {
        "training_run_id": run,
        "base_model": found[-1].base_model or service.base.name,
        "model_owner": tenant,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": found[-1].lora.rank,
        "last_request_time": timestamp(found[-1].created_at),
        "last_checkpoint": described(newest["weights"]),
        "last_sampler_checkpoint": described(newest["sampler_weights"]),
    }


def described(found: Checkpoint | None) -> dict[str, Any] | None:
    """A checkpoint as the API tells it; its metadata are texts there."""
    if found is None:
        return None
    return {
        "checkpoint_id": f"{found.path.kind}/{found.path.name}",
        "checkpoint_type": _TYPES[found.path.kind],
        "time": timestamp(found.created_at),
        "tinker_path": str(found.path),
        "size_bytes": found.size_bytes,
        "public": found.public,
        "user_metadata": {name: str(value) for name, value in found.user_metadata.items()} or None,
        "expires_at": None if found.expires_at is None else timestamp(found.expires_at),
    }
