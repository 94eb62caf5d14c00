"""The end of a service, as answers under way hear of it.

Owns: cutting them short, and the error that they then end with.
Never: waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Scope

from halteres.errors import NotReady


class ServiceEnds(NotReady):
    """The service was told to end while this was under way."""

    code = "service_ends"


class Ending:
    """Begins once."""

    def __init__(self) -> None:
        self._begun = False
        self._open: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """Cut every answer short; a signal's handler may call this."""
        if not self._begun:
            self._begun = True
            for scope in tuple(self._open):
                _cut(scope)

    @asynccontextmanager
    async def heard(self) -> AsyncIterator[None]:
        """The block is cut short when the end begins.

        Raises:
            ServiceEnds: it was.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._open.add(scope)
                if self._begun:
                    _cut(scope)
                try:
                    yield
                finally:
                    self._open.discard(scope)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise ServiceEnds("The service ends.", next="Ask again in a moment.") from error


def _cut(scope: asyncio.Timeout) -> None:
    scope.reschedule(asyncio.get_running_loop().time())


def ending_of(scope: Scope) -> Ending:
    """The end of the service that a request came to."""
    ending: Ending = scope["app"].state.ending
    return ending
