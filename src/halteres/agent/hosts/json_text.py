"""JSON, edited as text: an entry comes or goes, and every other byte stays.

Owns: finding a value's place in the text; the indentation of what is put there.
Never: reformats; touches JSON with comments, which it could not read back.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from halteres.agent.hosts.host import CannotEdit, Keys, Misread, Settings
from halteres.agent.hosts.nesting import nested

_BLANK = re.compile(r"[ \t\r\n]*")
_LINE = re.compile(r"\r?\n[ \t]*$")
_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Member:
    """A name and its value: where it begins, where the value does, where it ends."""

    name: str
    begin: int
    value: int
    end: int


@dataclass(frozen=True, slots=True)
class _Object:
    """An object in the text: its braces, and what lies between them."""

    open: int
    close: int
    members: tuple[_Member, ...]

    def at(self, name: str) -> int | None:
        """Which member it is; of several the last, as everywhere."""
        return next((i for i in reversed(range(len(self.members))) if self.members[i].name == name), None)


class JsonText:
    """Settings in JSON."""

    def read(self, text: str) -> Settings:
        """What it says. Raises Misread, for comments too."""
        if not text.strip():
            return {}
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as error:
            raise Misread(error.lineno, _why(text, error)) from error
        if not isinstance(settings, dict):
            raise Misread(1, "it is no object")
        return settings

    def put(self, text: str, keys: Keys, value: Any) -> str:
        """Values that are there are replaced where they stand; new ones come last."""
        text = text if text.strip() else "{}\n"
        inner, depth = _object(text, _skip(text, 0)), 0
        for depth, key in enumerate(keys, 1):
            place = inner.at(key)
            if place is None:
                return _inserted(text, inner, depth, key, nested(keys[depth:], value))
            member = inner.members[place]
            if depth == len(keys):
                return text[: member.value] + _dumped(text, value, depth) + text[member.end :]
            if text[member.value] != "{":
                raise CannotEdit(f"'{key}' is no object")
            inner = _object(text, member.value)
        return text

    def drop(self, text: str, keys: Keys) -> str:
        """A member goes with its comma; an object that it leaves empty goes too."""
        inner = _object(text, _skip(text, 0))
        for key in keys[:-1]:
            place = inner.at(key)
            if place is None or text[inner.members[place].value] != "{":
                return text
            inner = _object(text, inner.members[place].value)
        place = inner.at(keys[-1])
        if place is None:
            return text
        if len(inner.members) == 1:
            return self.drop(text, keys[:-1]) if len(keys) > 1 else text[: inner.open + 1] + text[inner.close :]
        if place == 0:
            return text[: inner.members[0].begin] + text[inner.members[1].begin :]
        return text[: inner.members[place - 1].end] + text[inner.members[place].end :]


def _object(text: str, brace: int) -> _Object:
    """The object that begins there; the text is known to be JSON."""
    members: list[_Member] = []
    at = _skip(text, brace + 1)
    while text[at] != "}":
        name, end = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, end) + 1)
        _, end = _DECODER.raw_decode(text, value)
        members.append(_Member(name, at, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return _Object(brace, at, tuple(members))


def _inserted(text: str, inner: _Object, depth: int, key: str, value: Any) -> str:
    """With one more member in this object, on a line of its own unless the others share theirs."""
    member = f"{json.dumps(key)}: {_dumped(text, value, depth)}"
    if not inner.members:
        around = f"\n{_indent(text) * depth}{member}\n{_indent(text) * (depth - 1)}"
        return text[: inner.open + 1] + _in_lines_of(text, around) + text[inner.close :]
    last = inner.members[-1]
    apart = _LINE.search(text[inner.open + 1 : inner.members[0].begin])
    if apart is None:
        return f"{text[: last.end]}, {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}{text[last.end :]}"
    return f"{text[: last.end]},{apart[0]}{member}{text[last.end :]}"


def _dumped(text: str, value: Any, depth: int) -> str:
    """The value in the indentation of the text."""
    indent = _indent(text)
    return _in_lines_of(text, json.dumps(value, indent=indent, ensure_ascii=False).replace("\n", f"\n{indent * depth}"))


def _indent(text: str) -> str:
    """What the text's first indented line begins with."""
    found = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
    return found[1] if found else "  "


def _in_lines_of(text: str, new: str) -> str:
    return new.replace("\n", "\r\n") if "\r\n" in text else new


def _skip(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _why(text: str, error: json.JSONDecodeError) -> str:
    if text[error.pos : error.pos + 2] in ("//", "/*"):
        return "it holds a comment, which JSON has not"
    return error.msg[:1].lower() + error.msg[1:]
