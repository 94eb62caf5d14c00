"""Calls on their way through the engine, and the last answers by journal id.

Owns: who still waits for a call; that a repetition joins the first one; how many answers are remembered, and which.
Never: writes to a link; keeps anything across a restart.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from halteres.engine.link.wire import ERROR_KINDS, Failure
from halteres.errors import NotReady

MAX_REMEMBERED = 1024
MAX_REMEMBERED_BYTES = 64 * 2**20

Answer = tuple[msgspec.Raw, Failure | None]


class Execution:
    """One call inside the engine, and how many wait for its answer."""

    def __init__(self, task: asyncio.Task[Answer]) -> None:
        self.task, self._callers = task, 0

    def join(self) -> None:
        """One more waits for it."""
        self._callers += 1

    def leave(self) -> None:
        """One fewer does; with the last of them goes a call that is not done."""
        self._callers -= 1
        if self._callers == 0:
            self.task.cancel()


class Remembered:
    """The last executions by journal id; bounded in number and bytes, the oldest go first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Execution] = OrderedDict()
        self._bytes = 0

    def once(self, key: str, start: Callable[[], asyncio.Task[Answer]]) -> Execution:
        """The first call under this key, which may be done or under way; `start` makes it."""
        known = self._known.get(key)
        if known is None or known.task.cancelling():
            known = self._known[key] = Execution(start())
            known.task.add_done_callback(lambda task: self._remember(key, task))
        return known

    def _remember(self, key: str, task: asyncio.Task[Answer]) -> None:
        known = self._known.get(key)
        if known is None or known.task is not task:
            return
        if task.cancelled() or ((failure := task.result()[1]) and issubclass(ERROR_KINDS[failure.kind], NotReady)):
            del self._known[key]  # no answer at all: asking again is right
            return
        self._bytes += memoryview(task.result()[0]).nbytes
        while len(self._known) > MAX_REMEMBERED or self._bytes > MAX_REMEMBERED_BYTES:
            oldest = next((known for known, old in self._known.items() if old.task.done()), None)
            if oldest is None:
                return
            self._bytes -= memoryview(self._known.pop(oldest).task.result()[0]).nbytes
