"""An answer that is never too long: texts are shortened, and where that is not enough lists give way.

It is the last thing that is done to an answer, and no tool's own budget: it knows not what matters in one. It drops no
key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

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


LONGEST: Final = 8000
"""Characters of compact JSON, about 2,000 tokens, unless the tool's `Result.longest` says otherwise."""

_LIMITS: Final = ((2000, 64), (1000, 32), (500, 24), (240, 16), (120, 8), (60, 8))
"""Characters of each text, and items of each list (or of a mapping of as many), tried one after another."""

_NOTED = 200  # characters that it takes to say so


def fitted(body: Mapping[str, Any], longest: int = LONGEST) -> dict[str, Any]:
    """The answer in at most `longest` characters, texts and lists cut where it must be; `shortened` names those.

    >>> fitted({"next": "rl_list_runs()"})
    {'next': 'rl_list_runs()'}
    """
    told = dict(body)
    for text, items in _LIMITS:
        if _length(told) <= longest:
            return told
        told = _noted({name: _cut(value, text, items) for name, value in body.items()}, body)
    while _length(told) > longest:
        largest = max(body, key=lambda name: _length(told[name]))
        told = _noted({**told, largest: _nothing(told[largest])}, body)
    return told


def _noted(told: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in body if told[name] != body[name]]
    return {**told, "shortened": shortened(", ".join(names), _NOTED)}


def _cut(value: Any, text: int, items: int) -> Any:
    if isinstance(value, str):
        return shortened(value, text)
    if isinstance(value, list):
        return [_cut(item, text, items) for item in value[:items]]
    if isinstance(value, Mapping):
        return {shortened(name, text): _cut(item, text, items) for name, item in list(value.items())[: max(24, items)]}
    return value


def _nothing(value: Any) -> Any:
    """Of the same kind, and short."""
    if isinstance(value, str):
        return shortened(value, 60)
    return type(value)() if isinstance(value, list | dict) else None


def _length(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def significant(value: float, digits: int = 3) -> float:
    """Rounded to so many significant digits.

    >>> significant(0.0123456)
    0.0123
    """
    return float(f"{value:.{digits}g}") if math.isfinite(value) else value
