"""The reply of a batch, and how it is known to have arrived.

    everything but the last byte ──▶ is the client there, the batch still its own? ──▶ the last byte ──▶ counted
                                         │ no
                                         ▼ given back: it answers the next question

A client that left before the last byte cannot have the batch. One that got it is served it again only where the server
dies, or the store fails, in the instant between the last byte and the count; leases close that gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from halteres.trajectories import batches
from halteres.trajectories.group_commit import GroupCommit
from halteres.trajectories.records import Delivery
from halteres.trajectories.state import State
from halteres.trajectories.stores.store import StoreFailed

Gone = Callable[[], Awaitable[bool]]
"""Whether the client has hung up."""

COUNT_AGAIN_S = 0.2
"""Pause before a batch that was written is counted again, where the store failed."""

COUNTING_S = 5.0
"""How long a question about the step waits for batches that are being handed over."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch on its way, with the JSON elements of its groups."""

    delivery: Delivery
    step: int  # the run's, once it is delivered
    elements: list[bytes]


class BatchReplies:
    """Batches whose replies are being written.

    Args:
        decisions: which decide that a batch counts.
        is_shared: other servers take turns at the same store.
    """

    def __init__(self, decisions: GroupCommit, *, is_shared: bool) -> None:
        self._decisions, self._is_shared = decisions, is_shared
        self._open: set[asyncio.Future[None]] = set()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Until it ends, questions about the step wait: a batch is written that is not counted yet."""
        counting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open.add(counting)
        try:
            yield
        finally:
            self._open.discard(counting)
            counting.set_result(None)

    async def settled(self) -> None:
        """Wait until every batch that was written is counted."""
        if self._open:
            await asyncio.wait(self._open, timeout=COUNTING_S)

    async def is_out(self, batch: Batch) -> bool:
        """Whether the batch is still its asker's; on a shared store another server may have handed it out since."""
        if self._is_shared:
            return await self._decisions.submit(lambda state: _is_out(state, batch.delivery))
        return _is_out(self._decisions.state, batch.delivery)

    async def count(self, batch: Batch) -> None:
        """The reply was written whole to a live connection; a lease still wants its acknowledgement.

        Raises:
            StoreFailed: for longer than an offer lasts.
        """
        now = asyncio.get_running_loop().time
        ends = now() + batches.OFFER_S
        while True:
            try:
                return await self._decisions.submit(lambda state: batches.count_delivered(state, batch.delivery.id))
            except StoreFailed:  # the trainer has it: uncounted, it would be served again
                if now() > ends or self._decisions.has_ended:
                    raise
            await asyncio.sleep(COUNT_AGAIN_S)

    def give_back(self, batch: Batch) -> None:
        """The batch reached nobody: it answers the next question."""
        self._decisions.leave(lambda state: batches.give_back(state, batch.delivery.id))


class BatchReply(Response):
    """A reply that has its batch counted, or given back if its client hung up before it had all of it."""

    def __init__(self, reply: Response, gone: Gone, batch_replies: BatchReplies, batch: Batch) -> None:
        self.status_code, self.background = reply.status_code, None
        self.body, self.raw_headers = reply.body, reply.raw_headers
        self._gone, self._replies, self._batch = gone, batch_replies, batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it."""
        written = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": memoryview(self.body)[:-1], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits until the rest is sent
            if await self._gone() or not await self._replies.is_out(self._batch):
                return
            with self._replies.open():
                await send({"type": "http.response.body", "body": self.body[-1:], "more_body": False})
                written = True
                await self._replies.count(self._batch)
        finally:
            if not written:
                self._replies.give_back(self._batch)


def _is_out(state: State, delivery: Delivery) -> bool:
    return delivery.id in state.out or state.run.last == delivery
