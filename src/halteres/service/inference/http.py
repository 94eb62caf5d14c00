"""One HTTP call for inference: what it brings, how it ends early, answers that are sent while they
are written.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from halteres.errors import HalteresError, NotFound, NotReady, ServerError, boundary
from halteres.loopback import while_connected
from halteres.service.http import SCOPE_SESSION, answer, body_of, tenant_of
from halteres.service.inference.answering import Inference
from halteres.service.inference.outputs import Output
from halteres.service.inference.requests import Call, CapturedSession, InferenceRequest
from halteres.service.wire.bodies import PROMPT_BYTES

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


def endpoint(
    handler: Callable[[Call], Coroutine[Any, Any, Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """A route whose work ends when its client leaves or the service ends."""

    async def answered(request: Request) -> Response:
        body = await body_of(request, PROMPT_BYTES)
        shutdown: Shutdown = request.app.state.shutdown

        async def work() -> Response:
            return await handler(await _call_of(request, body))

        async with shutdown.cuts_short():
            return await while_connected(request, work())

    return answered


def run_of(request: Request) -> str | None:
    """The run that a request means by its URL or its gateway session."""
    session: CapturedSession | None = request.scope.get(SCOPE_SESSION)
    if session is not None:
        return session.policy_name
    if "session_id" in request.path_params:
        raise NotFound(
            "There is no such gateway session here.", next="POST /gateway/sessions opens one."
        )
    return request.path_params.get("run_id")


async def _call_of(request: Request, body: bytes) -> Call:
    session: CapturedSession | None = request.scope.get(SCOPE_SESSION)
    capture = None
    if session is not None:
        path = _BEFORE_DIALECT.sub("", request.url.path)
        capture = await session.call(path, request.headers, body)
    return Call(run=run_of(request), tenant=tenant_of(request), body=body, capture=capture)


_BEFORE_DIALECT = re.compile(r"/(g|runs)/[^/]+/")


DONE = b"data: [DONE]\n\n"

UNREAD_S = 300.0  # how long an event waits for a client that does not read; its stream then ends


def data(value: Any) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event whose line before says its `type`, too."""
    return b"event: " + value["type"].encode() + b"\n" + data(value)


class Shape(ABC):
    """One answer in its dialect's shape."""

    media_type = "text/event-stream"

    @abstractmethod
    def whole(self, outputs: Sequence[Output]) -> Any:
        """All of it, of every sequence."""

    @abstractmethod
    def events(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """The bytes of a stream, from the pieces of its sequences."""

    @abstractmethod
    def failed(self, error: HalteresError) -> bytes:
        """The last bytes of a stream that fails under way."""


async def respond(
    inference: Inference, request: InferenceRequest, shape: Shape, *, stream: bool
) -> Response:
    """Answer a request, whole or as a stream that begins with its first piece; raises what
    prevented that.
    """
    if not stream:
        return await inference.write(request, lambda outputs: answer(shape.whole(outputs)))
    pieces = inference.stream(request)
    first = await anext(pieces)

    async def all_pieces() -> AsyncIterator[Output]:
        yield first
        async for piece in pieces:
            yield piece

    async def events() -> AsyncIterator[bytes]:
        try:
            with boundary(ServerError, "The stream"):
                async for event in shape.events(all_pieces()):
                    yield event
        except HalteresError as error:
            if error.status >= 500:
                log.error("A stream failed under way: %s", error)
            yield shape.failed(error)

    return Events(pieces, events(), shape)


class Events(StreamingResponse):
    """A stream of events made from the pieces of an answer."""

    def __init__(
        self, pieces: AsyncGenerator[Output, None], events: AsyncIterator[bytes], shape: Shape
    ) -> None:
        self._pieces, self._shape = pieces, shape
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=shape.media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        self._shutdown: Shutdown = scope["app"].state.shutdown
        async with aclosing(self._pieces):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """As starlette's; a service that ends says so in band."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async with self._shutdown.cuts_short():
                async for event in self.body_iterator:
                    async with asyncio.timeout(UNREAD_S):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
        except ServiceEnds as error:
            await send(
                {"type": "http.response.body", "body": self._shape.failed(error), "more_body": True}
            )
        except TimeoutError:
            log.warning("A stream ends: its client has read nothing for %g s.", UNREAD_S)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
