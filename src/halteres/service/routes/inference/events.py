"""Answers that are sent while they are written: server-sent events.

Owns: the first piece before the status (what cannot be begun is refused with one), errors in band, the end of the
work when the client leaves or the service ends.
Never: knows a shape.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from halteres.errors import HalteresError, ServerError, boundary
from halteres.service.ending import Ending, ServiceEnds, ending_of

T = TypeVar("T")

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

UNREAD_S = 300.0
"""How long an event waits for a client that does not read; its stream then ends."""

_encode = msgspec.json.Encoder().encode


def data(value: Any) -> bytes:
    """One event."""
    return b"data: " + _encode(value) + b"\n\n"


def named(value: dict[str, Any]) -> bytes:
    """One event under its own type's name."""
    return b"event: " + value["type"].encode() + b"\n" + data(value)


class Begun(Generic[T]):
    """Items of which the first is there."""

    def __init__(self, first: T, rest: AsyncGenerator[T, None]) -> None:
        self._first: list[T] = [first]
        self._rest = rest

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        return self._first.pop() if self._first else await anext(self._rest)

    async def aclose(self) -> None:
        """End what makes them."""
        await self._rest.aclose()


async def begun(items: AsyncGenerator[T, None]) -> Begun[T]:
    """The same items, once the first has come; raises what prevented it."""
    return Begun(await anext(items), items)


class Events(StreamingResponse):
    """A stream of events made from items.

    Args:
        items: what is told; ended when the client leaves.
        shape: turns items into events.
        failed: the last events of a stream that fails under way.
    """

    def __init__(
        self,
        items: Begun[T],
        shape: Callable[[AsyncIterator[T]], AsyncIterator[bytes]],
        failed: Callable[[HalteresError], bytes],
        media_type: str = "text/event-stream",
    ) -> None:
        self._items, self._failed = items, failed
        self._ending = Ending()
        super().__init__(
            _told(shape(items), failed),
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=media_type,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        self._ending = ending_of(scope)
        async with aclosing(self._items):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """As starlette's; a service that ends says so in band."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with self._ending.heard():
                async for event in self.body_iterator:
                    async with asyncio.timeout(UNREAD_S):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
        except ServiceEnds as error:
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        except TimeoutError:
            log.warning("A stream ends: its client has read nothing for %g s.", UNREAD_S)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _told(events: AsyncIterator[bytes], failed: Callable[[HalteresError], bytes]) -> AsyncIterator[bytes]:
    try:
        with boundary(ServerError, "The stream"):
            async for event in events:
                yield event
    except HalteresError as error:
        if error.status >= 500:
            log.error("A stream failed under way: %s", error)
        yield failed(error)
