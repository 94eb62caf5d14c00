"""What the original takes for a number that JSON does not call one: truth values, and numbers written as text.

Owns: which texts are integers and which are numbers, as the original's framework reads them; where a type wants one.
Never: refuses anything. What is no number stays as it came, and the type says so.

Only bodies that the strict reader refused come here.
"""

from __future__ import annotations

import re
from typing import Any, cast

from msgspec import inspect

_INTEGER = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?")
_LONGEST = 4300
"""Digits of an integer; Python reads no longer ones."""


def coerced(value: Any, kind: inspect.Type) -> Any:
    """A plain value, with what it holds in the place of a number as that number."""
    match kind:
        case inspect.StructType() if isinstance(value, dict):
            return _with_fields(cast("dict[str, Any]", value), kind)
        case inspect.UnionType():
            for each in kind.types:
                value = coerced(value, each)
            return value
        case inspect.ListType() if isinstance(value, list):
            return _items(cast("list[Any]", value), kind.item_type)
        case inspect.IntType() | inspect.FloatType():
            return _number(value, kind)
        case _:
            return value


def _with_fields(value: dict[str, Any], kind: inspect.StructType) -> dict[str, Any]:
    known = {field.encode_name: field.type for field in kind.fields}
    return {name: coerced(item, known[name]) if name in known else item for name, item in value.items()}


def _items(values: list[Any], kind: inspect.Type) -> list[Any]:
    if not isinstance(kind, inspect.IntType | inspect.FloatType):
        return [coerced(value, kind) for value in values]
    return [_number(value, kind) if type(value) in (str, bool) else value for value in values]


def _number(value: Any, kind: inspect.IntType | inspect.FloatType) -> Any:
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    return _integer(text) if isinstance(kind, inspect.IntType) else _float(text)


def _integer(text: str) -> int | str:
    found = _INTEGER.fullmatch(text) if len(text) <= _LONGEST else None
    return int(found.group(1)) if found else text


def _float(text: str) -> float | str:
    try:
        return float(text) if text.isascii() else text
    except ValueError:
        return text
