"""Sessions: one client's connection to the service, kept alive by heartbeats.

Owns: their ids, metadata and ends; which run a session belongs to (`user_metadata.halteres_run`).
Never: ends a silent session: what it made stays usable.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import update

from halteres.errors import NotFound
from halteres.service.journal import Journal
from halteres.service.tables import SESSIONS

RUN_KEY = "halteres_run"


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One client."""

    id: str
    user_metadata: dict[str, Any]
    created_at: float  # unix s
    last_seen: float  # unix s
    finished: str | None = None  # success, errored or interrupted

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
        for row in await self._journal.rows(SESSIONS):
            del row["tags"]
            self._known[row["id"]] = Session(**row, last_seen=row["created_at"])

    async def create(self, user_metadata: dict[str, Any], tags: list[str]) -> Session:
        """A new session."""
        now = time.time()
        session = Session(id=str(uuid.uuid4()), user_metadata=user_metadata, created_at=now, last_seen=now)
        await self._journal.added(
            SESSIONS, id=session.id, tags=tags, user_metadata=user_metadata, created_at=now, finished=None
        )
        self._known[session.id] = session
        return session

    def find(self, session_id: str) -> Session:
        """The session of this id, seen now.

        Raises:
            NotFound: there is none here.
        """
        if (session := self._known.get(session_id)) is None:
            raise NotFound(f"There is no session '{session_id}' here.", next="Make a new ServiceClient.")
        session.last_seen = time.time()
        return session

    def finish(self, session_id: str, reason: str) -> None:
        """The client is done; the first reason stays."""
        session = self.find(session_id)
        if session.finished is None:
            session.finished = reason
            statement = update(SESSIONS).where(SESSIONS.c.id == session_id).values(finished=reason)
            self._journal.post(lambda connection: connection.execute(statement))

    def all(self) -> list[Session]:
        """Every session, oldest first."""
        return list(self._known.values())
