"""The trajectory server without its wire: decide in memory, remember, then answer.

Owns: the order "decide, commit, answer"; one question for a batch at a time; waking those who wait for a batch or for
the end of a pause.
Never: reads HTTP. All decisions happen on the event loop, one at a time; the disk belongs to the writer's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from halteres.trajectories.delivering import delivery
from halteres.trajectories.delivering.handover import Batch, Gone, Returned
from halteres.trajectories.intake import intake
from halteres.trajectories.intake.intake import Verdict
from halteres.trajectories.records import EnvRecord
from halteres.trajectories.reporting import diagnostics, status
from halteres.trajectories.state import Clock, State
from halteres.trajectories.stores.store import Store
from halteres.trajectories.wire.schema import BatchQuery, EnvRegistration, Registration
from halteres.trajectories.wire.scored import LARGEST_ENV_ID, Scored
from halteres.trajectories.writer import Writer

PAUSE_HOLD_S = 10.0
"""How long the poll of a paused environment with a minimum share is held: its client starts work whatever we answer."""

_log = logging.getLogger(__name__)


class TrajectoryService:
    """What the routes call."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self.state = State(store.load(), clock)
        self.writer = Writer(store, self._reload)
        self._changed = asyncio.Event()
        self._asking = asyncio.Lock()  # from the decision on a batch until its tokens are read
        self._returned = Returned()

    async def register(self, registration: Registration) -> int:
        """POST /register: gives the uuid."""
        uuid = delivery.register(self.state, registration)
        await self._keep()
        return uuid

    async def register_env(self, registration: EnvRegistration) -> EnvRecord | None:
        """POST /register-env: None until a trainer has asked for a batch."""
        if not self.state.run.started:
            return None
        record = self.state.add_env(self.state.envs.new_record(registration)).record
        await self._keep()
        return record

    async def disconnect_env(self, env_id: int) -> bool:
        """POST /disconnect-env: False if there is no such environment."""
        env = self.state.envs.by_id.get(env_id)
        if env is None:
            return False
        self.state.connect(env, False)
        await self._keep()
        return True

    async def accept(self, groups: Sequence[Scored]) -> list[Verdict]:
        """POST /scored_data, /scored_data_list: when it returns, the groups survive the death of the process."""
        verdicts = intake.accept_all(self.state, groups)
        await self._keep()
        return verdicts

    async def batch(self, query: BatchQuery, gone: Gone) -> Batch | None:
        """GET /batch of a registered run; None if there is none within `query.wait`.

        Whoever cannot pass the batch on gives it back.
        """
        deadline = self._now() + query.wait
        while True:
            changed = self._changed
            async with self._asking:
                if await gone() or self.state.run.registration is None:
                    return None
                made = await self._next(query)
            if made is not None:
                return made
            if not await self._wait_until(deadline, changed):
                return None

    def give_back(self, batch: Batch) -> None:
        """The batch reached nobody: it answers the next question."""
        self._returned.put(batch)
        self._wake()

    async def _next(self, query: BatchQuery) -> Batch | None:
        """The next batch, decided, committed and read. Only then may another be decided: that deletes these tokens."""
        batch = self._returned.take(self.state.run, query)
        if batch is None:
            made = delivery.next_batch(self.state, query)
            await self._keep()
            if made is None:
                return None
            self._returned.forget(made)
            batch = Batch(made)
        if batch.elements is not None:
            return batch
        try:
            return Batch(batch.delivery, await asyncio.to_thread(self._store.bodies, batch.delivery.groups))
        except BaseException:
            self._returned.put(batch)
            raise

    async def status_env(self, env_id: int) -> dict[str, Any]:
        """GET /status-env; an unknown id is adopted, an impossible one is told to pause."""
        if not 0 <= env_id < LARGEST_ENV_ID:
            return status.idle(self.state)
        env = self.state.hear(env_id)
        if self.state.changes:
            await self._keep()
        answer = status.status_env(self.state, env)
        deadline = self._now() + PAUSE_HOLD_S
        while env.min_share and status.is_paused(self.state):
            if not await self._wait_until(deadline, self._changed):
                break
            answer = status.status_env(self.state, env)
        return answer

    async def latest_example(self) -> bytes | None:
        """GET /latest_example: the element of the newest group."""
        return None if self.state.run.registration is None else await asyncio.to_thread(self._store.latest_body)

    async def reset(self) -> None:
        """GET /reset_data."""
        self.state.archive()
        await self._keep()

    def diagnose(self) -> dict[str, Any]:
        """GET /v1/diagnostics."""
        return diagnostics.report(self.state)

    async def _keep(self) -> None:
        """Have what was decided remembered; then tell those who wait."""
        changes = self.state.drain()
        await self.writer.commit(changes)
        if changes:
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_until(self, deadline: float, changed: asyncio.Event) -> bool:
        """Wait for the next change. False: the deadline came first."""
        try:
            async with asyncio.timeout_at(deadline):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    def _reload(self) -> None:
        """The store did not take what memory already holds: go back to what is kept.

        Raises:
            StoreFailed: it cannot be read either.
        """
        _log.error("The store failed; going back to its last committed state.")
        self.state = State(self._store.load(), self._clock)
        self.state.drain()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
