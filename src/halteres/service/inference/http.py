"""One HTTP call for inference: what it brings, how it ends early, answers that are sent while they are written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from halteres.errors import HalteresError, NotReady, ServerError, boundary
from halteres.service.answers import body_of
from halteres.service.inference.requests import Call
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire.codec import PROMPT_BYTES

T = TypeVar("T")

log = logging.getLogger(__name__)


class ServiceEnds(NotReady):
    """The service was told to end while this was under way."""

    code = "service_ends"


class Shutdown:
    """Begins once."""

    def __init__(self) -> None:
        self._begun = False
        self._open: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """Cut every answer short; a signal's handler may call this."""
        self._begun = True
        for scope in tuple(self._open):
            self._cut(scope)

    @asynccontextmanager
    async def cuts_short(self) -> AsyncIterator[None]:
        """The block is cut short when the end begins."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._open.add(scope)
                if self._begun:
                    self._cut(scope)
                try:
                    yield
                finally:
                    self._open.discard(scope)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise ServiceEnds("The service ends.", next="Ask again in a moment.") from error

    def _cut(self, scope: asyncio.Timeout) -> None:
        self._open.discard(scope)
        scope.reschedule(asyncio.get_running_loop().time())


def endpoint(handler: Callable[[Call], Coroutine[Any, Any, Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A route whose work ends when its client leaves or the service ends."""

    async def answered(request: Request) -> Response:
        run, body = request.path_params.get("run_id"), await body_of(request, PROMPT_BYTES)
        shutdown: Shutdown = request.app.state.shutdown
        async with shutdown.cuts_short():
            working = asyncio.create_task(handler(Call(run=run, tenant=tenant_of(request), body=body)))
            leaving = asyncio.create_task(_left(request))
            try:
                await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
                return working.result() if working.done() else Response(status_code=499)  # which nobody reads
            finally:
                working.cancel()
                leaving.cancel()
                await asyncio.gather(working, leaving, return_exceptions=True)

    return answered


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


DONE = b"data: [DONE]\n\n"

UNREAD_S = 300.0  # how long an event waits for a client that does not read; its stream then ends


def data(value: Any) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named(value: dict[str, Any]) -> bytes:
    """One event under its own type's name."""
    return b"event: " + value["type"].encode() + b"\n" + data(value)


class Events(StreamingResponse):
    """A stream of events made from items; `begun` makes one."""

    def __init__(
        self,
        items: AsyncGenerator[Any, None],
        events: AsyncIterator[bytes],
        failed: Callable[[HalteresError], bytes],
        media_type: str,
    ) -> None:
        self._items, self._failed = items, failed
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        self._shutdown: Shutdown = scope["app"].state.shutdown
        async with aclosing(self._items):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """As starlette's; a service that ends says so in band."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with self._shutdown.cuts_short():
                async for event in self.body_iterator:
                    async with asyncio.timeout(UNREAD_S):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
        except ServiceEnds as error:
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        except TimeoutError:
            log.warning("A stream ends: its client has read nothing for %g s.", UNREAD_S)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def begun(
    items: AsyncGenerator[T, None],
    shape: Callable[[AsyncIterator[T]], AsyncIterator[bytes]],
    failed: Callable[[HalteresError], bytes],
    media_type: str = "text/event-stream",
) -> Events:
    """The stream that `shape` makes of the items, once the first has come; raises what prevented it.

    Args:
        failed: the last events of a stream that fails under way.
    """
    first = await anext(items)

    async def all_items() -> AsyncIterator[T]:
        yield first
        async for item in items:
            yield item

    async def events() -> AsyncIterator[bytes]:
        try:
            with boundary(ServerError, "The stream"):
                async for event in shape(all_items()):
                    yield event
        except HalteresError as error:
            if error.status >= 500:
                log.error("A stream failed under way: %s", error)
            yield failed(error)

    return Events(items, events(), failed, media_type)
