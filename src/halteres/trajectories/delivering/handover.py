"""The reply of a batch, and how it is known to have arrived.

Owns: the order "all but the last byte, look, the last byte, count it".
Never: decides what is in a batch.

    everything but the last byte ──▶ is the client there, the batch still its own? ──▶ the last byte ──▶ counted
                                         │ no
                                         ▼ given back: it answers the next question

A client that left before the last byte cannot have the batch. One that got it is served it again only where the server
dies, or the store fails, in the instant between the last byte and the count; leases close that gap.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from halteres.trajectories.delivering.question import Gone

B = TypeVar("B", contravariant=True)


class Counter(Protocol[B]):
    """Who counts batches (`service`)."""

    async def is_out(self, batch: B, /) -> bool:
        """Whether the batch is still its asker's."""
        ...

    def handing_over(self) -> AbstractContextManager[None]:
        """Questions about the step wait until this ends."""
        ...

    async def handed_over(self, batch: B, /) -> None:
        """Count it."""
        ...

    def give_back(self, batch: B, /) -> None:
        """It reached nobody."""
        ...


class BatchReply(Response):
    """A reply that has its batch counted, or given back if its client hung up before it had all of it."""

    def __init__(self, reply: Response, gone: Gone, counter: Counter[B], batch: B) -> None:
        self.status_code, self.background = reply.status_code, None
        self.body, self.raw_headers = reply.body, reply.raw_headers
        self._gone, self._counter, self._batch = gone, counter, batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it."""
        written = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": memoryview(self.body)[:-1], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits until the rest is sent
            if await self._gone() or not await self._counter.is_out(self._batch):
                return
            with self._counter.handing_over():
                await send({"type": "http.response.body", "body": self.body[-1:], "more_body": False})
                written = True
                await self._counter.handed_over(self._batch)
        finally:
            if not written:
                self._counter.give_back(self._batch)
