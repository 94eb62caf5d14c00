"""The books of a hosted service: audit, billing, traces. What is counted here is storage.

Source: tinker SDK 0.38.0, lib/public_interfaces/admin_client.py and rest_client.py.
"""

from __future__ import annotations

from collections import defaultdict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.service.answers import answer
from halteres.service.checkpoints.store import Checkpoint
from halteres.service.service import Service
from halteres.service.tenancy.tenants import tenant_of

GIGABYTE = 10**9


class BookRoutes:
    """What an AdminClient calls."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/audit", self.audit),
            Route("/api/v1/billing/usage/events", self.usage),
            Route("/api/v1/billing/usage/checkpoints/current", self.storage),
            Route("/api/v1/sessions/{session_id}/trace_export", self.trace),
        ]

    async def audit(self, _: Request) -> Response:
        """GET audit: nothing is audited."""
        return answer({"entries": []})

    async def usage(self, _: Request) -> Response:
        """GET billing/usage/events: nothing is billed."""
        return answer({"data": [], "sessions": {}})

    async def storage(self, request: Request) -> Response:
        """GET billing/usage/checkpoints/current: what a tenant's checkpoints take, by project."""
        tenant, wanted = tenant_of(request), request.query_params.get("project_id")
        by_project: defaultdict[str | None, list[int]] = defaultdict(list)
        for found in self._service.checkpoints.all(tenant=tenant):
            by_project[self._project_of(found)].append(found.size_bytes)
        data = [
            {
                "project_id": project,
                "user_name": tenant,
                "checkpoint_count": len(sizes),
                "size_bytes": sum(sizes),
                "size_gigabytes": sum(sizes) / GIGABYTE,
            }
            for project, sizes in by_project.items()
            if wanted in (None, project)
        ]
        return answer({"data": data})

    def _project_of(self, found: Checkpoint) -> str | None:
        model = self._service.models.of_id(found.path.run)
        return None if model is None else self._service.sessions.of_model(model.session_id).project_id

    async def trace(self, request: Request) -> Response:
        """GET sessions/{id}/trace_export."""
        session = self._service.sessions.find(request.path_params["session_id"], tenant_of(request))
        why = (
            f"This service records no traces. What session {session.id} asked for, and when, is in the table 'requests'"
            f" of {self._service.state / 'journal.sqlite'}."
        )
        return answer({"status": "failed", "error": why})
