"""Keep-alive connections of an async client, opened at the first call and closed with it.

Owns: the life of one aiohttp session.
Never: sends anything.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # the trainer's client needs none of it
    import aiohttp


class Connected:
    """A client with connections: `async with` closes them, and so does `close`."""

    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
