"""Searching sessions, and moving them between projects.

Source: tinker SDK 0.38.0, types/session_search_request.py, session_summary.py and session_status.py.
"""

from __future__ import annotations

import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.process import steady_time
from halteres.service.answers import answer, body_of, texts, timestamp
from halteres.service.service import Service
from halteres.service.sessions import Session
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire import bodies
from halteres.service.wire.bodies import Search, StatusQuery

NO_PROJECT = "default"
"""The project of a session that names none: a summary must name one."""


class SearchRoutes:
    """What a RestClient calls to find a session again."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/sessions/search", self.search, methods=["POST"]),
            Route("/api/v1/sessions/{session_id}/project", self.move, methods=["PUT"]),
        ]

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
