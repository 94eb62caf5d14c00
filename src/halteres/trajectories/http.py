"""What all routes share: request bodies read within bounds, JSON replies, errors as replies.

Bodies are bounded in bytes and in time, each and all together; gzip is inflated. A small body, such
as a heartbeat's, never waits for large ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from isal import isal_zlib
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope

from halteres.errors import HalteresError, as_http
from halteres.loopback import TooSlow, is_loopback
from halteres.trajectories.options import Gzip
from halteres.trajectories.schema import Unprocessable, convert, decode
from halteres.trajectories.service import QueueFull, TrajectoryService

T = TypeVar("T")
JSON = "application/json"
CLIENT = "halteres-client"  # header of a client that knows our extensions

# -- request bodies

# bytes of all bodies being read or used; beyond, later ones wait, but for small ones
AT_ONCE = 1024**3
# bytes up to which a body that says its length waits for nobody: a connection keeps more anyway
SMALL = 64 * 1024
LARGEST_BODY = 256 * 1024 * 1024  # bytes of a request, inflated
# members of a gzipped request. Clients send one; what follows it is copied for each.
MOST_MEMBERS = 16
# bytes of gzip from which a thread inflates them: of what clients send, 1 MB or more inside
LARGE_PACKED = 128 * 1024
# bytes inflated on the event loop, in 2 ms at most; what holds more, in a thread
INFLATED_AT_ONCE = 1024 * 1024
GZIPPED = b"\x1f\x8b"  # how every gzip stream begins
# how long nothing of a body may arrive: one that stops holds its place for no longer
STALL_S = 10.0
# how long a body may take from first byte to last: one that trickles holds its place for no longer
DEADLINE_S = 120.0


class BadBody(HalteresError):
    """The body cannot be read; answered as plain text, as the original does."""

    code, status = "bad_body", 400


class TooLarge(BadBody):
    """The body is beyond the limit."""

    status = 413


@dataclass(slots=True, kw_only=True)
class Bodies:
    """The request bodies of one server."""

    largest: int  # bytes of one, inflated
    at_once: int = AT_ONCE  # bytes of all
    small: int = SMALL  # bytes of one that waits for nobody
    deadline_s: float = DEADLINE_S
    stall_s: float = STALL_S
    held: int = 0  # bytes
    _num_large: int = 0  # bodies that are not small
    # of large ones that wait, in order of arrival
    _line: asyncio.Lock = field(default_factory=asyncio.Lock)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def of(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The body of a request, whole and inflated; its bytes count until the context ends.

        It is counted at first with the length that it declares, or the largest where it declares
        none.

        Raises:
            BadBody: the gzip stream is broken or ends early.
            TooLarge, TooSlow: it is beyond the limits.
            ClientDisconnect: it ends early.
        """
        headers = dict(reversed(scope["headers"]))  # of two, the first
        declared: bytes = headers.get(b"content-length", b"")
        counted = self.largest if b"transfer-encoding" in headers else 0
        if declared.isdigit():
            counted = int(declared[:19])
        if counted > self.largest:
            raise self._too_large()
        is_large = counted > self.small
        if is_large:
            async with self._line:
                # alone, any body is let in
                while self._num_large and self.held + counted > self.at_once:
                    self._freed.clear()
                    await self._freed.wait()
        self._num_large += is_large
        self.held += counted
        try:
            body = await self._read(receive)
            counted = self._recount(counted, len(body))
            encoding = headers.get(b"content-encoding", b"").lower()
            # What a client calls encoded and is not, or as nobody knows, is left to the reader of
            # JSON.
            if body and (
                encoding in (b"gzip", b"x-gzip") or (b"gzip" in encoding and body[:2] == GZIPPED)
            ):
                body = await self._inflated(body)
                counted = self._recount(counted, len(body))
            yield body
        finally:
            self._num_large -= is_large
            self._recount(counted, 0)

    def _recount(self, before: int, now: int) -> int:
        """A body that was counted with so many bytes has so many; what it does not need is the next
        one's.
        """
        self.held += now - before
        self._freed.set()
        return now

    async def _read(self, receive: Receive) -> bytes:
        now, parts, num_bytes = asyncio.get_running_loop().time, list[bytes](), 0
        ends = now() + self.deadline_s
        try:
            async with asyncio.timeout(min(self.stall_s, self.deadline_s)) as stalled:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > self.largest:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return b"".join(parts)
                    stalled.reschedule(min(now() + self.stall_s, ends))
        except TimeoutError as error:
            what = (
                f"The body did not arrive within {self.deadline_s:g} s, or nothing of it for "
                f"{self.stall_s:g} s."
            )
            raise TooSlow(what, "", "Send it again on a better connection.") from error

    async def _inflated(self, body: bytes) -> bytes:
        if len(body) <= LARGE_PACKED:
            try:
                return inflate(body, min(INFLATED_AT_ONCE, self.largest))
            except TooLarge:
                if self.largest <= INFLATED_AT_ONCE:
                    raise
        return await asyncio.to_thread(inflate, body, self.largest)

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"The body is larger than {self.largest} bytes.", "", "Send fewer groups at once."
        )


