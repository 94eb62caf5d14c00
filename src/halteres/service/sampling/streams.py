"""A stream that outlives its engine.

Owns: asking the next engine when one dies under a stream, and leaving out what was told before.
Never: draws a seed: the request holds it, so that every engine writes the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from halteres.engine.protocol import Engine, EngineGone, Piece, TopK
from halteres.service.host import Host, successors

T = TypeVar("T")

TOKEN_BYTES = 4


async def outliving(host: Host, begin: Callable[[Engine], AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of a stream that needs nothing an engine held before; if that engine dies, the next one goes on.

    Raises:
        EngineDied: engines keep dying under this one stream.
        NotReady: no engine is running.
    """
    told: Counter[int] = Counter()  # tokens of each sequence
    async with aclosing(successors(host)) as engines:
        async for engine in engines:
            written: Counter[int] = Counter()  # by this engine
            try:
                async with aclosing(begin(engine)) as pieces:
                    async for piece in pieces:
                        known = told[piece.sample] - written[piece.sample]
                        written[piece.sample] += len(piece.tokens) // TOKEN_BYTES
                        if (news := without(piece, max(0, known))) is not None:
                            told[piece.sample] = written[piece.sample]
                            yield news
                return
            except EngineGone:
                if host.state in ("failed", "stopped"):
                    raise


def without(piece: Piece, known: int) -> Piece | None:
    """A piece without its first `known` tokens; None if that leaves nothing."""
    if known == 0:
        return piece
    skipped = known * TOKEN_BYTES
    if skipped >= len(piece.tokens):
        return None
    return Piece(
        sample=piece.sample,
        tokens=piece.tokens[skipped:],
        logprobs=piece.logprobs[skipped:],
        version=piece.version,
        top=None if piece.top is None else _rows_after(piece.top, known),
        stop_reason=piece.stop_reason,
    )


def _rows_after(top: TopK, known: int) -> TopK:
    skipped = known * top.k * TOKEN_BYTES
    return TopK(k=top.k, length=top.length - known, ids=top.ids[skipped:], logprobs=top.logprobs[skipped:])


@asynccontextmanager
async def ended(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """The items; whoever leaves the block early ends what makes them, at once."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()
