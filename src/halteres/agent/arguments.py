"""Arguments of a call as clients send them, read as the types that its tool declares.

Owns: which other types are read: 3.0 and "3" for an integer, JSON in a text for a list or an
object, null for what is not given.
Never: reads a text as something else where the tool takes texts.
Guarantees: the answer says what was read as another type; what cannot be read is left for the tool
to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from halteres.agent.answer_text import echoed
from halteres.agent.tool import Tool, schema_of
from halteres.config.values import schema_at
from halteres.documents import DocumentError, parse_json
from halteres.errors import UserError

NO_TEXT: Final = re.compile("[\x00\ud800-\udfff]")
"""Characters that no name, path or file can hold: NUL, and halves of a surrogate pair."""

RUNS: Final = ("run_id", "run_ids", "resume_from")
"""Arguments that name runs, which are looked up in a list: what no run is called is not found."""

EXACT: Final = 2**53  # below it a JSON number that is whole is one integer

_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
}


@dataclass(slots=True)
class ReadArguments:
    """What a call gives."""

    values: dict[str, Any] = field(default_factory=dict)
    # those that came as another type, as they hold now
    coerced: dict[str, Any] = field(default_factory=dict)


def read_arguments(tool: Tool[...], given: Mapping[str, Any]) -> ReadArguments:
    """The arguments that were given. An empty text counts as not given (some clients fill them in),
    and so does null where the tool has a default.

    Raises:
        UserError: a text holds what no text can hold, or is JSON with a key twice.
    """
    found = ReadArguments()
    schema = schema_of(tool.arguments)
    for name, value in given.items():
        for text in () if name in RUNS else _texts(value):
            if NO_TEXT.search(text):
                why = "It holds a NUL character, or half of a surrogate pair."
                raise UserError(
                    f"{tool.name} cannot use '{name}'.", why, "Send it without.", field=name
                )
        if name == "value" or name not in tool.arguments.model_fields:
            found.values[name] = value
            continue
        try:
            read = _read(value, schema_at(schema, [name]).types)
        except DocumentError as error:
            what = f"{tool.name} cannot read '{name}'."
            raise UserError(what, f"{error}.", "Correct the JSON text.", field=name) from error
        if read == "":
            continue
        declared = tool.arguments.model_fields[name]
        if read is None and not declared.is_required():
            # Null for an argument whose default is null, too, changes nothing.
            if declared.default is not None:
                found.coerced[name] = declared.default
            continue
        found.values[name] = read
        if type(read) is not type(value):
            found.coerced[name] = echoed(read)
    return found


def _read(value: Any, types: set[str]) -> Any:
    """The value as one of these types; itself where it is none.

    Raises:
        DocumentError: it is JSON with a key twice.
    """
    if isinstance(value, str) and types and "string" not in types:
        return _from_text(value, types)
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < EXACT
    if is_whole and "integer" in types and "number" not in types:
        return int(value)
    return value


def _from_text(text: str, types: set[str]) -> Any:
    try:
        parsed = msgspec.json.decode(text.encode())
        # It is JSON; that each of its keys stands there once, msgspec does not look at.
        parse_json(text, most_values=len(text))
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        # Python's words for true and false
        parsed = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    if parsed is None:
        return None
    if isinstance(parsed, float):
        parsed = _read(parsed, types)
    is_truth = isinstance(parsed, bool)
    fits = any(
        isinstance(parsed, _TYPES[one]) and is_truth == (one == "boolean")
        for one in types & _TYPES.keys()
    )
    if fits:
        return parsed
    return text


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, names of members included."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
