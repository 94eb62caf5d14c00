"""What crosses the engine link: frames of four bytes of length, then msgpack with raw tensor bytes.

Owns: the shape of a call and of its replies, read off the signatures of `Engine`; errors that cross with their class.
Never: opens a socket, waits for anything but the rest of a frame.

    Call(7, "sample", ...)    ──▶
                              ◀──   Reply(7, result)
    Call(8, "stream", ...)    ──▶
                              ◀──   Reply(8, piece, more=True), again and again
                              ◀──   Reply(8, nothing)               or with a failure
    Call(8, "cancel")         ──▶                                   no reply; nothing of call 8 is sent any more
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from halteres import errors
from halteres.engine import checks, protocol
from halteres.engine.protocol import Engine, Samples, Trains
from halteres.errors import HalteresError

MAX_FRAME_BYTES = 2**31

CANCEL = "cancel"
"""The operation of a frame that gives up the call of its number."""

CANCELLABLE = ("sample", "stream")
"""Calls that end when their caller goes away; all others change something and run to their end."""


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
    """How one method of `Engine` travels, read off its signature."""

    arguments: msgspec.msgpack.Decoder[Any]
    result: msgspec.msgpack.Decoder[Any]  # of a stream: of each piece
    streamed: bool


def _operation(name: str) -> Operation:
    method = getattr(Engine, name)
    hints = typing.get_type_hints(method)
    parameters = [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
    struct = msgspec.defstruct(name, [(parameter, hints[parameter]) for parameter in parameters], array_like=True)
    streamed = typing.get_origin(hints["return"]) is AsyncIterator
    result = typing.get_args(hints["return"])[0] if streamed else hints["return"]
    return Operation(msgspec.msgpack.Decoder(struct), msgspec.msgpack.Decoder(result), streamed)


OPERATIONS = {
    name: _operation(name)
    for protocol in (Trains, Samples)
    for name, member in vars(protocol).items()
    if inspect.isfunction(member) and not name.startswith("_")
}
STREAMED = frozenset(name for name, operation in OPERATIONS.items() if operation.streamed)

NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
encode = msgspec.msgpack.Encoder().encode


ERROR_KINDS = {
    name: kind
    for room in (errors, checks, protocol)
    for name, kind in vars(room).items()
    if isinstance(kind, type) and issubclass(kind, HalteresError)
}


def packed(error: HalteresError) -> Failure:
    """An error for the wire; a class that only one room knows travels as its nearest common ancestor."""
    kind = next(kind for kind in type(error).__mro__ if kind in ERROR_KINDS.values())
    details = msgspec.to_builtins(error.details, enc_hook=str)  # an error must cross, whatever it carries
    return Failure(kind.__name__, error.what, error.why, str(error.next), details)


def unpacked(failure: Failure) -> HalteresError:
    """The error of the same class, told in the same words."""
    return ERROR_KINDS[failure.kind](failure.what, failure.why, failure.next, **failure.details)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame; IncompleteReadError where the link ends."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    return await reader.readexactly(size)


def write_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Queue one frame."""
    writer.write(len(frame).to_bytes(4, "big"))
    writer.write(frame)
