"""One HTTP call for inference: what it brings, its errors, answers that are sent while they are written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from halteres.errors import HalteresError, NotReady, ServerError, UserError, boundary
from halteres.service.answers import body_of, with_status
from halteres.service.inference.requests import Call
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire.codec import PROMPT_BYTES

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
        if not self._begun:
            self._begun = True
            for scope in tuple(self._open):
                _cut(scope)

    @asynccontextmanager
    async def cuts_short(self) -> AsyncIterator[None]:
        """The block is cut short when the end begins."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._open.add(scope)
                if self._begun:
                    _cut(scope)
                try:
                    yield
                finally:
                    self._open.discard(scope)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise ServiceEnds("The service ends.", next="Ask again in a moment.") from error


def _cut(scope: asyncio.Timeout) -> None:
    scope.reschedule(asyncio.get_running_loop().time())


def shutdown_of(scope: Scope) -> Shutdown:
    """The end of the service that a request came to."""
    shutdown: Shutdown = scope["app"].state.shutdown
    return shutdown


T = TypeVar("T")


class ClientGone(UserError):
    """The client closed its connection before it was answered; nobody reads this."""

    code, status = "client_gone", 499


Handler = Callable[[Call], Coroutine[Any, Any, Response]]
Shape = Callable[[HalteresError], dict[str, Any]]
"""How an error's body looks."""


def endpoint(handler: Handler, shape: Shape) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers errors in its own shape, and ends the handler's work when its client leaves or the
    service ends."""

    async def answered(request: Request) -> Response:
        try:
            call = Call(
                run=request.path_params.get("run_id"),
                tenant=tenant_of(request),
                body=await body_of(request, PROMPT_BYTES),
            )
            async with shutdown_of(request.scope).cuts_short():
                return await while_connected(request, handler(call))
        except HalteresError as error:
            return with_status(shape(error), error)

    return answered


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled when the client goes away. The request's body has been read."""
    working = asyncio.create_task(work, name=f"answer to {request.url.path}")
    leaving = asyncio.create_task(_left(request), name="client leaving")
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("The client went away.")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        self._shutdown = Shutdown()
        super().__init__(
            _with_failure(shape(items), failed),
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=media_type,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        self._shutdown = shutdown_of(scope)
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


async def _with_failure(events: AsyncIterator[bytes], failed: Callable[[HalteresError], bytes]) -> AsyncIterator[bytes]:
    try:
        with boundary(ServerError, "The stream"):
            async for event in events:
                yield event
    except HalteresError as error:
        if error.status >= 500:
            log.error("A stream failed under way: %s", error)
        yield failed(error)
