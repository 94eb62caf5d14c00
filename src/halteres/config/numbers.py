"""Numbers that are none: truth values, which pydantic takes for 0 and 1, and what is not finite, which JSON cannot say.

Owns: finding them, before and besides an ordinary validation.
Never: knows a setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from halteres.config.problem import Problem

NUMBER, TEXT, FINITE = "must be a number", "must be text", "must be a finite number"


def truth_for_number(model: type[BaseModel], section: str, given: Mapping[str, Any]) -> list[Problem]:
    """Fields of a section of ours that were given a truth value where a number belongs."""
    return [
        Problem(field=f"{section}.{name}", got=value, rule=NUMBER)
        for name, value in given.items()
        if isinstance(value, bool) and {int, float} & _kinds(model.model_fields[name].annotation)
    ]


def odd_numbers(schema: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Problem]:
    """The same of an environment's values, by its JSON Schema; and numbers that are not finite, however deep."""
    fields = schema.get("properties", {})
    for name, value in values.items():
        if isinstance(value, bool) and (types := _types(fields.get(name, {}))) and "boolean" not in types:
            if types & {"integer", "number"}:
                yield Problem(field=f"env.{name}", got=value, rule=NUMBER)
        elif endless(value):
            yield Problem(field=f"env.{name}", got=value, rule=FINITE)


def number_in_text(field: Mapping[str, Any], value: Any) -> float | None:
    """The number that a text says, for a field whose JSON Schema has numbers and no texts; None where it says none."""
    types = _types(field)
    if not isinstance(value, str) or "string" in types or not types & {"integer", "number"}:
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if "integer" in types and number.is_integer():
        return int(number)
    return number if "number" in types and math.isfinite(number) else None


def _kinds(annotation: Any) -> set[Any]:
    """The types of `int | None` and the like."""
    return {annotation, *get_args(annotation)}


def _types(field: Mapping[str, Any]) -> set[str]:
    """JSON types that a field may have."""
    return {str(one["type"]) for one in (field, *field.get("anyOf", ())) if isinstance(one.get("type"), str)}


def endless(value: Any) -> bool:
    """Whether there is a number in it, however deep, that is not finite."""
    if isinstance(value, Mapping):
        return any(endless(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(endless(item) for item in value)
    return isinstance(value, float) and not math.isfinite(value)
