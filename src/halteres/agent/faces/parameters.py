"""A tool's arguments as words of a command line.

Owns: which are positional, their flags, types and help; the value that a word stands for.
Never: checks a value; that the call does for every face.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec
from pydantic.fields import FieldInfo

from halteres.agent.tool import Tool

WORDS: Final = (str, bool, list[str])
"""Types that a word is taken for as it stands; any other value is written as JSON, so that the call alone judges it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument of one tool."""

    name: str
    type: Any  # of its word: str, bool, or a list of str
    as_json: bool  # its word is read as JSON, or as a plain text where it is none
    positional: bool
    help: str
    metavar: str | None

    @property
    def flags(self) -> tuple[str, ...]:
        """Its names as an option."""
        flag = self.name.replace("_", "-")
        return (f"--{flag}/--no-{flag}",) if self.type is bool else (f"--{flag}",)

    def value(self, word: Any) -> Any:
        """What a word stands for."""
        return _json_or_text(word) if self.as_json else word


def parameters_of(tool: Tool) -> tuple[Parameter, ...]:
    """The tool's arguments, in order."""
    fields = tool.arguments.model_fields
    first = _positional(fields)
    return tuple(_parameter(name, field, positional=name in first) for name, field in fields.items())


def _positional(fields: dict[str, FieldInfo]) -> Sequence[str]:
    """What the seeds' calls give without a name: what is required, a run, a field and its value."""
    pair = ("field", "value") if "value" in fields else ()
    return (*pair, *(name for name, field in fields.items() if field.is_required() or name == "run_id"))


def _parameter(name: str, field: FieldInfo, *, positional: bool) -> Parameter:
    annotation = _without_none(field.annotation)
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    as_word = annotation in WORDS or bool(choices)
    return Parameter(
        name=name,
        type=annotation if annotation in WORDS else str,
        as_json=not as_word,
        positional=positional,
        help=_help(field, repeated=get_origin(annotation) is list and not positional),
        metavar=name.upper() if positional else "|".join(choices) or _METAVARS.get(annotation, "JSON"),
    )


_METAVARS: Final[dict[Any, str | None]] = {str: "TEXT", list[str]: "TEXT", int: "N", float: "X", bool: None}


def _help(field: FieldInfo, *, repeated: bool) -> str:
    """Its description, and a default that is worth telling."""
    worth = isinstance(field.default, int | float | str) and not isinstance(field.default, bool)
    default = "yes" if field.default is True else field.default if worth else None
    tails = ("(may be repeated)" if repeated else "", "" if default is None else f"[default: {default}]")
    return " ".join(part for part in (field.description or "", *tails) if part)


def _without_none(annotation: Any) -> Any:
    """The type of a value that is given: null stands for one that is not."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    options = [option for option in get_args(annotation) if option is not types.NoneType]
    return options[0] if len(options) == 1 else Any


def _json_or_text(word: str) -> Any:
    """16 is a number, "16" in quotation marks a text, `some words` a text too."""
    try:
        return msgspec.json.decode(word)
    except (ValueError, RecursionError):
        return word
