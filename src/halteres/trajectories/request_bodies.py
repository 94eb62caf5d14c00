"""Request bodies as they are read: bounded in bytes and in time, each and all together; gzip inflated.

A small body, such as a heartbeat's, never waits for large ones.

    admitted (room for what it declares) ──▶ read, at most DEADLINE_S ──▶ inflated ──▶ used ──▶ let go, the next one in
                                             └── room it did not need: the next one in
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from isal import isal_zlib
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from halteres.errors import HalteresError, UserError

AT_ONCE = 1024**3
"""Bytes of all bodies being read or used; beyond, later ones wait, but for small ones."""

SMALL = 64 * 1024
"""Bytes up to which a body that says its length waits for nobody: a connection keeps more than that anyway."""

LARGEST_BODY = 256 * 1024 * 1024
"""Bytes of a request, inflated."""

MOST_MEMBERS = 16
"""Members of a gzipped request. Clients send one; what follows it is copied for each."""

LARGE_PACKED = 128 * 1024
"""Bytes of gzip from which a thread inflates them: of what clients send, 1 MB or more inside."""

INFLATED_AT_ONCE = 1024 * 1024
"""Bytes that are inflated on the event loop, in 2 ms at most. What holds more begins again in a thread."""

GZIPPED = b"\x1f\x8b"
"""How every gzip stream begins."""

STALL_S = 10.0
"""How long nothing of a body may arrive: one that says no more holds its place for no longer."""

DEADLINE_S = 120.0
"""How long a body may take from its first byte to its last: one that trickles holds its place for no longer."""

_TELLING = frozenset({b"content-length", b"transfer-encoding", b"content-encoding"})


class BadBody(HalteresError):
    """The body cannot be read; answered as plain text, as the original does."""

    code, status = "bad_body", 400


class TooLarge(BadBody):
    """The body is beyond the limit."""

    status = 413


class TooSlow(UserError):
    """The body did not arrive in time."""

    code, status = "too_slow", 408


@dataclass(slots=True, kw_only=True)
class Bodies:
    """The bodies of one server."""

    largest: int  # bytes of one, inflated
    at_once: int = AT_ONCE  # bytes of all
    small: int = SMALL  # bytes of one that waits for nobody
    deadline_s: float = DEADLINE_S
    stall_s: float = STALL_S
    held: int = 0  # bytes
    _num_admitted: int = 0  # of bodies that are not small
    _waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque[tuple[int, asyncio.Future[None]]])

    def of(self, scope: Scope, receive: Receive) -> RequestBody:
        """The body of a request, whole and inflated, as an asynchronous context; its bytes count until that ends.

        Entering raises:
            BadBody: the gzip stream is broken or ends early.
            TooLarge, TooSlow: it is beyond the limits.
            ClientDisconnect: it ends early.
        """
        telling = {name: value for name, value in reversed(scope["headers"]) if name in _TELLING}
        return RequestBody(self, telling, receive)

    async def admit(self, num_bytes: int) -> None:
        """Take room for a body; a small one's is always there."""
        if self._is_small(num_bytes):
            self.held += num_bytes
        else:
            await self._admit(num_bytes)

    def free(self, num_bytes: int) -> None:
        """Give back bytes that a body does not need; whoever waits for them comes in."""
        self.held -= num_bytes
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            wanted, turn = self._waiting.popleft()
            if not turn.done():  # its request was given up
                self._take(wanted)
                turn.set_result(None)

    def leave(self, num_bytes: int, admitted: int) -> None:
        """A body that was admitted with so many bytes is done with."""
        self._num_admitted -= not self._is_small(admitted)
        self.free(num_bytes)

    async def _admit(self, num_bytes: int) -> None:
        """In order of arrival; alone, any body is let in."""
        if not self._waiting and self._has_room(num_bytes):
            self._take(num_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(num_bytes, num_bytes)
            raise

    def _has_room(self, num_bytes: int) -> bool:
        return self._num_admitted == 0 or self.held + num_bytes <= self.at_once

    def _take(self, num_bytes: int) -> None:
        self.held += num_bytes
        self._num_admitted += 1

    def _is_small(self, num_bytes: int) -> bool:
        return num_bytes <= self.small


@dataclass(slots=True)
class RequestBody:
    """One body: counted at first with what it declares, then with what it is, until its context ends."""

    _bodies: Bodies
    _headers: dict[bytes, bytes]
    _receive: Receive
    _declared: int = 0  # bytes
    _num_bytes: int = 0  # it is counted with

    async def __aenter__(self) -> bytes:
        """The body."""
        self._declared = self._num_bytes = self._room()
        await self._bodies.admit(self._declared)
        try:
            body = await self._read()
            self._holds(len(body))
            if encoding := self._headers.get(b"content-encoding"):
                body = await self._inflated(body, encoding.lower())
                self._holds(len(body))
        except BaseException:
            await self.__aexit__()
            raise
        return body

    async def __aexit__(self, *_: object) -> None:
        """Let go of it."""
        self._bodies.leave(self._num_bytes, self._declared)

    def _room(self) -> int:
        """Bytes to keep room for: those it says, or the most where it does not."""
        declared = self._headers.get(b"content-length", b"")
        if not declared.isdigit():
            return self._bodies.largest if b"transfer-encoding" in self._headers else 0
        if len(declared) > 18 or int(declared) > self._bodies.largest:
            raise self._too_large()
        return int(declared)

    def _holds(self, num_bytes: int) -> None:
        """Now it is so large; what it does not need is the next one's."""
        if spare := self._num_bytes - num_bytes:
            self._num_bytes = num_bytes
            self._bodies.free(spare)

    async def _read(self) -> bytes:
        bodies, now = self._bodies, asyncio.get_running_loop().time
        ends = now() + bodies.deadline_s
        try:
            async with asyncio.timeout(min(bodies.stall_s, bodies.deadline_s)) as stalled:

                def on_part() -> None:
                    stalled.reschedule(min(now() + bodies.stall_s, ends))

                return await self._parts(on_part)
        except TimeoutError as error:
            raise TooSlow(
                f"The body did not arrive within {bodies.deadline_s:g} s, or nothing of it for {bodies.stall_s:g} s.",
                "",
                "Send it again on a better connection.",
            ) from error

    async def _parts(self, on_part: Callable[[], None]) -> bytes:
        parts, num_bytes = list[bytes](), 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > self._bodies.largest:
                raise self._too_large()
            if not message.get("more_body"):
                return b"".join(parts)
            on_part()

    async def _inflated(self, body: bytes, encoding: bytes) -> bytes:
        """What a client calls encoded and is not, or as nobody knows, is left to the reader of JSON."""
        if not body or not (encoding in (b"gzip", b"x-gzip") or (b"gzip" in encoding and body[:2] == GZIPPED)):
            return body
        largest = self._bodies.largest
        if len(body) <= LARGE_PACKED:
            try:
                return inflate(body, min(INFLATED_AT_ONCE, largest))
            except TooLarge:
                if largest <= INFLATED_AT_ONCE:
                    raise
        return await asyncio.to_thread(inflate, body, largest)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body is larger than {self._bodies.largest} bytes.", "", "Send fewer groups at once.")


def inflate(body: bytes, limit: int = LARGEST_BODY) -> bytes:
    """A gzip body, one member or a few.

    Raises:
        BadBody: the gzip stream is broken or ends early.
        TooLarge: it is beyond the limit.
    """
    parts, left = [], limit
    while body or not parts:
        if len(parts) == MOST_MEMBERS:
            raise BadBody(f"The gzip body has more than {MOST_MEMBERS} members.", "", "Send it as one.")
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
