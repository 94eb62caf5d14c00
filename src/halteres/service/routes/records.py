"""What exists: training runs, checkpoints, sessions (the SDK's RestClient).

Source: tinker SDK 0.38.0, lib/public_interfaces/rest_client.py.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.errors import InvalidData, UserError
from halteres.service.checkpoints import Checkpoint
from halteres.service.models import Model
from halteres.service.routes.answers import answer, body_of
from halteres.service.service import Service
from halteres.service.wire import bodies

T = TypeVar("T")

_TYPES = {"weights": "training", "sampler_weights": "sampler"}
_RUN = "/api/v1/training_runs/{run_id}"

LATER = {
    "/api/v1/retrieve_futures": "Polling a whole sampling session",
    "/api/v1/cancel_future": "Cancelling a sample",
    "/api/v1/join_sampling_session": "Joining a sampling session",
    "/api/v1/create_custom_loss": "A custom loss on the server",
    "/api/v1/copy_weights": "Copying weights",
    "/api/v1/sessions/search": "Searching sessions",
    "/api/v1/forward": "The JSON forward call of SDKs before 0.25",
    "/api/v1/auth/token": "Exchanging keys for tokens",
    f"{_RUN}/checkpoints/{{kind}}/{{name}}": "Deleting a checkpoint",
    f"{_RUN}/checkpoints/{{kind}}/{{name}}/publish": "Publishing a checkpoint",
    f"{_RUN}/checkpoints/{{kind}}/{{name}}/ttl": "Changing a checkpoint's lifetime",
    f"{_RUN}/checkpoints/{{kind}}/{{name}}/external_weights_urls": "Downloading an export",
    f"{_RUN}/checkpoints/{{kind}}/{{name}}/archive": "Downloading an archive",
}
"""Routes of the API that are refused with a sentence until they are built."""


class RecordRoutes:
    """What a RestClient calls."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        methods = ["GET", "POST", "PUT", "DELETE"]
        return [
            Route("/api/v1/weights_info", self.weights_info, methods=["POST"]),
            Route("/api/v1/training_runs", self.training_runs),
            Route(_RUN, self.training_run),
            Route(f"{_RUN}/checkpoints", self.run_checkpoints),
            Route("/api/v1/checkpoints", self.checkpoints),
            Route("/api/v1/sessions", self.sessions),
            *(Route(path, self.later, methods=methods) for path in LATER),
            Route("/api/v1/sessions/{session_id}", self.session),
        ]

    async def weights_info(self, request: Request) -> Response:
        """POST weights_info."""
        found = self._service.checkpoints.find(bodies.read(await body_of(request), bodies.WeightsInfo).tinker_path)
        lora = found.lora
        return answer(
            {
                "base_model": found.base_model or self._service.base.name,
                "is_lora": True,
                "lora_rank": lora.rank,
                "train_unembed": lora.train_unembed,
                "train_mlp": lora.train_mlp,
                "train_attn": lora.train_attn,
            }
        )

    async def training_runs(self, request: Request) -> Response:
        """GET training_runs, newest first."""
        page, cursor = _page(self._service.models.all()[::-1], request)
        return answer({"training_runs": [self._run(model) for model in page], "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        """GET training_runs/{id}."""
        return answer(self._run(self._service.models.find(request.path_params["run_id"])))

    async def run_checkpoints(self, request: Request) -> Response:
        """GET training_runs/{id}/checkpoints."""
        model = self._service.models.find(request.path_params["run_id"])
        return answer({"checkpoints": [_checkpoint(found) for found in self._service.checkpoints.all(model.id)]})

    async def checkpoints(self, request: Request) -> Response:
        """GET checkpoints, newest first."""
        page, cursor = _page(self._service.checkpoints.all()[::-1], request)
        return answer({"checkpoints": [_checkpoint(found) for found in page], "cursor": cursor})

    async def sessions(self, request: Request) -> Response:
        """GET sessions, newest first."""
        page, _ = _page(self._service.sessions.all()[::-1], request)
        return answer({"sessions": [session.id for session in page]})

    async def session(self, request: Request) -> Response:
        """GET sessions/{id}."""
        session = self._service.sessions.find(request.path_params["session_id"])
        return answer(
            {
                "training_run_ids": [model.id for model in self._service.models.of_session(session.id)],
                "sampler_ids": self._service.samplers.of_session(session.id),
                "user_metadata": session.user_metadata,
            }
        )

    async def later(self, request: Request) -> Response:
        """A route that is not built yet."""
        what = LATER[request.scope["route"].path]
        raise UserError(f"{what} comes later.", "This service does not have it yet.", "See docs for what it has.")

    def _run(self, model: Model) -> dict[str, Any]:
        newest = {kind: self._service.checkpoints.newest(model.id, kind) for kind in ("weights", "sampler_weights")}
        return {
            "training_run_id": model.id,
            "base_model": model.base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": model.lora.rank if model.lora else None,
            "last_request_time": _time(model.last_request_at),
            "last_checkpoint": _checkpoint(newest["weights"]),
            "last_sampler_checkpoint": _checkpoint(newest["sampler_weights"]),
            "user_metadata": {name: str(value) for name, value in model.user_metadata.items()},
        }


def _checkpoint(found: Checkpoint | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "checkpoint_id": f"{found.path.kind}/{found.path.name}",
        "checkpoint_type": _TYPES[found.path.kind],
        "time": _time(found.created_at),
        "tinker_path": str(found.path),
        "size_bytes": found.size_bytes,
        "public": False,
        "user_metadata": found.user_metadata or None,
        "expires_at": None if found.expires_at is None else _time(found.expires_at),
    }


def _time(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()


def _page(items: Sequence[T], request: Request) -> tuple[Sequence[T], dict[str, int]]:
    try:
        limit = int(request.query_params.get("limit", 20))
        offset = int(request.query_params.get("offset", 0))
    except ValueError as error:
        raise InvalidData("limit and offset are numbers.") from error
    if limit < 0 or offset < 0:
        raise InvalidData("limit and offset are not negative.")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor
