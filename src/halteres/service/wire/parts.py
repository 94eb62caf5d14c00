"""How many parts a body has, counted before it is decoded.

A decoder makes an object of each list, each object and each message, and holds Python's lock until
it has made all of them: 16 MiB of `{},{},...` would stop every tenant for seconds. Counting is done
in Python, so that others have their turn meanwhile, and ends at the limit.
"""

from __future__ import annotations

import re
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from halteres.errors import InvalidData

MOST_PARTS = 2**17
"""Of one body. A prompt whose tokens are a chunk each has two for every token, a pass some twenty
for every datum.
"""

MESSAGE_FIELDS = 8  # fields of a protobuf message that take as long as a message

_ITEM = re.compile(rb'"[^"]*"|[\[{]')  # of JSON whose strings hold no quotes

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_PACKED = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_INT32)


def _too_many() -> InvalidData:
    return InvalidData(
        "The body has too many parts.",
        f"{MOST_PARTS} lists, objects and messages are the limit.",
        "Send fewer in each request; a prompt's tokens as one chunk.",
    )


def check_json(body: bytes) -> None:
    """Refuse a JSON body with too many lists and objects; what looks like one within a text does
    not count.
    """
    if body.count(b"{") + body.count(b"[") <= MOST_PARTS:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    for number, _ in enumerate(_ITEM.finditer(plain), start=1):
        if number > MOST_PARTS:
            raise _too_many()


def check_protobuf(body: bytes, kind: Descriptor) -> None:
    """Refuse a body of this kind with too many messages, fields or packed numbers. What is no
    protobuf is left to the parser.
    """
    left = MOST_PARTS * MESSAGE_FIELDS
    if len(body) < left // MESSAGE_FIELDS:
        return
    waiting = [(0, len(body), kind)]
    try:
        while waiting:
            at, end, kind = waiting.pop()
            messages, packed = _fields_of(kind)
            while at < end:
                left -= 1
                tag, at = _varint(body, at)
                number, wire_type = tag >> 3, tag & 7
                size = 0
                if wire_type == _BYTES:
                    size, at = _varint(body, at)
                    if number in messages:
                        left -= MESSAGE_FIELDS - 1
                        waiting.append((at, min(at + size, end), messages[number]))
                    elif number in packed:
                        left -= size
                elif wire_type == _VARINT:
                    _, at = _varint(body, at)
                elif wire_type in (_FIXED64, _FIXED32):
                    size = 8 if wire_type == _FIXED64 else 4
                at += size
                if left < 0:
                    raise _too_many()
    except IndexError:  # it ends within a number, or within none
        return


@cache
def _fields_of(kind: Descriptor) -> tuple[dict[int, Descriptor], frozenset[int]]:
    """The fields of a message that hold messages, and those that hold lists of whole numbers."""
    messages = {one.number: one.message_type for one in kind.fields if one.message_type is not None}
    packed = frozenset(
        one.number for one in kind.fields if one.is_packed and one.cpp_type in _PACKED
    )
    return messages, packed


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends; IndexError for what is none."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError
