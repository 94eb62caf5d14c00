"""What the value of a setting reaches beyond the run: code, files, servers, keys, or nothing.

Owns: the kinds of reach; the walk that finds every text of a value with its kind.
Never: decides who may set what.
Guarantees: a text is judged as the setting's type reads it, also where a list or an object came as
YAML.

A setting of ours that can hold a text declares its kind (`reaches`, in its JSON Schema). Settings
of other people's environments declare none; their texts are judged by what they look like.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from halteres.config.gem_ids import family_of
from halteres.config.values import ANYTHING, SettingSchema
from halteres.documents import DocumentError, TooLarge, parse_yaml
from halteres.logins import ADDRESS_FORM, is_place, is_web_address

Reach = Literal["code", "path", "address", "key", "environment", "model", "id", "name", "nothing"]
"""code: a program, module or function that is run, or its arguments; path: a file or folder;
address: a server; key: a secret that is spent; environment, model: one by its name, or by its path;
id: of an environment in another package's registry, or MODULE:ID, whose module is imported; name:
of a data set or a task, or its path; nothing: words."""

REACHES: Final = "reaches"  # the key in a field's JSON Schema

_KINDS: Final[tuple[Any, ...]] = get_args(Reach)

MOST_PARTS, MOST_CHARACTERS = 10_000, 20_000
"""Parts of one value, and characters of a text that is read as YAML, whose aliases make little text
into much."""


class TooLargeToCheck(ValueError):
    """A value with more parts than are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text of a value."""

    place: str  # of the setting, with what leads to the text: rewards.0.function
    text: str
    reach: Reach | None  # None: its setting declares none


def declared(reach: Reach | None, extra: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """What a field adds to its JSON Schema; None where it adds nothing."""
    found = {**(extra or {}), **({REACHES: reach} if reach else {})}
    return found or None


def _address(text: str) -> str:
    if not is_web_address(text):
        raise PydanticCustomError("address", ADDRESS_FORM)
    return text


def _places(text: str) -> str:
    if not all(is_place(place.strip()) for place in text.split(",")):
        raise PydanticCustomError("address", f"a server's {ADDRESS_FORM}")
    return text


WebAddress = Annotated[str, AfterValidator(_address), Field(json_schema_extra=declared("address"))]
"""The address of a server. What an HTTP client would read in another way than we do is refused:
nothing would strike the login out of it."""

Places = Annotated[str, AfterValidator(_places), Field(json_schema_extra=declared("path"))]
"""A folder or a server's address, or several by commas."""


def texts_of(schema: Mapping[str, Any], name: str, value: Any) -> Iterator[Text]:
    """Every text in the value of a setting.

    Args:
        schema: JSON Schema of the object that has the setting; one without it declares nothing.
        name: of the setting.
        value: as it was given, or as it holds.

    Raises:
        TooLargeToCheck: the value has too many parts.
    """
    field = schema.get("properties", {}).get(name, {})
    return _Walk().texts(SettingSchema.of(field, schema.get("$defs", {})), value, name, None)


class _Walk:
    """A value beside the schema that describes it."""

    def __init__(self) -> None:
        self._parts = 0

    def texts(
        self, schema: SettingSchema, value: Any, place: str, reach: Reach | None
    ) -> Iterator[Text]:
        """The texts in a value; a part that declares no reach has that of its setting. What several
        alternatives declare is yielded for each of them.
        """
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise TooLargeToCheck
        reach = _declared_by(schema) or reach
        if isinstance(value, str):
            yield from self._text(schema, value, place, reach)
        elif isinstance(value, bool) and reach is not None and "string" in schema.types:
            # a word that YAML takes for a truth value: on, off
            yield Text(place=place, text=str(value), reach=reach)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                fields = schema.fields(key)
                if reach is None and not any(field.parts[0] for field in fields):
                    yield Text(place=place, text=str(key), reach=None)
                for field in fields or [ANYTHING]:
                    yield from self.texts(field, item, f"{place}.{key}", reach)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                for one in schema.items(number) or [ANYTHING]:
                    yield from self.texts(one, item, f"{place}.{number}", reach)

    def _text(
        self, schema: SettingSchema, value: str, place: str, reach: Reach | None
    ) -> Iterator[Text]:
        is_fixed = any(
            value in part.get("enum", ()) or value == part.get("const") for part in schema.parts
        )
        if reach is None and is_fixed:
            return
        takes_texts = "string" in schema.types
        # A list or an object may come as YAML; a class that declares nothing may read any text so.
        if takes_texts or reach:
            yield Text(place=place, text=value, reach=reach)
        if takes_texts and reach:
            return
        for parsed in (_parsed(value), _typed(schema, value)):
            if not isinstance(parsed, str):
                yield from self.texts(schema, parsed, place, reach)
            elif not (takes_texts or reach):
                yield Text(place=place, text=value, reach=reach)


def _typed(schema: SettingSchema, text: str) -> Any:
    """The text as a setting of these types takes it: `[~]` is a list of one text there."""
    try:
        return schema.value_of(text)
    except TooLarge as error:
        raise TooLargeToCheck from error
    except DocumentError:
        return text


def _declared_by(schema: SettingSchema) -> Reach | None:
    for part in schema.parts:
        if part.get(REACHES) in _KINDS:
            return part[REACHES]
    return None


def _parsed(text: str) -> Any:
    """The text as YAML, as settings are read; itself where it is not YAML, and then no setting is
    made of it.
    """
    if len(text) > MOST_CHARACTERS:
        raise TooLargeToCheck
    try:
        return parse_yaml(text)
    except TooLarge as error:
        raise TooLargeToCheck from error
    except DocumentError:
        return text


_SEPARATORS: Final = re.compile(r"""[\s,;=|()\[\]{}<>"'`]+""")
"""Between the words of a text, and between the items of a list that is written as one."""

_PATH: Final = re.compile(r"/|~|(?i:file:)|\.[\w/]|\.$")
"""How a path that leads elsewhere begins, or one of a hidden file; not ".*", a pattern."""

_PATH_WITHIN: Final = re.compile(r"/\w|~[\w/]|(?i:file:)|\.{1,2}/")
"""How one begins that stands behind other words; not "/" and "~" alone."""

_CODE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|.*\.py(:\w*)?")
"""MODULE:FUNCTION, or a file of Python."""


def looks_elsewhere(text: str) -> bool:
    """Whether a text, or a word of it, looks like an address, or like a path that leads elsewhere
    than below a folder of ours.

    >>> [looks_elsewhere(one) for one in ("openai/gsm8k", "and/or", "x, /etc/passwd", "http://x")]
    [False, False, True, True]
    """
    return _PATH.match(text) is not None or any(
        _PATH_WITHIN.match(word) or "://" in word or ".." in word.split("/")
        for word in _words(text)
    )


def looks_outward(text: str) -> bool:
    """Whether it looks elsewhere, or a word of it like a function's name or a program's file.

    >>> [looks_outward(one) for one in ("openai/gsm8k", "os:abort", "rewards.py")]
    [False, True, True]
    """
    return looks_elsewhere(text) or any(_CODE.fullmatch(word) for word in _words(text))


def names_a_module(id: str) -> bool:
    """Whether an id names the module that registers it, as Gymnasium's do, and is none of GEM's,
    which are written alike.

    >>> [names_a_module(one) for one in ("Taxi-v3", "game:Wordle-v0", "mine:Wordle-v0")]
    [False, False, True]
    """
    return looks_elsewhere(id) or (":" in id and family_of(id) is None)


def _words(text: str) -> list[str]:
    return [word for word in _SEPARATORS.split(text) if word]
