"""JSON, YAML and TOML that users write: read from a file or a text, or refused with the line and
the column.

Owns: what such a document may be: a regular file of bounded size in UTF-8, with or without a byte
order mark; values of bounded number and depth; each key once; no half characters. Never: what a
document means.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from halteres.errors import InvalidConfig
from halteres.files import open_regular, read_regular

MOST_BYTES = 2**20
"""Of a document that people write: one of a megabyte takes seconds to parse."""

MOST_DEPTH, MOST_VALUES = 64, 20_000
"""Mappings and lists within one another; values in all, where an alias counts as often as it is
used.
"""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class DocumentError(ValueError):
    """The text is not such a document; the message says where and why."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place  # e.g. "line 3, column 5"; empty: it is not known, or in the reason


class TooLarge(DocumentError):
    """It has more values, or is nested deeper, than is read."""


def read_document(file: Path, noun: str) -> Any:
    """What a file says: TOML or JSON by its suffix, else YAML. `noun` calls the file by what it is
    for.

    Raises:
        InvalidConfig: it cannot be read, or is no such document.
    """
    kind = {".json": "JSON", ".toml": "TOML"}.get(file.suffix.lower(), "YAML")
    try:
        content = read_regular(file, MOST_BYTES)
    except OSError as error:
        why = f"{error.strerror or error}."
        raise InvalidConfig(f"The {noun} {file} cannot be read.", why, "Check the path.") from error
    try:
        return PARSERS[kind](decoded(content))
    except DocumentError as error:
        what = f"The {noun} {file} cannot be read as {kind}."
        raise InvalidConfig(what, f"{error}.", "Correct it and try again.") from error


def read_optional_document(file: Path, noun: str) -> Any:
    """What a file says; None where there is no file. Raises as `read_document`."""
    try:
        os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        # It may be there: to read it says why it cannot be read.
        pass
    return read_document(file, noun)


def decoded(content: bytes) -> str:
    """The text of a file in UTF-8, without its byte order mark. DocumentError where it is in
    another encoding.
    """
    if content.startswith(_UTF16):
        raise DocumentError("It is UTF-16 text: save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DocumentError(f"line {line}: it is not UTF-8 text: save it as UTF-8") from error


def read_json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """The values of a file with one JSON value on each line, and the lines' numbers; empty lines
    are passed over.

    Raises:
        OSError: it cannot be read, or is no regular file.
        DocumentError: it is not UTF-8, or a line is not JSON.
    """
    with open_regular(file) as stream:
        for number, content in enumerate(stream, 1):
            if number == 1 and content.startswith(_UTF16):
                raise DocumentError("It is UTF-16 text: save it as UTF-8")
            try:
                # Files that were joined have a mark in the middle, too.
                line = content.decode("utf-8-sig").removesuffix("\n")
            except UnicodeDecodeError as error:
                why = "it is not UTF-8 text: save it as UTF-8"
                raise DocumentError(why, f"line {number}") from error
            if line.strip():
                yield number, parse_json_line(line, number)


def parse_json_line(line: str, number: int) -> Any:
    """The value of the JSON text that is one line of a file; it may have any number of values."""
    found = _json(line, line=number)
    try:
        return _within_bounds(found, most=len(line))
    except DocumentError as error:
        raise DocumentError(error.reason, f"line {number}") from error


def parse_json(text: str, *, most_values: int = 2 * MOST_VALUES) -> Any:
    """The value of a JSON text."""
    return _within_bounds(_json(text), most=most_values)


def _json(text: str, *, line: int | None = None) -> Any:
    """The value of a JSON text; `line`: where it is the whole of this line of a file."""

    def place(at: int) -> str:
        before = text[:at]
        column = at - before.rfind("\n")
        own_line = before.count("\n") + 1
        return f"line {line or own_line}, column {column}"

    whole = f"line {line}" if line else ""
    try:
        return json.loads(text, object_pairs_hook=_with_keys_once)
    except json.JSONDecodeError as error:
        raise DocumentError(f"it is not JSON: {error.msg}", place(error.pos)) from error
    except _KeyTwice:
        key, at = _second_key(text)
        raise DocumentError(f"the key '{key}' is given twice", place(at)) from None
    except RecursionError:
        raise TooLarge(_TOO_DEEP, whole) from None
    except ValueError as error:  # a number of thousands of digits
        raise DocumentError(_on_one_line(error), whole) from error


def parse_toml(text: str) -> Any:
    """The value of a TOML text."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise TooLarge(_TOO_DEEP) from None
    except ValueError as error:
        raise DocumentError(_on_one_line(error)) from error
    return _within_bounds(found)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; None of an empty one. Numbers are decimal: `0123` is 123, `1:30` is
    a text.
    """
    return _within_bounds(_load(text, lambda loader: loader.get_single_data()))


def compose_yaml(text: str) -> yaml.Node | None:
    """The root of a YAML text, before its scalars have values; None of an empty one."""
    return _within_bounds(_load(text, lambda loader: loader.get_single_node()))


def scalar_value(node: yaml.Node) -> Any:
    """The value that a scalar of `compose_yaml` has by itself."""
    return _within_bounds(_load("", lambda loader: loader.construct_object(node, deep=True)))


PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "JSON": parse_json,
    "TOML": parse_toml,
    "YAML": parse_yaml,
}

