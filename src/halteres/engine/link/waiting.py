"""Calls that wait for their replies, as the link's client keeps them.

Owns: what a reply frame does to its call: it settles one that has a single answer, it feeds one that streams.
Never: reads a socket; knows when a link is broken.
"""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Protocol

import msgspec

from halteres.engine.link.pieces import PieceQueue
from halteres.engine.link.wire import Operation, Reply, unpacked
from halteres.errors import HalteresError


class Waiting(Protocol):
    """One call that has no whole answer yet."""

    def take(self, reply: Reply) -> None:
        """A frame has come for it."""
        ...

    def fail(self, error: HalteresError) -> None:
        """None will come any more."""
        ...


class OneAnswer:
    """A call whose single reply is its answer."""

    def __init__(self) -> None:
        self.future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()

    def take(self, reply: Reply) -> None:
        """See `Waiting`."""
        if self.future.done():
            return
        if reply.failure is None:
            self.future.set_result(reply.result)
        else:
            self.future.set_exception(unpacked(reply.failure))

    def fail(self, error: HalteresError) -> None:
        """See `Waiting`."""
        if not self.future.done():
            self.future.set_exception(copy(error))


class ManyPieces:
    """A call whose replies are pieces, until one says that it was the last."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self.pieces = PieceQueue()

    def take(self, reply: Reply) -> None:
        """See `Waiting`."""
        if reply.more:
            self.pieces.put(self._operation.result.decode(reply.result))
        else:
            self.pieces.end(None if reply.failure is None else unpacked(reply.failure))

    def fail(self, error: HalteresError) -> None:
        """See `Waiting`."""
        self.pieces.end(copy(error))
