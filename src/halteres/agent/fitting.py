"""An answer that is never too long: the last thing that is done to one.

Owns: the limit of an answer, and what gives way where one is longer.
Never: is how a tool keeps its own budget: it knows not what matters in an answer. Drops a key of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from halteres.agent.shortening import shortened

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
