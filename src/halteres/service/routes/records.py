"""What exists: training runs, sessions, what a tenant's checkpoints take (the SDK's RestClient and AdminClient).

Source: tinker SDK 0.38.0, lib/public_interfaces/rest_client.py and admin_client.py, types/session_search_request.py,
session_summary.py and session_status.py. `access_scope` changes nothing: a tenant has access to what it owns.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.process import steady_time
from halteres.service.answers import answer, body_of, page_of, texts, timestamp
from halteres.service.models import Model
from halteres.service.routes.checkpoints import described, run_without_model
from halteres.service.service import Service
from halteres.service.sessions import Session
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire import bodies
from halteres.service.wire.bodies import Search, StatusQuery

GIGABYTE = 10**9


NO_PROJECT = "default"
"""The project of a session that names none: a summary must name one."""


def _named(session: Session, asked: Search) -> bool:
    """By its id or by its name: with both, either will do; with neither, every session."""
    words = (asked.display_name or "").lower().split()
    name = (session.display_name or "").lower()
    by_name = bool(words) and all(word in name for word in words)
    return by_name or session.id == asked.session_id or (asked.session_id is None and not words)


def _stands(status: dict[str, Any] | None, query: StatusQuery) -> bool:
    if status is None or status["type"] != query.type:
        return False
    return query.reasons is None or query.type != "client_finished" or status["reason"]["type"] in query.reasons


def _place(session: Session) -> tuple[datetime.datetime, str]:
    """Where a session lies in the order of the pages."""
    return datetime.datetime.fromtimestamp(session.created_at, datetime.UTC), session.id


def _cursor(session: Session) -> dict[str, str]:
    return {"last_created_at": timestamp(session.created_at), "last_session_id": session.id}


class RecordRoutes:
    """What a RestClient and an AdminClient call."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/training_runs", self.training_runs),
            Route("/api/v1/training_runs/{run_id}", self.training_run),
            Route("/api/v1/sessions", self.sessions),
            Route("/api/v1/sessions/{session_id}", self.session),
            Route("/api/v1/audit", self.audit),
            Route("/api/v1/billing/usage/events", self.usage),
            Route("/api/v1/billing/usage/checkpoints/current", self.storage),
            Route("/api/v1/sessions/{session_id}/trace_export", self.trace),
            Route("/api/v1/sessions/search", self.search, methods=["POST"]),
            Route("/api/v1/sessions/{session_id}/project", self.move, methods=["PUT"]),
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
            model = self._service.models.of_id(found.path.run)
            by_project[None if model is None else self._project(model)].append(found.size_bytes)
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

    async def trace(self, request: Request) -> Response:
        """GET sessions/{id}/trace_export."""
        session = self._service.sessions.find(request.path_params["session_id"], tenant_of(request))
        why = (
            f"This service records no traces. What session {session.id} asked for, and when, is in the table 'requests'"
            f" of {self._service.state / 'journal.sqlite'}."
        )
        return answer({"status": "failed", "error": why})

    async def search(self, request: Request) -> Response:
        """POST sessions/search, newest first."""
        asked = bodies.read(await body_of(request), Search)
        known = self._service.sessions.all(tenant_of(request))
        found = [session for session in known if self._fits(session, asked)]
        found.sort(key=_place, reverse=True)
        page = found[: asked.limit]
        more = _cursor(page[-1]) if len(found) > len(page) else None
        return answer({"sessions": [self._summary(session) for session in page], "next_cursor": more})

    async def move(self, request: Request) -> Response:
        """PUT sessions/{id}/project."""
        asked = bodies.read(await body_of(request), bodies.Project)
        session = self._service.sessions.find(request.path_params["session_id"], tenant_of(request))
        self._service.sessions.move(session, asked.project_id)
        return Response(status_code=204)

    def _fits(self, session: Session, asked: Search) -> bool:
        metadata, owner, status = texts(session.user_metadata), asked.owner, self._status(session)
        before = asked.cursor
        return (
            _named(session, asked)
            and (asked.project_ids is None or (session.project_id or NO_PROJECT) in asked.project_ids)
            and all(metadata.get(name) == value for name, value in asked.user_metadata.items())
            and (owner.type != "user" or session.tenant in owner.owner_urns)
            and (asked.statuses is None or any(_stands(status, query) for query in asked.statuses))
            and (before is None or _place(session) < (before.last_created_at, before.last_session_id))
        )

    def _status(self, session: Session) -> dict[str, Any] | None:
        """None: it has not finished, and nothing was heard of its client for a while."""
        if session.finished is not None:
            return {"type": "client_finished", "reason": {"type": session.finished}}
        alive = steady_time() - session.last_seen < self._service.options.silent_s
        return {"type": "active"} if alive else None

    def _summary(self, session: Session) -> dict[str, Any]:
        runs = self._service.models.of_session(session.id)
        saved = [found for run in runs for found in self._service.checkpoints.all(run.id)]
        return {
            "session_id": session.id,
            "created_at": timestamp(session.created_at),
            "owner": session.tenant,
            "project_id": session.project_id or NO_PROJECT,
            "status": self._status(session),
            "checkpoints_count": len(saved),
            "checkpoint_storage_bytes": sum(found.size_bytes for found in saved),
            "display_name": session.display_name,
            "user_metadata": texts(session.user_metadata),
        }

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
