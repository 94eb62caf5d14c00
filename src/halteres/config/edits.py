"""One change to one setting, typed (a tool's JSON) or as text (`--set`): which setting its name
means, and which value its text has by the setting's type.

A setting that is a text takes the text as it was typed. Where a number, a list or an object is
wanted, the text is YAML with decimal numbers, and within it the same rule holds again. The type is
read off the setting's JSON Schema, which is walked once (`SettingSchema`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from halteres.config.problem import Problem, UnknownSetting
from halteres.config.settings import ENV_WIRING, SECTIONS, wiring_of
from halteres.documents import DocumentError, compose_yaml, scalar_value
from halteres.errors import nearest
from halteres.logins import refused

ALIASES: Mapping[str, str] = {
    "model_name": "inference.model",
    "steps_per_eval": "trainer.eval_every",
    "save_checkpoint_interval": "trainer.checkpoint_every",
    "wandb_name": "run.name",
}
"""The seeds' names for our settings, where they differ from ours."""

IN_FILES: Mapping[str, str] = {"tokenizer_name": "inference.model"}
"""Wiring that in a file, a config's or a policy's, says what it is filled in from; as an edit it is
refused.
"""

SWITCHES: Mapping[str, str] = {
    "slurm": (
        "Halteres starts a run's processes on this machine: start it inside the job that "
        "SLURM gave you"
    ),
    "testing": (
        "to try settings without training use rl_test_inference, or rl_start_training with dry_run"
    ),
}
"""Settings of the seeds that can only be false here, with the reason."""

ENVIRONMENT = "run.environment"
"""It is selected rather than set: with another environment the other settings are not the same."""

OWN_KEYS = tuple(
    f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields
)
"""section.field of every setting of ours."""

CLOSE = 0.6  # how like a name must be to be offered: an agent follows the offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A name as it was given, and the new value."""

    name: str  # section.field, or a field that only one section has, or the seeds' name of one
    value: Any  # a Word where it was typed on a command line

    @property
    def key(self) -> str:
        """The setting it means, section.field; itself where that is not clear."""
        place = self.place()
        if isinstance(place, str):
            return place
        return self.name

    def place(self) -> str | Problem:
        """The setting it means, section.field; a name that is none of ours may be the
        environment's.
        """
        section, _, field = self.name.rpartition(".")
        if section in (*SECTIONS, "env"):
            return self.name
        if section:  # an unknown one: perhaps the seeds' name of it
            key = IN_FILES.get(field) or Edit(name=field, value=self.value).key
            guess = key
            if key not in OWN_KEYS:
                guess = nearest(section, (*SECTIONS, "env"))
            return UnknownSetting(field=self.name, got=self.value, did_you_mean=guess)
        owners = [name for name, model in SECTIONS.items() if field in model.model_fields]
        if len(owners) > 1:
            return self.ambiguous([f"{owner}.{field}" for owner in owners])
        if owners:
            return f"{owners[0]}.{field}"
        return ALIASES.get(field, f"env.{field}")

    def ambiguous(self, choice: list[str]) -> Problem:
        """The problem with a name that means several settings."""
        rule = f"more than one section has it: write {' or '.join(choice)}"
        return Problem(field=self.name, got=self.value, rule=rule)


def read_edit(text: str) -> Edit | Problem:
    """An edit written as `name=value`. Blanks around the equals sign are no part of the value."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().rpartition(".")[2]:
        return Problem(field=refused(text), got=None, rule="write it as section.field=value")
    return Edit(name=name.strip(), value=Word(value if name == name.rstrip() else value.strip()))


def switch_refused(name: str, value: Any) -> Problem:
    """The problem with `slurm: true` and `testing: true`."""
    return Problem(field=name, got=value, rule=f"it can only be false here: {SWITCHES[name]}")


def short_name(key: str, env_fields: Collection[str]) -> str:
    """The shortest name that means this setting, next to an environment's fields."""
    field = key.rpartition(".")[2]
    is_environments = field in env_fields and field not in ENV_WIRING
    is_clear = Edit(name=field, value=None).key == key and (
        key.startswith("env.") or not is_environments
    )
    if is_clear:
        return field
    return key


def names_beside(env_fields: Collection[str]) -> tuple[str, ...]:
    """Names of everything that can be set next to an environment's fields, sorted."""
    theirs = [f"env.{name}" for name in env_fields if name not in ENV_WIRING]
    wiring = {
        f"{section}.{name}" for section, model in SECTIONS.items() for name in wiring_of(model)
    }
    ours = [key for key in OWN_KEYS if key not in wiring | {ENVIRONMENT}]
    seeds = [name for name in ALIASES if name in ENV_WIRING]
    return tuple(sorted([*seeds, *(short_name(key, env_fields) for key in (*theirs, *ours))]))


def nearest_setting(name: str, env_fields: Iterable[str] = ()) -> str | None:
    """The setting that a name was most likely meant for; ours with its section."""
    bare = name.rpartition(".")[2]
    if bare in ALIASES:
        return ALIASES[bare]
    ours = {key.rpartition(".")[2]: key for key in OWN_KEYS}
    close = difflib.get_close_matches(bare, [*ours, *env_fields], n=1, cutoff=CLOSE)
    if close:
        return ours.get(close[0], close[0])
    return None


def odd_numbers(schema: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of an environment's fields that are true or false where its JSON Schema has a
    number, or not finite.
    """
    for name, value in values.items():
        types = schema_at(schema, [name]).types
        if isinstance(value, bool) and "boolean" not in types and types & {"integer", "number"}:
            yield Problem(field=f"env.{name}", got=value, rule="must be a number")
        elif not is_finite(value):
            yield Problem(field=f"env.{name}", got=value, rule="must be a finite number")


def number_in_text(types: set[str], value: Any) -> float | None:
    """The number that a text says, for a field whose types are numbers and no texts; None where it
    says none.
    """
    if (
        not isinstance(value, str)
        or "string" in types
        or not {"integer", "number"}.intersection(types)
    ):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if "integer" in types and number.is_integer():
        return int(number)
    if "number" in types and math.isfinite(number):
        return number
    return None


def is_finite(value: Any) -> bool:
    """Whether every number in a value, however deep, is finite."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_finite, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, float) or math.isfinite(value)


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
