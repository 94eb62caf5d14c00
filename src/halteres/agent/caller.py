"""Who calls a tool.

Owns: the noun: which draft the call works on where it names none, through which face it came, in whose threads it runs;
the bound on what callers without the token hold.
Never: authenticates anybody; a face does.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from halteres.errors import NotReady, UserError

T = TypeVar("T")

OPEN_CALLS: Final = 2
"""Calls of one tool that run at once for all callers without the token together."""


class Busy(NotReady):
    """More calls at once than a caller may hold; nothing was begun."""

    code = "busy"


class TokenNeeded(UserError):
    """More than a caller without the token may ask for."""

    code, status = "unauthorized", 401

    @classmethod
    def of(cls, what: str, why: str, **details: Any) -> TokenNeeded:
        """With what is true of every such call, and how the token is sent."""
        return cls(what, f"{why}, and every user of this machine can ask here.", _NEXT, **details)


_NEXT: Final = "Send the token, which is in HALTERES_HOME/token: RL_API_URL=http://halteres:TOKEN@localhost:8080"


class OpenThreads:
    """The threads of callers without the token: a call that waits in one holds up neither the server nor other tools.

    A place is given back when the thread is done, not when its call is given up.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(64, "open call")  # threads are made at need; the bound is `OPEN_CALLS`

    async def run(self, tool: str, function: Callable[..., T], *arguments: Any) -> T:
        """What the function answers. Busy where as many run already for this tool."""
        with self._lock:
            if self._held[tool] >= OPEN_CALLS:
                raise Busy(
                    f"{OPEN_CALLS} calls of {tool} run already for callers without the token.",
                    "More are not begun.",
                    "call it again in some seconds; with the token, which is in HALTERES_HOME/token, it runs at once",
                )
            self._held[tool] += 1
        work = self._pool.submit(function, *arguments)
        work.add_done_callback(lambda _: self._give_back(tool))
        return await asyncio.wrap_future(work)

    def _give_back(self, tool: str) -> None:
        with self._lock:
            self._held[tool] -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Where a call comes from."""

    draft: str = "default"  # handle of the draft it works on, unless the call names one
    face: str = "python"  # mcp, http, cli, python, hermes: for logs alone, no answer depends on it
    open_threads: OpenThreads | None = None  # of a caller without the token

    async def in_thread(self, tool: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run what reads files or asks an environment, off the event loop."""
        if self.open_threads is None:
            return await asyncio.to_thread(function, *arguments)
        return await self.open_threads.run(tool, function, *arguments)
