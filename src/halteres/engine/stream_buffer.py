"""Pieces of one streamed request, between whoever samples and whoever reads.

What waits of one sequence is joined, so that a slow reader gets fewer, longer pieces. The writer is
never held up, and no more than the answer itself is buffered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from halteres.engine.protocol import Piece, TopK
from halteres.errors import HalteresError


class PieceQueue:
    """Written from any thread, read once, on the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._grown = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Piece]] = {}
        self._ended = False
        self._failure: HalteresError | None = None

    def put(self, piece: Piece) -> None:
        """The next tokens of a sequence."""
        with self._lock:
            first = not self._waiting
            self._waiting.setdefault(piece.sample, []).append(piece)
        if first:
            self._wake()

    def end(self, failure: HalteresError | None = None) -> None:
        """Nothing follows; the reader gets what waits, then `failure`."""
        with self._lock:
            self._ended, self._failure = True, failure
        self._wake()

    async def read(self) -> AsyncIterator[Piece]:
        """Pieces as they come, those of one sequence in order."""
        while True:
            await self._grown.wait()
            self._grown.clear()
            with self._lock:
                ready, self._waiting = self._waiting, {}
                ended, failure = self._ended, self._failure
            for pieces in ready.values():
                yield joined(pieces)
            if failure is not None:
                raise failure
            if ended:
                return

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the reader with it
            self._loop.call_soon_threadsafe(self._grown.set)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one sequence that follow each other, as one."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        sample=pieces[-1].sample,
        tokens=b"".join(piece.tokens for piece in pieces),
        logprobs=b"".join(piece.logprobs for piece in pieces),
        version=pieces[-1].version,
        top=end_to_end([piece.top for piece in pieces if piece.top is not None]),
        stop_reason=pieces[-1].stop_reason,
    )


def end_to_end(tops: Sequence[TopK]) -> TopK | None:
    """Lists of one k as one, or None where there are none."""
    if not tops:
        return None
    ids, logprobs = b"".join(top.ids for top in tops), b"".join(top.logprobs for top in tops)
    return TopK(k=tops[0].k, length=sum(top.length for top in tops), ids=ids, logprobs=logprobs)
