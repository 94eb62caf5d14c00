"""The engine's side of the link: one engine answered on a Unix socket.

Owns: calls under way on each connection, their cancellation, what becomes of an engine's own bugs.
Never: changes the order in which frames came; keeps anything across a restart.

A connection that ends takes with it what only its caller can want: streams, and samples without a journal id. All other
calls are finished: a repetition may ask for them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from halteres.engine.link.executions import Answer, Execution, Remembered
from halteres.engine.link.wire import (
    CANCEL,
    CANCELLABLE,
    NOTHING,
    OPERATIONS,
    STREAMED,
    Call,
    Failure,
    Reply,
    decode_call,
    encode,
    packed,
    read_frame,
    write_frame,
)
from halteres.engine.protocol import Engine
from halteres.errors import HalteresError, ServerError

MAX_RUNNING = 4096

T = TypeVar("T")

log = logging.getLogger(__name__)


class LinkServer:
    """Answers calls on a Unix socket from one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._running: set[asyncio.Task[Any]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._answers = Remembered()
        self.closed = asyncio.Event()  # a client asked the engine to end

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends."""
        self._writers.add(writer)
        cancellable: dict[int, tuple[Call, asyncio.Task[None]]] = {}
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                call = decode_call(await read_frame(reader))
                if call.operation == CANCEL:
                    if call.number in cancellable:
                        cancellable[call.number][1].cancel()
                    continue
                await self._slots.acquire()
                answered = self._begun(call, writer)
                answered.add_done_callback(lambda _: self._slots.release())
                if call.operation in CANCELLABLE:
                    cancellable[call.number] = call, answered
                    answered.add_done_callback(lambda _, number=call.number: cancellable.pop(number))
        self._writers.discard(writer)
        writer.close()
        for call, answered in cancellable.values():
            if call.journal_id is None or call.operation in STREAMED:
                answered.cancel()

    async def stop(self) -> None:
        """Cancel what runs and end every connection."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    def _own(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _begun(self, call: Call, writer: asyncio.StreamWriter) -> asyncio.Task[None]:
        """The call on its way into the engine, started here and now: frames keep their order."""
        if call.operation in STREAMED:
            return self._own(self._stream(call, writer), f"engine {call.operation}")
        execution = self._execution(call)
        execution.join()
        answered = self._own(self._reply(call, execution, writer), f"engine reply {call.operation}")
        answered.add_done_callback(lambda _: execution.leave())
        return answered

    def _execution(self, call: Call) -> Execution:
        def start() -> asyncio.Task[Answer]:
            return self._own(self._execute(call), f"engine {call.operation}")

        if call.journal_id is None:
            return Execution(start())
        return self._answers.once(f"{call.operation} {call.journal_id}", start)

    async def _reply(self, call: Call, execution: Execution, writer: asyncio.StreamWriter) -> None:
        result, failure = await asyncio.shield(execution.task)
        await _write(writer, Reply(call.number, result, failure))
        if call.operation == "close":
            self.closed.set()

    async def _execute(self, call: Call) -> Answer:
        failures: list[Failure] = []
        with _caught(call.operation, failures):
            arguments = OPERATIONS[call.operation].arguments.decode(call.arguments)
            result = await getattr(self._engine, call.operation)(*msgspec.structs.astuple(arguments))
            return msgspec.Raw(encode(result)), None
        return NOTHING, failures[0]

    async def _stream(self, call: Call, writer: asyncio.StreamWriter) -> None:
        """Every piece is written before the next is asked for: a full socket holds the stream up, not the engine."""
        failures: list[Failure] = []
        with _caught(call.operation, failures):
            arguments = OPERATIONS[call.operation].arguments.decode(call.arguments)
            pieces = getattr(self._engine, call.operation)(*msgspec.structs.astuple(arguments))
            async with aclosing(pieces):
                async for piece in pieces:
                    await _write(writer, Reply(call.number, msgspec.Raw(encode(piece)), more=True))
        await _write(writer, Reply(call.number, NOTHING, failures[0] if failures else None))


async def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    if not writer.is_closing():
        with suppress(ConnectionError):
            write_frame(writer, encode(reply))
            await writer.drain()


@contextmanager
def _caught(operation: str, failures: list[Failure]) -> Iterator[None]:
    """The boundary between an engine and the service: what is raised inside becomes a failure for the wire."""
    try:
        yield
    except HalteresError as error:
        failures.append(packed(error))
    except Exception as error:  # an engine's own bugs
        name = uuid.uuid4().hex[:8]
        log.exception("Engine call %s failed, error id %s.", operation, name)
        what = f"The engine failed in {operation} (error id {name})."
        failures.append(packed(ServerError(what, f"{type(error).__name__}: {error}.", "See the engine's log.")))


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
