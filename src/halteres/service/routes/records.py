"""What exists: training runs, sessions (the SDK's RestClient).

Source: tinker SDK 0.38.0, lib/public_interfaces/rest_client.py. `access_scope` changes nothing: a tenant has access to
what it owns.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.service.answers import answer, page_of, texts, timestamp
from halteres.service.models import Model
from halteres.service.routes.checkpoints import described, run_without_model
from halteres.service.service import Service
from halteres.service.tenancy.tenants import tenant_of


class RecordRoutes:
    """What a RestClient calls."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/training_runs", self.training_runs),
            Route("/api/v1/training_runs/{run_id}", self.training_run),
            Route("/api/v1/sessions", self.sessions),
            Route("/api/v1/sessions/{session_id}", self.session),
        ]

    async def training_runs(self, request: Request) -> Response:
        """GET training_runs, newest first; with `project_id` those of its sessions."""
        project = request.query_params.get("project_id")
        made = [run for run in self._service.models.all(tenant_of(request)) if run.lora is not None]
        runs = [run for run in made if project in (None, self._project(run))]
        page, cursor = page_of(runs[::-1], request)
        return answer({"training_runs": [self._run(model) for model in page], "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        """GET training_runs/{id}."""
        run, tenant = request.path_params["run_id"], tenant_of(request)
        if self._service.models.of_id(run) is None and (alone := run_without_model(self._service, run, tenant)):
            return answer(alone)
        return answer(self._run(self._service.models.find(run, tenant)))

    async def sessions(self, request: Request) -> Response:
        """GET sessions, newest first."""
        page, _ = page_of(self._service.sessions.all(tenant_of(request))[::-1], request)
        return answer({"sessions": [session.id for session in page]})

    async def session(self, request: Request) -> Response:
        """GET sessions/{id}."""
        session = self._service.sessions.find(request.path_params["session_id"], tenant_of(request))
        return answer(
            {
                "training_run_ids": [model.id for model in self._service.models.of_session(session.id)],
                "sampler_ids": list(self._service.samplers.of_session(session.id)),
                "user_metadata": texts(session.user_metadata),
                "display_name": session.display_name,
            }
        )

    def _project(self, model: Model) -> str | None:
        return self._service.sessions.of_model(model.session_id).project_id

    def _run(self, model: Model) -> dict[str, Any]:
        newest = {kind: self._service.checkpoints.newest(model.id, kind) for kind in ("weights", "sampler_weights")}
        return {
            "training_run_id": model.id,
            "base_model": model.base_model,
            "model_owner": model.tenant,
            "is_lora": True,
            "corrupted": False,
            "lora_rank": model.lora.rank if model.lora else None,
            "last_request_time": timestamp(model.last_request_at),
            "last_checkpoint": described(newest["weights"]),
            "last_sampler_checkpoint": described(newest["sampler_weights"]),
            "user_metadata": texts(model.user_metadata),
        }
