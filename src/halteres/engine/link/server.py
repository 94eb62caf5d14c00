"""The engine's side of the link: one engine answered on a Unix socket.

Owns: calls under way on each connection, their cancellation, what becomes of an engine's own bugs.
Never: changes the order in which frames came; keeps anything across a restart.

A connection that ends takes with it what only its caller can want: samples and streams. All other calls change
something, and are finished.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec

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

log = logging.getLogger(__name__)


class LinkServer:
    """Answers calls on a Unix socket from one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._running: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.closed = asyncio.Event()  # a client asked the engine to end

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends."""
        self._writers.add(writer)
        cancellable: dict[int, asyncio.Task[None]] = {}
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                call = decode_call(await read_frame(reader))
                if call.operation == CANCEL:
                    if call.number in cancellable:
                        cancellable[call.number].cancel()
                    continue
                await self._slots.acquire()
                answered = self._begun(call, writer)
                answered.add_done_callback(lambda _: self._slots.release())
                if call.operation in CANCELLABLE:
                    cancellable[call.number] = answered
                    answered.add_done_callback(lambda _, number=call.number: cancellable.pop(number))
        self._writers.discard(writer)
        writer.close()
        for answered in cancellable.values():
            answered.cancel()

    async def stop(self) -> None:
        """Cancel what runs and end every connection."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    def _begun(self, call: Call, writer: asyncio.StreamWriter) -> asyncio.Task[None]:
        """The call on its way into the engine; tasks start in the order in which they are made: frames keep theirs."""
        answering = self._stream if call.operation in STREAMED else self._answer
        task = asyncio.create_task(answering(call, writer), name=f"engine {call.operation}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _answer(self, call: Call, writer: asyncio.StreamWriter) -> None:
        failures: list[Failure] = []
        result = NOTHING
        with _caught(call.operation, failures):
            arguments = OPERATIONS[call.operation].arguments.decode(call.arguments)
            answer = await getattr(self._engine, call.operation)(*msgspec.structs.astuple(arguments))
            result = msgspec.Raw(encode(answer))
        await _write(writer, Reply(call.number, result, failures[0] if failures else None))
        if call.operation == "close":
            self.closed.set()

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
