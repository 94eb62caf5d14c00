"""The link between the training service and its engine's process: a Unix socket.

Owns: many calls at once on one connection, what a reply does to the call that waits for it, what a broken link means,
telling the other side that nobody waits for a call any more.
Never: retries, restarts, or keeps anything across a restart of either side.

    service                                     engine's process
    connect(path) -> LinkedEngine  ── Call ──▶  serve(engine, path), in `server`
                                   ◀─ Reply ──

Calls reach the engine in the order in which they were made. A broken link fails every waiting call with EngineGone.
A stream that is read slowly gets longer pieces (`pieces`): neither the link nor the engine waits for a reader.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, Protocol

import msgspec

from halteres.engine.link.wire import (
    CANCEL,
    CANCELLABLE,
    MAX_FRAME_BYTES,
    NOTHING,
    OPERATIONS,
    Call,
    Operation,
    Reply,
    decode_reply,
    encode,
    read_frame,
    unpacked,
    write_frame,
)
from halteres.engine.pieces import PieceQueue
from halteres.engine.protocol import (
    Adam,
    Datum,
    EngineGone,
    LoraConfig,
    LossSpec,
    MergedType,
    ModelInfo,
    PassResult,
    Piece,
    SampleResult,
    SamplingParams,
    Saved,
    StepResult,
    Wanted,
    Weights,
)
from halteres.errors import HalteresError, InvalidData, NotReady


class Waiting(Protocol):
    """One call that has no whole answer yet."""

    def take(self, reply: Reply) -> None:
        """A frame has come for it."""
        ...

    def fail(self, error: HalteresError) -> None:
        """None will come any more."""
        ...


class OneAnswer:
    """A call whose single reply is its answer."""

    def __init__(self) -> None:
        self.future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()

    def take(self, reply: Reply) -> None:
        """See `Waiting`."""
        if self.future.done():
            return
        if reply.failure is None:
            self.future.set_result(reply.result)
        else:
            self.future.set_exception(unpacked(reply.failure))

    def fail(self, error: HalteresError) -> None:
        """See `Waiting`."""
        if not self.future.done():
            self.future.set_exception(copy(error))


class ManyPieces:
    """A call whose replies are pieces, until one says that it was the last."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self.pieces = PieceQueue()

    def take(self, reply: Reply) -> None:
        """See `Waiting`."""
        if reply.more:
            self.pieces.put(self._operation.result.decode(reply.result))
        else:
            self.pieces.end(None if reply.failure is None else unpacked(reply.failure))

    def fail(self, error: HalteresError) -> None:
        """See `Waiting`."""
        self.pieces.end(copy(error))


CALL_DEADLINE_S = 3600.0
"""No single engine call takes longer. An engine that hangs is noticed sooner: `child` asks it for signs of life."""


