"""Sessions: one client's connection to the service, kept alive by heartbeats."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import update

from halteres.errors import NotFound, shortened
from halteres.process import steady_time
from halteres.service.durable.journal import Journal
from halteres.service.durable.tables import SESSIONS
from halteres.service.tenancy.tenants import Tenant

RUN_KEY = "halteres_run"


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One client."""

    id: str
    tenant: Tenant
    tags: list[str]
    user_metadata: dict[str, Any]
    project_id: str | None = None
    display_name: str | None = None
    created_at: float  # unix s
    last_seen: float  # unix s
    finished: str | None = None  # success, errored or interrupted
    finished_at: float | None = None  # unix s

    @property
    def run(self) -> str | None:
        """The run whose trainer this is."""
        run = self.user_metadata.get(RUN_KEY)
        return run if isinstance(run, str) else None


class Sessions:
    """All sessions of this state directory."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[str, Session] = {}

    async def open(self) -> None:
        """Know again those of an earlier life of the service."""
        now = steady_time()  # nobody could be heard meanwhile
        for row in await self._journal.rows(SESSIONS):
            self._known[row["id"]] = Session(**row, last_seen=now)

    async def create(
        self,
        tenant: Tenant,
        user_metadata: dict[str, Any],
        tags: list[str],
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> Session:
        """A new session."""
        now = steady_time()
        session = Session(
            id=str(uuid.uuid4()),
            tenant=tenant,
            tags=tags,
            user_metadata=user_metadata,
            project_id=project_id,
            display_name=display_name,
            created_at=now,
            last_seen=now,
        )
        await self._journal.put(SESSIONS, session)
        self._known[session.id] = session
        return session

    def find(self, session_id: str, tenant: Tenant) -> Session:
        """The session of this id, seen now."""
        session = self._known.get(session_id)
        if session is None or session.tenant != tenant:
            raise NotFound(f"There is no session '{shortened(session_id)}' here.", next="Make a new ServiceClient.")
        session.last_seen = steady_time()
        return session

    def of_model(self, session_id: str) -> Session:
        """The session of a training run or sampler that was found for its owner; it is not seen by this."""
        return self._known[session_id]

    def finish(self, session: Session, reason: str) -> None:
        """The client is done; the first reason stays."""
        if session.finished is None:
            session.finished, session.finished_at = reason, steady_time()
            self._update(session, finished=reason, finished_at=session.finished_at)

    def move(self, session: Session, project_id: str) -> None:
        """Into another project."""
        session.project_id = project_id
        self._update(session, project_id=project_id)

    def all(self, tenant: Tenant | None = None) -> list[Session]:
        """The sessions of a tenant, or every one; oldest first."""
        return [session for session in self._known.values() if tenant in (None, session.tenant)]

    def _update(self, session: Session, **values: Any) -> None:
        statement = update(SESSIONS).where(SESSIONS.c.id == session.id).values(**values)
        self._journal.post(lambda connection: connection.execute(statement))
