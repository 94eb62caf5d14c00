"""Calls of `Engine` between the training service and an engine's process, as frames on a Unix
socket.

    service: connect(path) -> LinkedEngine        engine's process: serve(engine, path)

    Call(7, "sample", ...)    ──▶
                              ◀──   Reply(7, result)                  or with a failure
    Call(8, "stream", ...)    ──▶
                              ◀──   Reply(8, piece, more=True), again and again
                              ◀──   Reply(8, nothing)                 or with a failure
    Call(8, "cancel")         ──▶                                     no reply; nothing of call 8 is
                                                                      sent any more

A frame is four bytes of length, then msgpack with raw tensor bytes. Arguments and results are read
off the signatures of `Engine`. Calls reach the engine in the order in which they were made. A
broken connection fails every waiting call with EngineGone, and takes samples and streams with it;
all other calls change something, and run to their end. A stream that is read slowly gets longer
pieces (`stream_buffer`): neither the socket nor the engine waits for a reader.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import typing
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from halteres import errors
from halteres.engine import checks, protocol
from halteres.engine.protocol import Engine, EngineGone, Piece
from halteres.engine.stream_buffer import PieceQueue
from halteres.errors import HalteresError, InvalidData, NotReady, ServerError

MAX_FRAME_BYTES = 2**31

# no call takes longer. An engine that hangs is noticed sooner: `process` pings it.
CALL_DEADLINE_S = 3600.0
CANCEL = "cancel"  # the operation of a frame that gives up the call of its number
CANCELLABLE = ("sample", "stream")  # calls that end when their caller goes away

log = logging.getLogger(__name__)


class Call(msgspec.Struct, array_like=True):
    """One request frame."""

    number: int  # of the call on this connection
    operation: str  # a method of Engine, or CANCEL
    arguments: msgspec.Raw


class Failure(msgspec.Struct, array_like=True):
    """A HalteresError on its way."""

    kind: str
    what: str
    why: str
    next: str
    details: dict[str, Any]


class Reply(msgspec.Struct, array_like=True):
    """One answer frame: a result or a failure."""

    number: int
    result: msgspec.Raw
    failure: Failure | None = None
    more: bool = False  # of a stream: a piece, and others follow


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of `Engine`."""

    name: str
    arguments: type[msgspec.Struct]  # a field for each parameter
    result: Any  # the type of what it returns; of a stream, of each piece
    streamed: bool


def _operations() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for name in dir(Engine):
        method = getattr(Engine, name)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        hints = typing.get_type_hints(method)
        fields = [
            (one.name, hints[one.name])
            if one.default is one.empty
            else (one.name, hints[one.name], one.default)
            for one in inspect.signature(method).parameters.values()
            if one.name != "self"
        ]
        streamed = typing.get_origin(hints["return"]) is AsyncIterator
        result = typing.get_args(hints["return"])[0] if streamed else hints["return"]
        found[name] = Operation(
            name, msgspec.defstruct(name, fields, array_like=True), result, streamed
        )
    return found


OPERATIONS = _operations()

Execute = Callable[[Call], Awaitable[msgspec.Raw]]
"""Executes a call and returns its packed result; raises where it fails."""

NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))
encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.decode

ERROR_KINDS = {
    name: kind
    for room in (errors, checks, protocol)
    for name, kind in vars(room).items()
    if isinstance(kind, type) and issubclass(kind, HalteresError)
}


def packed(error: HalteresError) -> Failure:
    """An error for the wire; a class that only one room knows travels as its nearest common
    ancestor.
    """
    kind = next(kind for kind in type(error).__mro__ if kind in ERROR_KINDS.values())
    # an error must cross, whatever it carries
    details = msgspec.to_builtins(error.details, enc_hook=str)
    return Failure(kind.__name__, error.what, error.why, str(error.next), details)


def unpacked(failure: Failure) -> HalteresError:
    """The error that `packed` was given, as far as it crosses."""
    return ERROR_KINDS[failure.kind](failure.what, failure.why, failure.next, **failure.details)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return await reader.readexactly(size)


