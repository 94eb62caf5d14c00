"""The engine's side of the link: one engine answered on a Unix socket.

Owns: calls under way, answers remembered by journal id, what becomes of an engine's own bugs.
Never: changes the order in which frames came; keeps anything across a restart.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from halteres.engine.protocol import Engine
from halteres.engine.wire import (
    NOTHING,
    OPERATIONS,
    Call,
    Failure,
    Reply,
    decode_call,
    encode,
    packed,
    read_frame,
    write_frame,
)
from halteres.errors import HalteresError, NotReady, ServerError

MAX_RUNNING = 4096
MAX_REMEMBERED = 1024
MAX_REMEMBERED_BYTES = 64 * 2**20

T = TypeVar("T")

log = logging.getLogger(__name__)


class LinkServer:
    """Answers calls on a Unix socket from one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._running: set[asyncio.Task[Any]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._answers = _Answers()
        self.closed = asyncio.Event()  # a client asked the engine to end

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends. Calls under way are finished all the same: a repetition may ask for them."""
        self._writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                call = decode_call(await read_frame(reader))
                await self._slots.acquire()
                replied = self._own(asyncio.create_task(self._reply(call, self._execution(call), writer)))
                replied.add_done_callback(lambda _: self._slots.release())
        self._writers.discard(writer)
        writer.close()

    async def stop(self) -> None:
        """Cancel what runs and end every connection."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    def _own(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _execution(self, call: Call) -> asyncio.Task[Answer]:
        """The call on its way into the engine, started here and now: frames keep their order."""

        def started() -> asyncio.Task[Answer]:
            return self._own(asyncio.create_task(self._execute(call), name=f"engine {call.operation}"))

        return (
            started() if call.journal_id is None else self._answers.once(f"{call.operation} {call.journal_id}", started)
        )

    async def _reply(self, call: Call, execution: asyncio.Task[Answer], writer: asyncio.StreamWriter) -> None:
        result, failure = await asyncio.shield(execution)
        if not writer.is_closing():
            with suppress(ConnectionError):
                write_frame(writer, encode(Reply(call.number, result, failure)))
                await writer.drain()
        if call.operation == "close":
            self.closed.set()

    async def _execute(self, call: Call) -> Answer:
        try:
            arguments = OPERATIONS[call.operation].arguments.decode(call.arguments)
            result = await getattr(self._engine, call.operation)(*msgspec.structs.astuple(arguments))
            return msgspec.Raw(encode(result)), None
        except HalteresError as error:
            return NOTHING, packed(error)
        except Exception as error:  # the boundary between an engine's bugs and the service
            name = uuid.uuid4().hex[:8]
            log.exception("Engine call %s failed, error id %s.", call.operation, name)
            what = f"The engine failed in {call.operation} (error id {name})."
            return NOTHING, packed(ServerError(what, f"{type(error).__name__}: {error}.", "See the engine's log."))


Answer = tuple[msgspec.Raw, Failure | None]


class _Answers:
    """The last answers by journal id; bounded in number and bytes, the oldest go first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, asyncio.Task[Answer]] = OrderedDict()
        self._bytes = 0

    def once(self, key: str, start: Callable[[], asyncio.Task[Answer]]) -> asyncio.Task[Answer]:
        """The first call under this key, which may be done or under way; `start` makes it."""
        if key not in self._known:
            self._known[key] = start()
            self._known[key].add_done_callback(lambda done: self._remember(key, done))
        return self._known[key]

    def _remember(self, key: str, task: asyncio.Task[Answer]) -> None:
        if task.cancelled() or ((failure := task.result()[1]) and failure.kind == NotReady.__name__):
            del self._known[key]  # no answer at all: asking again is right
            return
        self._bytes += memoryview(task.result()[0]).nbytes
        while len(self._known) > MAX_REMEMBERED or self._bytes > MAX_REMEMBERED_BYTES:
            oldest = next((known for known, old in self._known.items() if old.done()), None)
            if oldest is None:
                return
            self._bytes -= memoryview(self._known.pop(oldest).result()[0]).nbytes


@asynccontextmanager
async def serve(engine: Engine, socket_path: Path) -> AsyncIterator[LinkServer]:
    """Answer on the socket while the block runs; it is listening when the block begins. The engine is not closed."""
    link = LinkServer(engine)
    server = await asyncio.start_unix_server(link.converse, socket_path)
    try:
        yield link
    finally:
        server.close()
        await link.stop()
