"""Several streams as one.

Owns: asking each of them for its next item, one at a time.
Never: reads ahead of its reader; outlives it: whoever stops reading ends every stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with its stream's number; the first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    asked = {asyncio.create_task(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while asked:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = asked.pop(task)
                for item in task.result():
                    asked[asyncio.create_task(_next(streams[at]))] = at
                    yield at, item
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next item, or nothing at the end."""
    try:
        return (await anext(stream),)
    except StopAsyncIteration:
        return ()
