"""Waiting for what another process does, which can set no event here: it is asked again until a
deadline.

Owns: the only interval in the tests.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

ASK_EVERY_S = 0.02


def wait_until(ask: Callable[[], T], within_s: float = 20, what: str = "") -> T:
    """The first true value of `ask`."""
    ends = time.monotonic() + within_s
    while not (answer := ask()):
        assert time.monotonic() < ends, f"not within {within_s} s: {what or answer}"
        time.sleep(ASK_EVERY_S)
    return answer


async def until(
    ask: Callable[[], Awaitable[T] | T], within_s: float = 20, what: Callable[[], object] = str
) -> T:
    """The same in a loop, which goes on meanwhile; `what` tells afterwards what was waited for."""
    ends = time.monotonic() + within_s
    while True:
        asked = ask()
        answer = await asked if inspect.isawaitable(asked) else asked
        if answer:
            return answer
        assert time.monotonic() < ends, f"not within {within_s} s: {what()}"
        await asyncio.sleep(ASK_EVERY_S)
