"""Batches on their way: committed, but not yet with a trainer.

Owns: batches whose client hung up before it had the reply, kept whole until the next question; the reply that notices.
Never: decides what is in a batch, counts one, touches a disk.

    committed ──▶ read ──▶ written to a live connection ──▶ forgotten here
        ▲          │              │
        └──────────┴── failed, or the client was gone: back, for the next question

The last byte of a reply is withheld until the connection was seen alive behind all the others: a client that left
before it cannot have the batch, and one that got it is never served it again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from halteres.trajectories.records import Delivery, RunRecord
from halteres.trajectories.wire.schema import BatchQuery

Gone = Callable[[], Awaitable[bool]]
"""Whether the client has hung up."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """A delivery and its JSON elements; None: they are still to be read."""

    delivery: Delivery
    elements: list[bytes] | None = None


class Returned:
    """Batches that came back, oldest first."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []

    def put(self, batch: Batch) -> None:
        """Keep a batch that its client did not get."""
        self._batches.append(batch)
        self._batches.sort(key=lambda each: each.delivery.id)

    def take(self, run: RunRecord, query: BatchQuery) -> Batch | None:
        """The oldest that answers this question; those that answer no question any more are let go of."""
        while self._batches:
            batch = self._batches.pop(0)
            if _is_wanted(batch.delivery, run, query):
                return batch
            if batch.delivery.id != query.after:
                _log.warning("Batch %d reached nobody and is of no use any more.", batch.delivery.id)
        return None

    def forget(self, delivery: Delivery) -> None:
        """It is served in another way."""
        self._batches = [batch for batch in self._batches if batch.delivery.id != delivery.id]


def _is_wanted(made: Delivery, run: RunRecord, query: BatchQuery) -> bool:
    """Of this run, of its size, not held by the trainer, and not made for other weights where that matters."""
    if made.id == query.after or made.num_sequences != run.batch_size or made.groups[0] < run.first_group:
        return False
    return run.max_staleness is None or query.policy_version in (None, made.version)


class BatchReply(Response):
    """A reply that calls `lost` if its client hung up before it had all of it."""

    def __init__(self, reply: Response, gone: Gone, lost: Callable[[], None]) -> None:
        self.status_code, self.background = reply.status_code, None
        self.body, self.raw_headers = reply.body, reply.raw_headers
        self._gone, self._lost = gone, lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it."""
        arrived = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body[:-1], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits until the rest is sent
            arrived = not await self._gone()
        finally:
            if not arrived:
                self._lost()
        if arrived:
            await send({"type": "http.response.body", "body": self.body[-1:], "more_body": False})
