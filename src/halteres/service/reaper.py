"""What has ended makes room.

Owns: when adapters of finished and silent sessions leave the engine, when their restore points go, when settled
requests and checkpoints past their time are removed.
Never: removes a checkpoint whose time has not come; ends a session.
"""

from __future__ import annotations

import asyncio
import logging

from halteres.errors import HalteresError, ServerError, boundary
from halteres.process import steady_time
from halteres.service.checkpoints.store import Checkpoints
from halteres.service.durable.journal import Journal
from halteres.service.models import Models
from halteres.service.options import Options
from halteres.service.sampling.samplers import Samplers
from halteres.service.sessions import Session, Sessions
from halteres.service.training.adapters import Adapters

FULL_KEEP_S = 60.0
"""How long a settled request may be asked for again of a journal that has grown too large."""

log = logging.getLogger(__name__)


class Reaper:
    """Looks again and again for what has ended."""

    def __init__(
        self,
        journal: Journal,
        sessions: Sessions,
        models: Models,
        adapters: Adapters,
        samplers: Samplers,
        checkpoints: Checkpoints,
        options: Options,
    ) -> None:
        self._journal, self._sessions, self._models, self._adapters = journal, sessions, models, adapters
        self._samplers, self._checkpoints, self._options = samplers, checkpoints, options

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._options.reap_s)
            await self.reap(steady_time())

    async def reap(self, now: float) -> None:
        """One look; what cannot be cleared away now stays until the next."""
        for clear in (self._checkpoints.expire, self._clear_adapters, self._clear_requests):
            try:
                with boundary(ServerError, "Clearing away"):
                    await clear(now)
            except HalteresError as error:
                log.warning("What has ended could not be cleared away: %s", error)

    async def _clear_adapters(self, now: float) -> None:
        for session in self._sessions.all():
            for model in self._models.of_session(session.id):
                silent_s = now - max(session.finished_at or session.last_seen, model.last_request_at)
                if (
                    model.placement.engine is not None
                ):  # forgotten in a later look: a client may have been held as we were
                    if session.finished is not None or silent_s > self._options.silent_s:
                        await self._adapters.unload(model)
                elif silent_s > self._options.keep_points_s:
                    await self._adapters.forget(model)
                    await self._samplers.forget(model)

    async def _clear_requests(self, now: float) -> None:
        full = await self._journal.used_bytes() > self._options.journal_bytes
        await self._journal.forget(now - (FULL_KEEP_S if full else self._options.keep_requests_s))

    async def retire(self, session: Session) -> None:
        """The adapters of a session that nothing runs or waits for leave the engine; they come back when asked for."""
        for model in self._models.of_session(session.id):
            await self._adapters.unload(model)
