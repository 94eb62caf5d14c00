"""A setting's JSON Schema, walked once (`SettingSchema`), and what a text typed for the setting
means by it.

A setting that is a text takes the text as it was typed. Where a number, a list or an object is
wanted, the text is YAML with decimal numbers, and within it the same rule holds again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from halteres.documents import DocumentError, compose_yaml, scalar_value

Schema = Mapping[str, Any]

_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")  # YAML 1.1 takes it for a text
_DIGITS = re.compile(r"[-+]?[0-9]{1,1000}")  # a longer one is refused with the reason
_OTHER_BASE = re.compile(r"[-+]?0[bx].*")


@dataclass(frozen=True, slots=True)
class SettingSchema:
    """What a setting, or a part of its value, may be."""

    # the schema itself, then its alternatives, however deep; references are followed
    parts: tuple[Schema, ...] = ()
    definitions: Schema = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, schema: Schema, definitions: Schema | None = None) -> SettingSchema:
        """Of a JSON Schema; `definitions`: what it refers to, by default its own `$defs`."""
        known: Schema = schema.get("$defs", {})
        if definitions is not None:
            known = definitions
        return cls(tuple(_parts(schema, known)), known)

    @property
    def types(self) -> set[str]:
        """The types that JSON has names for; of a schema that lists its values, theirs. Empty: any
        type.
        """
        return set[str]().union(*map(_types, self.parts))

    def fields(self, name: str) -> list[SettingSchema]:
        """Of a key of an object: what each alternative says that its value may be."""
        found = (
            part.get("properties", {}).get(name, part.get("additionalProperties"))
            for part in self.parts
        )
        return [self.of(one, self.definitions) for one in found if isinstance(one, Mapping)]

    def items(self, index: int) -> list[SettingSchema]:
        """Of an item of a list: what each alternative says that it may be."""
        found: list[SettingSchema] = []
        for part in self.parts:
            item = part.get("items")
            firsts = part.get("prefixItems", ())
            if index < len(firsts):
                item = firsts[index]
            if isinstance(item, Mapping):
                found.append(self.of(item, self.definitions))
        return found

    def one_of(self, schemas: Sequence[SettingSchema]) -> SettingSchema:
        """The schema of what may be any of these, which are parts of this one."""
        parts = tuple(part for schema in schemas for part in schema.parts)
        return SettingSchema(parts, self.definitions)

    def value_of(self, given: Any) -> Any:
        """What a value means for a setting of this schema. Raises as the function `value_of`."""
        if not isinstance(given, str):
            return given
        if not isinstance(given, Word) and ("string" in self.types or not self.types):
            return given
        return _read(given, self)


def _parts(schema: Schema, definitions: Schema) -> Iterator[Schema]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    whole = {**definitions.get(name, {}), **schema}
    yield whole
    for key in ("anyOf", "oneOf", "allOf"):
        for alternative in whole.get(key, ()):
            yield from _parts(alternative, definitions)


def _types(schema: Schema) -> set[str]:
    named = schema.get("type")
    if isinstance(named, list):
        return set(map(str, named))
    if named is not None:
        return {str(named)}
    values = list(schema.get("enum", ()))
    if "const" in schema:
        values.append(schema["const"])
    return {_type_of(value) for value in values}


ANYTHING = SettingSchema()
"""Of a setting whose type is unknown."""


def schema_at(schema: Schema, names: Sequence[str]) -> SettingSchema:
    """The schema of a field of a field; ANYTHING where it is unknown."""
    found = SettingSchema.of(schema)
    for name in names:
        found = found.one_of(found.fields(name))
    return found


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
    return SettingSchema.of(schema).value_of(given)


def _read(word: str, schema: SettingSchema) -> Any:
    text, bare, types = str(word), word.strip(), schema.types
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
        value = _built(node, schema)
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


def _built(node: yaml.Node, schema: SettingSchema) -> Any:
    """The value of a node, by the same rule: a text among a list of texts is as it was typed."""
    if isinstance(node, yaml.SequenceNode):
        return [
            _built(item, schema.one_of(schema.items(index)))
            for index, item in enumerate(node.value)
        ]
    if isinstance(node, yaml.MappingNode):
        return {
            str(key.value): _built(value, schema.one_of(schema.fields(str(key.value))))
            for key, value in node.value
        }
    plain = str(node.value)
    if isinstance(node, yaml.ScalarNode) and node.style is not None:
        return scalar_value(node)
    types = schema.types
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