class LinkedEngine:
    """An `Engine` at the other end of a link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = itertools.count()
        self._waiting: dict[int, Waiting] = {}
        self._why_broken: HalteresError | None = None
        self.broken = asyncio.Event()
        self._listener = asyncio.create_task(self._listen(reader), name="engine link")

    async def info(self) -> ModelInfo:
        """See `Engine`."""
        return await self._call("info")

    async def create_adapter(self, adapter: str, config: LoraConfig) -> None:
        """See `Engine`."""
        await self._call("create_adapter", adapter, config)

    async def forward_backward(
        self, adapter: str, data: tuple[Datum, ...], loss: LossSpec, forward_only: bool = False
    ) -> PassResult:
        """See `Engine`."""
        return await self._call("forward_backward", adapter, data, loss, forward_only)

    async def optim_step(self, adapter: str, adam: Adam) -> StepResult:
        """See `Engine`."""
        return await self._call("optim_step", adapter, adam)

    async def save(self, adapter: str, folder: str, optimizer: bool) -> Saved:
        """See `Engine`."""
        return await self._call("save", adapter, folder, optimizer)

    async def load(self, adapter: str, folder: str, optimizer: bool) -> StepResult:
        """See `Engine`."""
        return await self._call("load", adapter, folder, optimizer)

    async def snapshot(self, adapter: str, snapshot: str) -> Weights:
        """See `Engine`."""
        return await self._call("snapshot", adapter, snapshot)

    async def hold(self, name: str, source: Weights) -> int:
        """See `Engine`."""
        return await self._call("hold", name, source)

    async def save_snapshot(self, snapshot: str, folder: str) -> Saved:
        """See `Engine`."""
        return await self._call("save_snapshot", snapshot, folder)

    async def sample(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        wanted: Wanted = Wanted(),  # noqa: B008 - frozen
    ) -> SampleResult:
        """See `Engine`."""
        return await self._call("sample", snapshot, prompt, num_samples, params, wanted)

    async def stream(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        wanted: Wanted = Wanted(),  # noqa: B008 - frozen
    ) -> AsyncIterator[Piece]:
        """See `Engine`."""
        call = ManyPieces(OPERATIONS["stream"])
        with self._under_way("stream", (snapshot, prompt, num_samples, params, wanted), call):
            with suppress(ConnectionError):  # the listener tells the waiting call
                await self._writer.drain()
            async for piece in call.pieces.read():
                yield piece

    async def merge(self, folder: str, into: str, dtype: MergedType = "base") -> Saved:
        """See `Engine`."""
        return await self._call("merge", folder, into, dtype)

    async def drop(self, name: str) -> None:
        """See `Engine`."""
        await self._call("drop", name)

    async def close(self) -> None:
        """End the engine at the other side, then the link."""
        if self._why_broken is None:
            with suppress(NotReady):
                await self._call("close")
        await self.disconnect()

    async def disconnect(self) -> None:
        """End the link; the engine stays."""
        if self._why_broken is None:
            self.fail(EngineGone("The engine link was closed.", next="Connect again."))
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)

    def fail(self, error: HalteresError) -> None:
        """Every waiting call and every later one raises `error`."""
        self._why_broken = error
        self.broken.set()
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            call.fail(error)
        self._writer.close()

    async def _call(self, operation: str, *arguments: Any) -> Any:
        call = OneAnswer()
        with self._under_way(operation, arguments, call):
            try:
                async with asyncio.timeout(CALL_DEADLINE_S):
                    with suppress(ConnectionError):  # the listener tells the waiting call
                        await self._writer.drain()
                    return OPERATIONS[operation].result.decode(await call.future)
            except TimeoutError:
                raise NotReady(f"The engine did not answer {operation} within {CALL_DEADLINE_S:.0f} s.") from None

    @contextmanager
    def _under_way(self, operation: str, arguments: tuple[Any, ...], call: Waiting) -> Iterator[None]:
        """Send a call, which is waited for inside; whoever leaves before its last reply gives it up."""
        if self._why_broken is not None:
            raise copy(self._why_broken)
        number = next(self._numbers)
        self._send(Call(number, operation, msgspec.Raw(encode(arguments))))
        self._waiting[number] = call
        try:
            yield
        finally:
            if self._waiting.pop(number, None) is not None and operation in CANCELLABLE:
                self._send(Call(number, CANCEL, NOTHING))

    def _send(self, call: Call) -> None:
        frame = encode(call)
        if len(frame) >= MAX_FRAME_BYTES:
            raise InvalidData(
                f"The {call.operation} request is too large for the engine.",
                f"It has {len(frame)} bytes; {MAX_FRAME_BYTES} is the limit.",
                "Send it in parts.",
            )
        write_frame(self._writer, frame)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                reply = decode_reply(await read_frame(reader))
                call = self._waiting.get(reply.number) if reply.more else self._waiting.pop(reply.number, None)
                if call is not None:
                    call.take(reply)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            if self._why_broken is None:
                waiting = len(self._waiting)
                self.fail(
                    EngineGone("The engine is gone.", f"Its link ended with {waiting} calls waiting.", "Ask again.")
                )


async def connect(socket_path: Path) -> LinkedEngine:
    """The engine that listens there.

    Raises:
        NotReady: nobody listens.
    """
    try:
        return LinkedEngine(*await asyncio.open_unix_connection(socket_path))
    except OSError as error:
        raise NotReady(f"No engine listens on {socket_path}.", f"{error.strerror}.", "Start it first.") from error
