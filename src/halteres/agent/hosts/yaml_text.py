"""YAML, edited as text: lines come or go, and every other byte stays, comments too.

Owns: finding a value's place by the marks of PyYAML's nodes; what cannot be edited safely.
Never: writes the document anew, as YAML libraries do: quotes, widths and indentation are somebody's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from halteres.agent.hosts.host import CannotEdit, Keys, Misread, Settings
from halteres.agent.hosts.nesting import nested

_Pair = tuple[yaml.Node, yaml.Node]
"""A key and its value."""

_NULL = "tag:yaml.org,2002:null"
_STEP = 2


class YamlText:
    """Settings in YAML."""

    def read(self, text: str) -> Settings:
        """What it says. Raises Misread."""
        try:
            settings = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark: Any = getattr(error, "problem_mark", None)
            why = str(getattr(error, "problem", None) or error)
            raise Misread(mark.line + 1 if mark else 1, why) from error
        if settings is not None and not isinstance(settings, dict):
            raise Misread(1, "it is no mapping")
        return settings or {}

    def put(self, text: str, keys: Keys, value: Any) -> str:
        """A value that is there is replaced where it stands; a new one comes first in its section, or last of all."""
        root, found = _walk(text, keys)
        if len(found) == len(keys):
            return _replaced(text, found[-1], value)
        rest = nested(keys[len(found) :], value)
        if found:
            return _inside(text, found[-1], rest)
        if isinstance(root, yaml.MappingNode) and root.flow_style:
            raise CannotEdit("it is written in braces")
        apart = "" if text.endswith("\n") or not text else "\n"
        return text + _in_lines_of(text, f"{apart}{_dumped(rest, 0)}")

    def drop(self, text: str, keys: Keys) -> str:
        """The lines of a value go, and those of a section that it leaves empty."""
        root, found = _walk(text, keys)
        if len(found) < len(keys):
            return text
        section: Any = found[-2][1] if len(found) > 1 else root
        if len(section.value) == 1 and len(keys) > 1:
            return self.drop(text, keys[:-1])
        if section.flow_style:
            raise CannotEdit(f"what holds '{found[-1][0].value}' is written in braces")
        return _without_lines(text, _line_start(text, _begin(found[-1][0])), _line_end(text, _end(found[-1])))


def _walk(text: str, keys: Keys) -> tuple[yaml.Node | None, list[_Pair]]:
    """The document, and the pairs along these keys as far as there are any."""
    root = node = yaml.compose(text, Loader=yaml.SafeLoader)
    found: list[_Pair] = []
    for key in keys:
        pairs: Sequence[_Pair] = node.value if isinstance(node, yaml.MappingNode) else ()
        pair = next((pair for pair in reversed(pairs) if pair[0].value == key), None)
        if pair is None:
            break
        if _begin(pair[1]) < _end_of(pair[0]):
            raise CannotEdit(f"'{key}' is an alias of something else")
        found.append(pair)
        node = pair[1]
    return root, found


def _inside(text: str, pair: _Pair, rest: Settings) -> str:
    """With something new in a section: below its key, above what was first."""
    key, section = pair
    indent = key.start_mark.column + _STEP
    if isinstance(section, yaml.MappingNode) and section.value:
        if section.flow_style:
            raise CannotEdit(f"'{key.value}' is written in braces")
        indent = section.value[0][0].start_mark.column
    elif section.tag == _NULL or isinstance(section, yaml.MappingNode):
        text = text[: _begin(section)].rstrip(" ") + text[_end_of(section) :]  # null, or a pair of braces
    else:
        raise CannotEdit(f"'{key.value}' is no mapping")
    return _below(text, key, _dumped(rest, indent))


def _replaced(text: str, pair: _Pair, value: Any) -> str:
    """With another value at this key; of a list, lines come and go."""
    key, node = pair
    if isinstance(value, list) and isinstance(node, yaml.SequenceNode) and not node.flow_style:
        return _relisted(text, key, node, value)
    new = json.dumps(value, ensure_ascii=False)
    begin, end = _begin(node), _end(pair)
    if "#" in text[begin:end] and not isinstance(node, yaml.ScalarNode):
        raise CannotEdit(f"'{key.value}' has comments within")
    return f"{text[:begin]}{' ' if begin == end else ''}{new}{text[end:]}"


def _relisted(text: str, key: yaml.Node, node: yaml.SequenceNode, value: list[Any]) -> str:
    """A list of one line an item, with other items: new ones come first."""
    old = [item.value for item in node.value]
    gone = [item for item in node.value if item.value not in value]
    for item in reversed(gone):
        text = text[: _line_start(text, _begin(item))] + text[_line_end(text, _end_of(item)) :]
    if not value:
        colon = text.index(":", _end_of(key)) + 1
        return f"{text[:colon]} []{text[colon:]}"
    new = [item for item in value if item not in old]
    return _below(text, key, _dumped(new, node.start_mark.column)) if new else text


def _below(text: str, key: yaml.Node, lines: str) -> str:
    at = _line_end(text, _end_of(key))
    apart = "" if text[:at].endswith("\n") else "\n"
    return text[:at] + _in_lines_of(text, apart + lines) + text[at:]


def _without_lines(text: str, begin: int, end: int) -> str:
    """Without these; blank lines do not end the text."""
    before, after = text[:begin], text[end:]
    if after.strip():
        return before + after
    return before.rstrip() + _in_lines_of(text, "\n") if before.strip() else ""


def _dumped(value: Any, indent: int) -> str:
    lines = yaml.safe_dump(value, sort_keys=False, default_flow_style=False, allow_unicode=True, width=2**30)
    return "".join(f"{' ' * indent}{line}\n" for line in lines.splitlines())


def _in_lines_of(text: str, new: str) -> str:
    return new.replace("\n", "\r\n") if "\r\n" in text else new


def _begin(node: yaml.Node) -> int:
    return node.start_mark.index


def _end_of(node: yaml.Node) -> int:
    return node.end_mark.index


def _end(pair: _Pair) -> int:
    """Where a value's last character is: a section's own mark lies beyond the comments below it."""
    key, node = pair
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last if isinstance(last, tuple) else (key, last))
    return _end_of(node)


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    """Behind the line's break. A mark may already lie behind it."""
    if at and text[at - 1] == "\n":
        return at
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1
