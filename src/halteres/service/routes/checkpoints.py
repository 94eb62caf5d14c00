"""Checkpoints, for RestClient: listed, described, published, given a time to live, copied, deleted.

Source: tinker SDK 0.38.0, lib/public_interfaces/rest_client.py, resources/weights.py, resources/models.py; 0.3.0 for
the list of a model's checkpoints.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.errors import InvalidData
from halteres.service.answers import answer, body_of, page_of, timestamp
from halteres.service.checkpoints.copies import Copies
from halteres.service.checkpoints.lifetimes import checked_ttl, end_of_life
from halteres.service.checkpoints.paths import LOADABLE
from halteres.service.checkpoints.sharing import refuse_token
from halteres.service.checkpoints.store import Checkpoint
from halteres.service.routes.generations import listable
from halteres.service.service import Service
from halteres.service.tenancy.tenants import Tenant, tenant_of
from halteres.service.wire import bodies

RUN = "/api/v1/training_runs/{run_id}"
CHECKPOINT = f"{RUN}/checkpoints/{{kind}}/{{name}}"

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class CheckpointRoutes:
    """What a RestClient asks of checkpoints."""

    def __init__(self, service: Service) -> None:
        self._service, self._checkpoints = service, service.checkpoints
        self._copies = Copies(service.checkpoints, service.sessions, service.models, service.journal, service.base)

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
