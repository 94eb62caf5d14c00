"""What a text typed for a setting means: the setting's type decides, as its JSON Schema says it.

A setting that is a text takes the text as it was typed. Where a number, a list or an object is
wanted, the text is YAML with decimal numbers, and within it the same rule holds again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from halteres.documents import DocumentError, compose_yaml, scalar_value

Schema = Mapping[str, Any]

ANYTHING: Schema = {}
"""Of a setting whose type is unknown."""

_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")  # YAML 1.1 takes it for a text
_DIGITS = re.compile(r"[-+]?[0-9]{1,1000}")  # a longer one is refused with the reason
_OTHER_BASE = re.compile(r"[-+]?0[bx].*")


class Word(str):
    """A value as it was typed on a command line, where nothing says its type."""

    __slots__ = ()


def value_of(given: Any, schema: Schema) -> Any:
    """What a value means for a setting of this schema, which contains what it refers to.

    A `Word` that is `null`, or empty, is None where the setting may be; one in quotation marks is
    the text between them. A text that came as a value of JSON is taken as it is where the setting
    may be a text.

    Raises:
        DocumentError: a list or an object is wanted, and the text is neither; it has a key twice,
            or is too deep.

    >>> text, number = {"type": "string"}, {"type": "integer"}
    >>> [value_of(Word(typed), text) for typed in ("run #3", "0123", "1:30", "yes", "a: b", '"a"')]
    ['run #3', '0123', '1:30', 'yes', 'a: b', 'a']
    >>> value_of(Word("0123"), number)
    123
    """
    if not isinstance(given, str):
        return given
    definitions: Schema = schema.get("$defs", {})
    options = list(_options(schema, definitions))
    types = set().union(*map(_types, options))
    if not isinstance(given, Word) and ("string" in types or not types):
        return given
    return _read(given, options, types, definitions)


def _read(word: str, options: Sequence[Schema], types: set[str], definitions: Schema) -> Any:
    text, bare = str(word), word.strip()
    may_be_text = "string" in types or not types
    if bare in ("", "null") and ("null" in types or not types):
        return None
    if may_be_text and (quoted := _between_quotation_marks(bare)) is not None:
        return quoted
    if types and types <= {"string", "null"}:
        return text
    try:
        node = compose_yaml(bare)
        if node is None or not _is_all(node, bare, may_be_text):
            return text
        value = _built(node, options, definitions)
    except DocumentError:
        if types & {"array", "object"} and not may_be_text:
            raise
        return text
    if may_be_text and types and _type_of(value) not in types:
        return text
    return value


def _is_all(node: yaml.Node, word: str, may_be_text: bool) -> bool:
    """Whether a value says all of a word: nothing of it was a comment, a tag or a name for later.
    Where a text may be meant, `a: b` is one.
    """
    if isinstance(node, yaml.ScalarNode):
        return node.style is not None or node.value == word
    is_flow = isinstance(node, yaml.CollectionNode) and bool(node.flow_style)
    if may_be_text:
        return is_flow and node.end_mark.index == len(word)
    return True


def _built(node: yaml.Node, options: Sequence[Schema], definitions: Schema) -> Any:
    """The value of a node, by the same rule: a text among a list of texts is as it was typed."""
    if isinstance(node, yaml.SequenceNode):
        return [
            _built(item, list(_item(index, options, definitions)), definitions)
            for index, item in enumerate(node.value)
        ]
    if isinstance(node, yaml.MappingNode):
        return {
            str(key.value): _built(
                value, list(_field(str(key.value), options, definitions)), definitions
            )
            for key, value in node.value
        }
    plain = str(node.value)
    if isinstance(node, yaml.ScalarNode) and node.style is not None:
        return scalar_value(node)
    types = set[str]().union(*map(_types, options))
    if types and types <= {"string", "null"}:
        if plain in ("", "null") and "null" in types:
            return None
        return plain
    if _DIGITS.fullmatch(plain):
        return int(plain)
    if _NUMBER.fullmatch(plain):
        return float(plain)
    if _OTHER_BASE.fullmatch(plain):
        return plain
    return scalar_value(node)


def schema_at(schema: Schema, names: Sequence[str]) -> Schema:
    """The schema of a field of a field, with what it refers to; ANYTHING where it is unknown."""
    definitions = schema.get("$defs", {})
    options = list(_options(schema, definitions))
    for name in names:
        options = list(_field(name, options, definitions))
    if options:
        return {"anyOf": options, "$defs": definitions}
    return ANYTHING


def _item(index: int, options: Sequence[Schema], definitions: Schema) -> Iterator[Schema]:
    """The schema of one item of a list."""
    for one in options:
        firsts = one.get("prefixItems", ())
        if index < len(firsts):
            found = firsts[index]
        else:
            found = one.get("items")
        if isinstance(found, Mapping):
            yield from _options(found, definitions)


def _field(name: str, options: Sequence[Schema], definitions: Schema) -> Iterator[Schema]:
    """The schema of one key of an object."""
    for one in options:
        found = one.get("properties", {}).get(name, one.get("additionalProperties"))
        if isinstance(found, Mapping):
            yield from _options(found, definitions)


def _options(schema: Schema, definitions: Schema) -> Iterator[Schema]:
    """The schemas of which one holds, references followed."""
    if reference := schema.get("$ref"):
        yield from _options(definitions.get(str(reference).rpartition("/")[2], {}), definitions)
        return
    alternatives = [one for name in ("anyOf", "oneOf", "allOf") for one in schema.get(name, ())]
    if not alternatives:
        yield schema
    for one in alternatives:
        yield from _options(one, definitions)


def _types(schema: Schema) -> set[str]:
    """The types that JSON has names for; of a schema that lists its values, theirs."""
    named = schema.get("type")
    if named is not None:
        return {str(one) for one in (named if isinstance(named, list) else [named])}
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    return {_type_of(value) for value in values}


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return kinds.get(type(value), "")


def _between_quotation_marks(word: str) -> str | None:
    """The text of a word that is one text in quotation marks; None of any other."""
    if len(word) < 2 or word[0] != word[-1] or word[0] not in "\"'":
        return None
    try:
        node = compose_yaml(word)
        is_quoted = isinstance(node, yaml.ScalarNode) and node.style == word[0]
        if node is not None and is_quoted:
            return scalar_value(node)
        return None
    except DocumentError:
        return None
