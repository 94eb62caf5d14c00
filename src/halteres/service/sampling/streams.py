"""A stream that outlives its engine.

Owns: asking the next engine when one dies under a stream, and leaving out what was told before.
Never: draws a seed: the request holds it, so that every exact engine writes the same tokens; puts one draw's end behind
another's beginning: a stream of an engine that is not exact ends with it, once something was told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from halteres.engine.protocol import EngineGone, Piece, Samples, TopK
from halteres.errors import ServerError
from halteres.service.fleet import Host, successors


class StreamBroken(ServerError):
    """A stream that no engine can go on with."""

    code = "stream_broken"


T = TypeVar("T")

TOKEN_BYTES = 4


async def outliving(
    pick: Callable[[], Host[Samples]], begin: Callable[[Samples], AsyncGenerator[Piece, None]]
) -> AsyncGenerator[Piece, None]:
    """The pieces of a stream that needs nothing an engine held before; if that engine dies, the next one goes on.

    Raises:
        StreamBroken: an engine died that had told something, and the next would write something else.
        EngineDied: engines keep dying under this one stream.
        NotReady: no engine is running.
    """
    told: Counter[int] = Counter()  # tokens of each sequence
    async with aclosing(successors(pick)) as engines:
        async for engine in engines:
            written: Counter[int] = Counter()  # by this engine
            try:
                if told and not (await engine.info()).exact:
                    raise StreamBroken(
                        "The engine died under this stream.",
                        "Its successor would not write the same tokens again.",
                        "Send the request again, with what has come as its prompt where that will do.",
                    )
                async with aclosing(begin(engine)) as pieces:
                    async for piece in pieces:
                        known = told[piece.sample] - written[piece.sample]
                        written[piece.sample] += len(piece.tokens) // TOKEN_BYTES
                        if (news := without(piece, max(0, known))) is not None:
                            told[piece.sample] = written[piece.sample]
                            yield news
                return
            except EngineGone:
                continue


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
