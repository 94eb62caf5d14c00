"""The bodies that are being read, all together: bounded in bytes and in time.

Owns: how many bytes of bodies are held at once, and who waits meanwhile; how long a body may take to arrive.
Never: understands a body; lets a small one, such as a heartbeat, wait for large ones.

    admitted (room for what it declares) ──▶ read, at most DEADLINE_S ──▶ inflated ──▶ used ──▶ let go, the next one in
                                             └── room it did not need: the next one in
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from halteres.errors import UserError
from halteres.trajectories.wire.encoding import TooLarge, inflate

AT_ONCE = 1024**3
"""Bytes of all bodies being read or used; beyond, later ones wait, but for small ones."""

SMALL = 64 * 1024
"""Bytes up to which a body that says its length waits for nobody: a connection may keep eight times as much anyway."""

LARGE_PACKED = 128 * 1024
"""Bytes of gzip from which a thread inflates them: of what clients send, 1 MB or more inside."""

AT_A_GLANCE = 1024 * 1024
"""Bytes that are inflated on the event loop, in 2 ms at most. What holds more begins again in a thread."""

GZIPPED = b"\x1f\x8b"
"""How every gzip stream begins."""

STALL_S = 10.0
"""How long nothing of a body may arrive: one that says no more holds its place for no longer."""

DEADLINE_S = 120.0
"""How long a body may take from its first byte to its last: one that trickles holds its place for no longer."""


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

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, whole and inflated; its bytes count until the context ends.

        Raises:
            BadBody: the gzip stream is broken or ends early.
            TooLarge, TooSlow: it is beyond the limits.
        """
        async with self._room(self._declared(request)) as room:
            body = await self._read(request)
            room.holds(len(body))
            if encoding := request.headers.get("content-encoding"):
                body = await self._inflated(body, encoding.lower())
                room.holds(len(body))
            yield body

    def _declared(self, request: Request) -> int:
        """Bytes to keep room for: those it says, or the most where it does not."""
        declared = request.headers.get("content-length", "")
        if not declared.isdecimal():
            return self.largest if "transfer-encoding" in request.headers else 0
        if len(declared) > 18 or int(declared) > self.largest:
            raise self._too_large()
        return int(declared)

    @asynccontextmanager
    async def _room(self, num_bytes: int) -> AsyncIterator[_Room]:
        """Room for a body; a small one's is always there."""
        is_small = num_bytes <= self.small
        if is_small:
            self.held += num_bytes
        else:
            await self._admit(num_bytes)
        room = _Room(self, num_bytes)
        try:
            yield room
        finally:
            self._let_go(room.num_bytes, num_admitted=0 if is_small else 1)

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
                self._let_go(num_bytes, num_admitted=1)
            raise

    def _has_room(self, num_bytes: int) -> bool:
        return self._num_admitted == 0 or self.held + num_bytes <= self.at_once

    def _take(self, num_bytes: int) -> None:
        self.held += num_bytes
        self._num_admitted += 1

    def _let_go(self, num_bytes: int, num_admitted: int = 0) -> None:
        """Bytes, and as many bodies that are not small."""
        self.held -= num_bytes
        self._num_admitted -= num_admitted
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            wanted, turn = self._waiting.popleft()
            if not turn.done():  # its request was given up
                self._take(wanted)
                turn.set_result(None)

    async def _read(self, request: Request) -> bytes:
        try:
            return await self._chunks(request)
        except TimeoutError as error:
            raise TooSlow(
                f"The body did not arrive within {self.deadline_s:g} s, or nothing of it for {self.stall_s:g} s.",
                "",
                "Send it again on a better connection.",
            ) from error

    async def _chunks(self, request: Request) -> bytes:
        chunks, num_bytes, now = list[bytes](), 0, asyncio.get_running_loop().time
        ends, declared = now() + self.deadline_s, request.headers.get("content-length")
        async with asyncio.timeout(min(self.stall_s, self.deadline_s)) as patience:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > self.largest:
                    raise self._too_large()
                chunks.append(chunk)
                if str(num_bytes) != declared:  # most bodies come as one, and need no clock set anew
                    patience.reschedule(min(now() + self.stall_s, ends))
        return b"".join(chunks)

    async def _inflated(self, body: bytes, encoding: str) -> bytes:
        """What a client calls encoded and is not, or as nobody knows, is left to the reader of JSON."""
        if not body or not (encoding in ("gzip", "x-gzip") or ("gzip" in encoding and body.startswith(GZIPPED))):
            return body
        if len(body) <= LARGE_PACKED:
            try:
                return inflate(body, min(AT_A_GLANCE, self.largest))
            except TooLarge:
                if self.largest <= AT_A_GLANCE:
                    raise
        return await asyncio.to_thread(inflate, body, self.largest)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body is larger than {self.largest} bytes.", "", "Send fewer groups at once.")


@dataclass(slots=True)
class _Room:
    """What one body is counted with: at first with what it declares, then with what it is."""

    _bodies: Bodies
    num_bytes: int

    def holds(self, num_bytes: int) -> None:
        """Now it is so large; what it does not need is the next one's."""
        spare, self.num_bytes = self.num_bytes - num_bytes, num_bytes
        self._bodies._let_go(spare)  # pyright: ignore[reportPrivateUsage] - the other half of it
