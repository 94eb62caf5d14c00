"""The heartbeat of an environment's event loop, for the process that started it and would end it
where it hangs.

HALTERES_HEARTBEAT names a file. The loop touches it every second; what stands in it is the draw on
whose item the loop is at work, so that a loop that hangs has left which item that was. Shortly
before it would be ended, its stack goes to the log (`faulthandler`), whatever holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from halteres.config import environ
from halteres.rollouts.rng import Draw, current_draw

BEATS_PER_LIMIT, SLOWEST_BEAT_S = 8, 1.0
DUMPED_AT = 0.8  # share of the limit after which the stack is written

T = TypeVar("T")


class Heartbeat:
    """One file of one process."""

    def __init__(self, file: Path, limit_s: float) -> None:
        """Make it.

        Args:
            file: it is made, or emptied.
            limit_s: the silence, in s, after which the process is ended.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor, self._limit_s = os.open(file, flags, 0o644), limit_s

    async def beat(self) -> None:
        """Beat until cancelled."""
        every_s = min(SLOWEST_BEAT_S, self._limit_s / BEATS_PER_LIMIT)
        while True:
            os.utime(self._descriptor)
            # a stream that is no file, as in a test
            with contextlib.suppress(io.UnsupportedOperation, AttributeError):
                faulthandler.dump_traceback_later(DUMPED_AT * self._limit_s, file=sys.stderr)
            await asyncio.sleep(every_s)

    def note(self, item: bytes) -> None:
        """From here on the loop is at work on this (`_item`)."""
        # on a full disk the file lacks the item
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, item, 0)

    def close(self) -> None:
        """Write no stack any more."""
        faulthandler.cancel_dump_traceback_later()
        os.close(self._descriptor)


def _item(draw: Draw | None, *, drawing: bool = False) -> bytes:
    """The content of the file: the draw on whose item the loop is at work; None: on none."""
    text = ""
    if draw is not None:
        facts = {"draw_step": draw.step, "ordinal": draw.ordinal, "drawing": drawing}
        text = json.dumps(facts)
    return text.ljust(100).encode() + b"\n"


_NO_ITEM = _item(None)
_heartbeat: Heartbeat | None = None  # of this process


@asynccontextmanager
async def beating(ends_after_s: float = 0.0) -> AsyncIterator[None]:
    """Inside, this process gives its heartbeat, where it was asked for one. One that was not asked,
    and whose loop hangs for `ends_after_s`, writes its stack to standard error and ends with code
    1; 0: it does not.
    """
    global _heartbeat
    asked, heartbeat = environ.heartbeat(), None
    if asked is not None:
        # the process that asked sees no file, and does not watch
        with contextlib.suppress(OSError):
            heartbeat = Heartbeat(asked.file, asked.limit_s)
    if asked is None or heartbeat is None:
        async with _ending_itself(ends_after_s):
            yield
        return
    _heartbeat = heartbeat
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_task)
    task = loop.create_task(heartbeat.beat(), name="heartbeat")
    try:
        yield
    finally:
        _heartbeat = None
        loop.set_task_factory(None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        heartbeat.close()
        asked.file.unlink(missing_ok=True)


@asynccontextmanager
async def _ending_itself(after_s: float) -> AsyncIterator[None]:
    if after_s <= 0:
        yield
        return

    async def put_off() -> None:
        while True:
            with contextlib.suppress(io.UnsupportedOperation, AttributeError):
                faulthandler.dump_traceback_later(after_s, exit=True, file=sys.stderr)
            await asyncio.sleep(min(SLOWEST_BEAT_S, after_s / BEATS_PER_LIMIT))

    task = asyncio.get_running_loop().create_task(put_off(), name="hang limit")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def drawing(draw: Draw) -> Iterator[None]:
    """Inside, the item of this draw is being drawn."""
    if _heartbeat is None:
        yield
        return
    heartbeat = _heartbeat
    heartbeat.note(_item(draw, drawing=True))
    try:
        yield
    finally:
        heartbeat.note(_NO_ITEM)


def _task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """A task factory: tasks that belong to an item say so whenever the loop turns to them."""
    if current_draw() is None:
        return asyncio.Task(work, loop=loop, **options)
    return asyncio.Task(noted(work), loop=loop, **options)


async def noted(work: Coroutine[Any, Any, T]) -> T:
    """Do the work; whenever the loop turns to it, the heartbeat names the item that it is for."""
    return await _Noted(work)


class _Noted(Awaitable[T]):
    """Steps a coroutine as `await` would."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        item = _item(current_draw())
        go_on: Callable[[], Any] = partial(self._work.send, None)
        while True:
            heartbeat = _heartbeat
            if heartbeat is not None:
                heartbeat.note(item)
            try:
                waits_for = go_on()
            except StopIteration as ended:
                return ended.value
            finally:
                if heartbeat is not None and heartbeat is _heartbeat:
                    heartbeat.note(_NO_ITEM)
            try:
                go_on = partial(self._work.send, (yield waits_for))
            # cancellation, too: the work decides what becomes of it
            except BaseException as error:  # noqa: BLE001
                go_on = partial(self._work.throw, error)