_TOO_DEEP = f"mappings and lists are nested more than {MOST_DEPTH} deep"
_TOO_MANY = f"it has more than {MOST_VALUES} values, those of aliases included"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without what surprises: each key once, decimal numbers, no dates, bounded depth and
    aliases.
    """

    depth = values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        self.values += 1
        if self.depth > MOST_DEPTH or self.values > 2 * MOST_VALUES:
            problem = _TOO_DEEP if self.depth > MOST_DEPTH else _TOO_MANY
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        found = super().compose_node(parent, index)
        self.depth -= 1
        return found

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here rather than at the construction: by then merged keys stand among the mapping's own.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if (key.tag, key.value) in seen:
                    problem = f"the key '{key.value}' is given twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST_VALUES:  # merges of merges multiply
            raise yaml.MarkedYAMLError(problem=_TOO_MANY, problem_mark=node.start_mark)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """YAML 1.1 would take a leading 0 for octal."""
    digits = node.value.replace("_", "")
    if digits.lstrip("+-").isdigit():
        return int(digits)
    return yaml.SafeLoader.construct_yaml_int(loader, node)


def _text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    r"""JSON, which YAML contains, writes a character beyond U+FFFF as two halves:
    `\ud83d\ude00`.
    """
    halves = str(loader.construct_scalar(node))
    return halves.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:str", _text)
_Loader.yaml_implicit_resolvers = {
    first: [
        one
        for one in resolvers
        if one[0].rpartition(":")[2] not in ("int", "float", "timestamp", "value")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INTEGER = re.compile(r"[-+]?0b[01_]+|[-+]?0x[0-9a-fA-F_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)")
# YAML 1.1 takes `1e-3` for a text. It stays one here: what a program writes as a plain text is read
# as that again.
_FLOAT = re.compile(
    r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(f"(?:{_INTEGER.pattern})$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+0123456789.")
)


def _load(text: str, step: Callable[[_Loader], Any]) -> Any:
    """One step of a loader, with whatever it raises as a DocumentError."""
    try:
        loader = _Loader(text)
        try:
            return step(loader)
        finally:
            loader.dispose()
    except RecursionError:
        raise TooLarge(_TOO_DEEP) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        kind = TooLarge if error.problem in (_TOO_DEEP, _TOO_MANY) else DocumentError
        raise kind(
            place + _on_one_line(error.problem or error.context or "it cannot be read")
        ) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        what = f"the character U+{error.character:04X} is not allowed"
        raise DocumentError(f"line {line}, column {column}: {what}") from error
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
    ) as error:
        # Of a tag that does not fit its value, for example.
        # `!!int ""` is an IndexError of PyYAML 6, `!!timestamp x` an AttributeError.
        raise DocumentError(_on_one_line(error)) from error


class _KeyTwice(Exception):
    """An object of a JSON text has a key twice."""


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _KeyTwice
    return found


_KEY_OR_BRACKET = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}\[\]]')


def _second_key(text: str) -> tuple[str, int]:
    """The first key of a JSON text that its object has already, and where it stands."""
    objects: list[set[str]] = []
    for token in _KEY_OR_BRACKET.finditer(text):
        if token[0] in ("{", "["):
            objects.append(set())
        elif token[0] in ("}", "]"):
            objects.pop()
        elif token[2]:
            key = json.loads(token[1])
            if key in objects[-1]:
                return key, token.start()
            objects[-1].add(key)
    raise AssertionError("the decoder found a key that is given twice")


def _within_bounds(document: Any, most: int = 2 * MOST_VALUES) -> Any:
    """The document itself, or its nodes. The check goes level by level: neither depth nor a list
    that contains itself makes it recurse, and an alias counts each time that it is used.
    """
    level, count, depth = [document], 0, 0
    while level:
        inner: list[Any] = []
        for value in level:
            halves = half_characters(value)
            if halves is not None:
                raise DocumentError(halves)
            if isinstance(value, Mapping):
                inner += value.keys()
                inner += value.values()
            elif isinstance(value, list | tuple | set):
                inner += value
            elif isinstance(value, yaml.CollectionNode):
                inner += value.value
            if count + len(inner) > most:
                raise TooLarge(_TOO_MANY)
        level, count, depth = inner, count + len(inner), depth + 1
        if depth > MOST_DEPTH + 1:
            raise TooLarge(_TOO_DEEP)
    return document


def half_characters(value: Any) -> str | None:
    """What is wrong with a text that holds half of a character, which no file and no request can;
    None of any other value. JSON can write one, and so can a command line whose bytes are not in
    the locale's encoding.
    """
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        return (
            f"\\u{ord(value[error.start]):04x} is half of a character: write whole characters, "
            "in UTF-8"
        )
    return None


def _on_one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")
