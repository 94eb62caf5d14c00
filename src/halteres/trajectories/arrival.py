"""A body on its way, that is more than a few packets: written once, to where it is read.

Owns: where its next bytes go; who is told when it is whole, or never will be.
Never: parses, knows a socket.

    head ──▶ Arrival ── LARGE: its place is there already ──────────────────────────────▶ the body
                └────── VERY_LARGE: it stays with the kernel ── whole(): room for it ──┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np
from starlette.requests import ClientDisconnect

SCOPE_KEY: Final = "halteres.arrival"
"""Where an ASGI scope has it, of a request whose body is large."""

LARGE = 64 * 1024
"""Bytes of a body from which copying it from part to part costs more than stopping for its place."""

VERY_LARGE = 512 * 1024
"""Bytes beyond which a body has no place until somebody has admitted it."""

SCRATCH = memoryview(bytearray(16 * 1024))
"""Where heads and small bodies come in, of all connections, and what nobody wants: each is parsed before the next
read. Smaller than LARGE, so that no large body is whole with its head."""


class Arrival:
    """A body of known length.

    Args:
        length: bytes.
        go_on: makes the connection read on.
    """

    def __init__(self, length: int, go_on: Callable[[], None]) -> None:
        self.left = length  # bytes to come
        self._length, self._go_on = length, go_on
        self._body = None if length > VERY_LARGE else _room_for(length)
        self._first = b""  # what came together with its head, where it has no place yet
        self._heard: Callable[[], None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._is_lost = False

    @property
    def has_place(self) -> bool:
        """Reading may go on."""
        return self._body is not None

    @property
    def is_whole(self) -> bool:
        """Nothing is to come any more."""
        return not self.left

    async def whole(self, heard: Callable[[], None] = lambda: None) -> memoryview:
        """Make room where there is none yet, and wait until it is filled. `heard` is called with every part that comes.

        Raises:
            ClientDisconnect: it will not come, or was let pass.
        """
        if self._is_lost:
            raise ClientDisconnect
        if self._body is None:
            self._body = _room_for(self._length)
            self._body[: len(self._first)] = self._first
            self._go_on()
        if self.left:
            self._heard, self._done = heard, asyncio.get_running_loop().create_future()
            await self._done
        return self._body

    def start(self, first: bytes) -> None:
        """What came together with the head."""
        if self._body is None:
            self._first = first
        else:
            self._body[: len(first)] = first
        self.left -= len(first)

    def room(self) -> memoryview:
        """Where its next bytes go; of a body that nobody wanted, nowhere."""
        return SCRATCH[: self.left] if self._body is None else self._body[self._length - self.left :]

    def came(self, num_bytes: int) -> None:
        """So many bytes were written to `room`."""
        self.left -= num_bytes
        self._is_lost = self._is_lost or self._body is None
        if self._done is None or self._done.done():
            return
        if not self.left:
            self._done.set_result(None)
        elif self._heard is not None:
            self._heard()

    def lose(self) -> None:
        """The connection is gone."""
        self._is_lost = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(ClientDisconnect())


def _room_for(num_bytes: int) -> memoryview:
    return memoryview(np.empty(num_bytes, np.uint8))  # type: ignore[arg-type] - it is a buffer; a bytearray is zeroed
