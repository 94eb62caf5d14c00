"""A trainer's question for a batch, from its arrival until it is answered.

Owns: which run it is about, how long it is held, when it is worth asking again.
Never: decides what the answer is (`batches` does), reads tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from halteres.trajectories.delivering import batches, choice
from halteres.trajectories.records import Delivery
from halteres.trajectories.state import State
from halteres.trajectories.turns import Turns
from halteres.trajectories.wire.schema import BatchQuery

Gone = Callable[[], Awaitable[bool]]
"""Whether the client has hung up."""

AGAIN_S = 0.005
"""Pause before a question is asked again, whatever happens meanwhile."""

LOOK_S = 0.25
"""How often a held question looks again where nothing changed but the time: patience and heartbeats run out."""

RunKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One question, about the run that was registered when it came."""

    query: BatchQuery
    run: RunKey | None
    deadline: float  # on the loop's clock

    @classmethod
    def of(cls, state: State, query: BatchQuery) -> Question:
        """A question that comes now."""
        return cls(query, _key(state), asyncio.get_running_loop().time() + query.wait)

    def decide(self, state: State) -> Delivery | None:
        """The batch that answers it; none where another run was registered meanwhile."""
        return batches.next_batch(state, self.query) if self._is_about(state) else None

    async def may_ask_again(self, turns: Turns, gone: Gone) -> bool:
        """Hold it until a batch may be had. False: its time is up, its run is over, or nobody waits for the answer."""
        while self._left() > 0 and not turns.is_ending and self._is_about(turns.state) and not await gone():
            changed = turns.changed
            if choice.is_ready(turns.state) or _has_expired(turns.state):
                await asyncio.sleep(min(AGAIN_S, self._left()))
                return True
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._left(), LOOK_S)):
                    await changed.wait()
        return False

    def _is_about(self, state: State) -> bool:
        return self.run is not None and self.run == _key(state)

    def _left(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()


def _key(state: State) -> RunKey | None:
    run = state.run
    return None if run.registration is None else (*run.registration.identity, run.first_group)


def _has_expired(state: State) -> bool:
    """Whether a batch has come back since anybody asked."""
    now = state.clock()
    return any(batch.expires_at is not None and batch.expires_at <= now for batch in state.out.values())