def inflate(body: bytes, limit: int = LARGEST_BODY) -> bytes:
    """A gzip body, one member or a few.

    Raises:
        BadBody: the gzip stream is broken or ends early.
        TooLarge: it is beyond the limit.
    """
    parts, left = [], limit
    while body or not parts:
        if len(parts) == MOST_MEMBERS:
            raise BadBody(
                f"The gzip body has more than {MOST_MEMBERS} members.", "", "Send it as one."
            )
        stream = isal_zlib.decompressobj(wbits=31)
        try:
            part = stream.decompress(body, left + 1)
        except isal_zlib.error as error:  # pyright: ignore[reportGeneralTypeIssues] - its stubs call the class a value
            raise BadBody("Invalid gzip payload") from error
        left -= len(part)
        if left < 0:
            raise TooLarge(f"The body is larger than {limit} bytes when inflated.")
        if not stream.eof:
            raise BadBody("Invalid gzip payload")
        parts.append(part)
        body = stream.unused_data.lstrip(b"\0")
    return b"".join(parts)


# -- requests


@dataclass(frozen=True, slots=True)
class AppContext:
    """What the routes of one app share."""

    service: TrajectoryService
    bodies: Bodies
    gzip: Gzip


def service_of(request: Request) -> TrajectoryService:
    """The service of the app that was asked."""
    return request.app.state.context.service


async def body_of(request: Request, kind: type[T]) -> T:
    """The JSON body.

    Raises:
        Unprocessable: it does not fit.
    """
    async with request.app.state.context.bodies.of(request.scope, request.receive) as body:
        return decode(body, kind)


def query_of(request: Request, kind: type[T], *lists: str) -> T:
    """The query; the parameters of `lists` may be repeated.

    Raises:
        Unprocessable: it does not fit.
    """
    posted: dict[str, Any] = dict(request.query_params)
    posted |= {name: request.query_params.getlist(name) for name in lists}
    return convert(posted, kind, "query")


# -- replies

SMALLEST_GZIPPED = 1000  # bytes from which a reply is gzipped if the client accepts that
# bytes from which a reply is compressed in a thread, which costs 0.1 ms; up to here 0.7
LARGE_TO_PACK = 256 * 1024
LEVEL = 1  # the original compresses at 9: many times the time for a tenth of the size
RETRY_AFTER_S = 1  # what a 503 advises where the error does not say
TOO_DEEP = Unprocessable(
    [{"type": "json_too_deep", "loc": ["body"], "msg": "The body is nested too deeply to read."}]
)
# where only trainers post; what else is refused says what an environment does wrong
TRAINERS = "/v1/batches/"


def reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON reply; `value` holds finite numbers only."""
    return Response(msgspec.json.encode(value), status, headers, JSON)


async def large_reply(request: Request, body: bytes) -> Response:
    """A JSON reply that may be large, gzipped where the client accepts it and the operator wants
    it.
    """
    rule: Gzip = request.app.state.context.gzip
    is_accepted = "gzip" in request.headers.get("accept-encoding", "").lower()
    if (
        not is_accepted
        or len(body) < SMALLEST_GZIPPED
        or rule == "never"
        or (rule == "auto" and _is_here(request))
    ):
        return Response(body, media_type=JSON)
    packed = await asyncio.to_thread(deflate, body) if len(body) > LARGE_TO_PACK else deflate(body)
    return Response(
        packed, headers={"content-encoding": "gzip", "vary": "Accept-Encoding"}, media_type=JSON
    )


def deflate(body: bytes) -> bytes:
    """The body as one gzip member."""
    stream = isal_zlib.compressobj(LEVEL, wbits=31)
    return stream.compress(body) + stream.flush()


def _is_here(request: Request) -> bool:
    """Whether the client is on this machine, where compressing costs more than it saves."""
    with suppress(ValueError):  # no IP address: another transport's name for its other end
        return request.client is None or is_loopback(request.client.host)
    return False


def answer_to(error: Exception) -> Response:
    """The reply to a request that ended in one of these."""
    match error:
        case BadBody():
            return PlainTextResponse(error.sentence, error.status, _headers(error))
        case Unprocessable():
            return reply({"detail": error.problems}, error.status)
        case HalteresError():
            return reply(as_http(error), error.status, _headers(error))
        case HTTPException():
            return reply({"detail": error.detail}, error.status_code, error.headers)
        case RecursionError():
            return answer_to(TOO_DEEP)
        case _:
            return Response(status_code=400)  # the client hung up: nobody reads it


def _headers(error: HalteresError) -> dict[str, str]:
    match error.status:
        case 503:
            seconds = error.retry_after_s if isinstance(error, QueueFull) else RETRY_AFTER_S
            return {"retry-after": str(math.ceil(seconds))}
        case 401:
            return {"www-authenticate": 'Basic realm="halteres", charset="UTF-8"'}
        case 408 | 413:  # the rest of the body is not waited for
            return {"connection": "close"}
        case _:
            return {}


async def _handle(request: Request, error: Exception) -> Response:
    answer, path = answer_to(error), request.url.path
    is_refused = 400 <= answer.status_code < 500 and answer.status_code != 408
    if (
        is_refused
        and not isinstance(error, ClientDisconnect)
        and request.method == "POST"
        and TRAINERS not in path
    ):
        why = TOO_DEEP.sentence
        if isinstance(error, HTTPException):
            why = error.detail
        elif isinstance(error, HalteresError):
            why = error.sentence
        service_of(request).note_refusal(path, answer.status_code, why)
    return answer


HANDLERS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(
    (HalteresError, HTTPException, RecursionError, ClientDisconnect), _handle
)
