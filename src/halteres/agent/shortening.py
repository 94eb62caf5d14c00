"""Long texts in short answers.

Owns: what is left of a text for which there is no room: its beginning and its end, and how much is missing between.
Never: looks at what a text says; cuts a secret: it is struck out first, for half of one would not be known for one.
"""

from __future__ import annotations

import json
from typing import Any

from halteres.redaction import Redactor


def size_of(value: Any) -> int:
    """Characters that a JSON value takes, compact and of the plainest kind: whatever a face sends is no longer."""
    return len(json.dumps(value, separators=(",", ":")))


def shortened(text: str, room: int) -> str:
    """The text if it fits, else its beginning and end around a mark that tells how much was left out.

    Args:
        text: any.
        room: characters that it may take as JSON, quotes aside.

    >>> shortened("abcdefgh" * 20, 60)
    'abcdefghabcd [... 136 characters left out ...] efghabcdefgh'
    """
    text = Redactor.of_this_process().text(text)
    if _size(text, room) <= room:
        return text
    half = max(0, (room - len(_mark(len(text)))) // 2)
    head, tail = _longest(text, half, 1), _longest(text, half, -1)
    return f"{head}{_mark(len(text) - len(head) - len(tail))}{tail}"


def clipped(text: str, length: int) -> str:
    """At most so many characters; dots stand for the rest. Secrets go first: half of one would not be known as one."""
    if len(text) <= length:
        return text
    text = Redactor.of_this_process().text(text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def shortened_item(item: Any, room: int) -> Any:
    """A JSON value if it fits; else with its texts shortened; else as a shortened text."""
    item = Redactor.of_this_process().json(item)
    if size_of(item) <= room:
        return item
    if isinstance(item, dict):
        each = room // (2 * max(1, len(item)))
        fields = {
            str(name): shortened(value, each) if isinstance(value, str) else value for name, value in item.items()
        }
        if size_of(fields) <= room:
            return fields
    return shortened(json.dumps(item, ensure_ascii=False), room)


def echoed(value: Any, room: int = 400) -> Any:
    """A value that a call gave, told back: itself where it is small, else shortened."""
    return shortened(value, room) if isinstance(value, str) else shortened_item(value, room)


def _mark(num: int) -> str:
    return f" [... {num} characters left out ...] "


def _longest(text: str, room: int, side: int) -> str:
    """The longest beginning (side 1) or end (side -1) that fits. Every character takes one or more."""
    low, high = 0, min(len(text), room)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _size(_part(text, middle, side), room) <= room else (low, middle - 1)
    return _part(text, low, side)


def _part(text: str, num: int, side: int) -> str:
    return text[:num] if side > 0 else text[len(text) - num :]


def _size(text: str, room: int) -> int:
    """Characters as JSON, quotes aside; more than `room` is as good as any more."""
    return len(text) if len(text) > room else size_of(text) - 2