def _write_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(len(frame).to_bytes(4, "big"))
    writer.write(frame)


class LinkedEngine(Engine):
    """An `Engine` at the other end of a connection; below, it gets a method for each of
    `OPERATIONS`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[Reply], None]] = {}  # what takes each call's replies
        self._failure: Failure | None = None
        self.broken = asyncio.Event()
        self._listener = asyncio.create_task(self._listen(reader), name="engine connection")

    async def close(self) -> None:
        """End the engine at the other side, then the connection."""
        if self._failure is None:
            with suppress(NotReady):
                await self._call(OPERATIONS["close"])
        await self.disconnect()

    async def disconnect(self) -> None:
        """End the connection; the engine stays."""
        if self._failure is None:
            self.fail(EngineGone("The connection to the engine was closed.", next="Connect again."))
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)

    def fail(self, error: HalteresError) -> None:
        """Every waiting call and every later one raises `error`."""
        self._failure = packed(error)
        self.broken.set()
        waiting, self._waiting = self._waiting, {}
        for number, take in waiting.items():
            take(Reply(number, NOTHING, self._failure))
        self._writer.close()

    async def _call(self, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def take(reply: Reply) -> None:
            if not answer.done():
                answer.set_result(reply)

        with self._sent(operation, operation.arguments(*args, **kwargs), take):
            try:
                async with asyncio.timeout(CALL_DEADLINE_S):
                    await self._drain()
                    reply = await answer
            except TimeoutError:
                raise NotReady(
                    f"The engine did not answer {operation.name} within {CALL_DEADLINE_S:.0f} s."
                ) from None
        if reply.failure is not None:
            raise unpacked(reply.failure)
        return decode(reply.result, type=operation.result)

    async def _stream(
        self, operation: Operation, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Piece]:
        pieces = PieceQueue()

        def take(reply: Reply) -> None:
            if reply.more:
                pieces.put(decode(reply.result, type=operation.result))
            else:
                pieces.end(None if reply.failure is None else unpacked(reply.failure))

        with self._sent(operation, operation.arguments(*args, **kwargs), take):
            await self._drain()
            async for piece in pieces.read():
                yield piece

    async def _drain(self) -> None:
        with suppress(ConnectionError):  # the listener fails the waiting call
            await self._writer.drain()

    @contextmanager
    def _sent(
        self, operation: Operation, arguments: msgspec.Struct, take: Callable[[Reply], None]
    ) -> Iterator[None]:
        """Send a call, which is waited for inside; whoever leaves before its last reply gives it
        up.
        """
        if self._failure is not None:
            raise unpacked(self._failure)
        number = next(self._numbers)
        frame = encode(Call(number, operation.name, msgspec.Raw(encode(arguments))))
        if len(frame) >= MAX_FRAME_BYTES:
            raise InvalidData(
                f"The {operation.name} request is too large for the engine.",
                f"It has {len(frame)} bytes; {MAX_FRAME_BYTES} is the limit.",
                "Send it in parts.",
            )
        _write_frame(self._writer, frame)
        self._waiting[number] = take
        try:
            yield
        finally:
            if self._waiting.pop(number, None) is not None and operation.name in CANCELLABLE:
                _write_frame(self._writer, encode(Call(number, CANCEL, NOTHING)))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                reply = decode(await _read_frame(reader), type=Reply)
                take = (
                    self._waiting.get(reply.number)
                    if reply.more
                    else self._waiting.pop(reply.number, None)
                )
                if take is not None:
                    take(reply)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            if self._failure is None:
                why = f"Its connection ended with {len(self._waiting)} calls waiting."
                self.fail(EngineGone("The engine is gone.", why, "Ask again."))


def _remote(operation: Operation) -> Callable[..., Any]:
    def method(self: LinkedEngine, *args: Any, **kwargs: Any) -> Any:
        begin = self._stream if operation.streamed else self._call  # pyright: ignore[reportPrivateUsage]
        return begin(operation, *args, **kwargs)

    return method


for _name in OPERATIONS.keys() - {"close"}:
    setattr(LinkedEngine, _name, _remote(OPERATIONS[_name]))


async def connect(socket_path: Path) -> LinkedEngine:
    """The engine that listens there.

    Raises:
        NotReady: nobody listens.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path)
    except OSError as error:
        raise NotReady(
            f"No engine listens on {socket_path}.", f"{error.strerror}.", "Start it first."
        ) from error
    return LinkedEngine(reader, writer)  # pyright: ignore[reportAbstractUsage] - its methods are made above


async def outcome_of(call: Call, execute: Execute) -> tuple[msgspec.Raw, Failure | None]:
    """The packed result of a call, or why it failed."""
    try:
        return await execute(call), None
    except HalteresError as error:
        return NOTHING, packed(error)
    except Exception as error:  # the boundary: an engine's own bugs
        name = uuid.uuid4().hex[:8]
        log.exception("Engine call %s failed, error id %s.", call.operation, name)
        what = f"The engine failed in {call.operation} (error id {name})."
        why = f"{type(error).__name__}: {error}."
        return NOTHING, packed(ServerError(what, why, "See the engine's log."))


def executed_by(engine: Engine) -> Execute:
    """Calls that are no streams, executed by this engine."""

    async def execute(call: Call) -> msgspec.Raw:
        return msgspec.Raw(encode(await _begun(engine, call)))

    return execute


def _begun(engine: Engine, call: Call) -> Any:
    operation = OPERATIONS[call.operation]
    arguments = msgspec.structs.astuple(decode(call.arguments, type=operation.arguments))
    return getattr(engine, call.operation)(*arguments)


class ConnectionServer:
    """Answers calls on a Unix socket from one engine."""

    def __init__(self, engine: Engine, execute: Execute | None = None) -> None:
        self._engine, self._execute = engine, execute or executed_by(engine)
        self._running: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.closed = asyncio.Event()  # a client asked the engine to end

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends. Tasks start in the order in which they are made: frames
        keep theirs.
        """
        self._writers.add(writer)
        cancellable: dict[int, asyncio.Task[None]] = {}
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                call = decode(await _read_frame(reader), type=Call)
                if call.operation == CANCEL:
                    if call.number in cancellable:
                        cancellable[call.number].cancel()
                    continue
                answering = asyncio.create_task(
                    self._answer(call, writer), name=f"engine {call.operation}"
                )
                self._running.add(answering)
                answering.add_done_callback(self._running.discard)
                if call.operation in CANCELLABLE:
                    cancellable[call.number] = answering
                    answering.add_done_callback(
                        lambda _, number=call.number: cancellable.pop(number)
                    )
        self._writers.discard(writer)
        writer.close()
        for answering in cancellable.values():
            answering.cancel()

    async def stop(self) -> None:
        """Cancel what runs and end every connection."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    async def _answer(self, call: Call, writer: asyncio.StreamWriter) -> None:
        async def stream(call: Call) -> msgspec.Raw:
            async with aclosing(_begun(self._engine, call)) as pieces:
                # each is written before the next: a full socket holds up the stream
                async for piece in pieces:
                    await _write(writer, Reply(call.number, msgspec.Raw(encode(piece)), more=True))
            return NOTHING

        execute = self._execute
        if call.operation in OPERATIONS and OPERATIONS[call.operation].streamed:
            execute = stream
        result, failure = await outcome_of(call, execute)
        await _write(writer, Reply(call.number, result, failure))
        if call.operation == "close":
            self.closed.set()


async def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    if not writer.is_closing():
        with suppress(ConnectionError):
            _write_frame(writer, encode(reply))
            await writer.drain()


@asynccontextmanager
async def serve(
    engine: Engine, socket_path: Path, execute: Execute | None = None
) -> AsyncIterator[ConnectionServer]:
    """Answer on the socket while the block runs; it is listening when the block begins. The engine
    is not closed. `execute`: how calls other than streams reach it, where not at once.
    """
    connections = ConnectionServer(engine, execute)
    server = await asyncio.start_unix_server(connections.serve, socket_path)
    try:
        yield connections
    finally:
        server.close()
        await connections.stop()
