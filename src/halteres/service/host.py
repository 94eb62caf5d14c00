"""Where the engine lives, as the service sees it.

Owns: waiting for the engine with a deadline; asking its successor when one dies under a call.
Never: starts or restarts one (`halteres.engine.process.EngineProcess` is the host of every real service).

What an engine held dies with it. Whoever keeps something in an engine therefore remembers the engine itself as its
home, and compares: `home is host.engine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from halteres.engine.protocol import Engine, EngineGone
from halteres.errors import HalteresError, NotReady, ServerError

T = TypeVar("T")

READY_S = 900.0
"""How long a request waits for an engine that is starting."""

MAX_DEATHS = 3
"""Engines that may die under one request before it is held to be the cause, and fails."""


class EngineDied(ServerError):
    """The engine died again and again under one request."""

    code = "engine_died"


class Host(Protocol):
    """Keeps one engine alive."""

    restarts: int

    @property
    def state(self) -> str:
        """starting, ready, failed or stopped."""
        ...

    @property
    def failure(self) -> HalteresError | None:
        """Why the engine last died."""
        ...

    @property
    def engine(self) -> Engine:
        """The engine now running; NotReady if none was ever ready."""
        ...

    @property
    def pid(self) -> int | None:
        """Of its process."""
        ...

    async def start(self) -> None:
        """Start it and wait until it answers."""
        ...

    async def stop(self) -> None:
        """End it."""
        ...

    async def until(self, *states: Any, restarts: int = 0) -> None:
        """Wait until it is in one of these states; `ready` counts only after at least so many restarts."""
        ...


async def running(host: Host, *, restarts: int = 0) -> Engine:
    """The engine, once it is ready after at least so many restarts.

    Raises:
        NotReady: it was not within the deadline, or never will be.
    """
    try:
        async with asyncio.timeout(READY_S):
            await host.until("ready", "failed", "stopped", restarts=restarts)
    except TimeoutError:
        raise NotReady(f"The engine is not ready after {READY_S:g} s.", next="Ask again in a moment.") from None
    if host.state != "ready":
        raise NotReady("No engine is running.", host.failure.sentence if host.failure else "", "Restart the service.")
    return host.engine


async def survived(host: Host, call: Callable[[Engine], Awaitable[T]]) -> T:
    """The result of a call that needs nothing an engine held before; if that engine dies under it, the next is asked.

    Raises:
        EngineDied: engines keep dying under this one call.
        NotReady: no engine is running.
    """
    async with aclosing(successors(host)) as engines:
        async for engine in engines:
            try:
                return await call(engine)
            except EngineGone:
                if host.state in ("failed", "stopped"):
                    raise
    raise AssertionError("successors ends by raising")


async def successors(host: Host) -> AsyncGenerator[Engine, None]:
    """The engine, and after each death the next, until it is enough; whoever is content with one stops asking.

    Raises:
        EngineDied: engines keep dying under this one request.
        NotReady: no engine is running.
    """
    before = host.restarts
    for death in range(MAX_DEATHS):
        engine = await running(host, restarts=before + 1 if death else 0)
        before = host.restarts
        yield engine
    raise EngineDied(
        f"The engine died {MAX_DEATHS} times while it executed this request.",
        host.failure.sentence if host.failure else "",
        "Send less at once: fewer, shorter or smaller pieces.",
    )
