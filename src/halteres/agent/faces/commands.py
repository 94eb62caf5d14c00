"""Calls as commands of a shell: for those who read an answer in a terminal and have `halteres rl`, no function.

A tool's name and parameters on the command line, the words of a call, and the calls that a line of an answer proposes,
put as commands. A line that cannot be read stays as it is.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec
from pydantic.fields import FieldInfo

from halteres.agent.table import BY_NAME
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


_CALL = re.compile(r"""\brl_[a-z_]+\((?:[^()"']|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*\)""")
"""A call of a tool, up to its closing bracket; brackets inside quotation marks are text."""

_JSON_NAMES = {"true": True, "false": False, "null": None}


def as_commands(line: str) -> str:
    """The line with every call in it as a command.

    >>> as_commands('rl_check_status("3fa9", wait_s=45, until="step>=3")')
    "halteres rl check-status 3fa9 --wait-s 45 --until 'step>=3'"
    """
    return _CALL.sub(lambda found: _command(found[0]) or found[0], line)


def words_of(tool: Tool, arguments: Mapping[str, Any]) -> list[str]:
    """The words that call a tool: `halteres`, `rl`, its command, its arguments.

    Raises:
        KeyError: it takes no such argument.
    """
    parameters = {parameter.name: parameter for parameter in parameters_of(tool)}
    words = [word for name, value in arguments.items() for word in _words(parameters[name], value)]
    return ["halteres", "rl", command_name(tool), *words]


def command_name(tool: Tool) -> str:
    """The tool's name on the command line."""
    return tool.name.removeprefix("rl_").replace("_", "-")


def _command(text: str) -> str | None:
    """The command for one call; None where it is not one that could be made as it stands."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in BY_NAME:
        return None
    tool = BY_NAME[call.func.id]
    given = [*zip(tool.arguments.model_fields, call.args, strict=False)]
    given += [(word.arg or "", word.value) for word in call.keywords]
    try:
        return shlex.join(words_of(tool, {name: _value(node) for name, node in given}))
    except (KeyError, ValueError):
        return None


def _value(node: ast.expr) -> Any:
    """A JSON value, or the name that stands for one ("name", "run_id").

    Raises:
        ValueError: it is neither.
    """
    if isinstance(node, ast.Name):
        return _JSON_NAMES.get(node.id, node.id.upper())
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_value(key): _value(item) for key, item in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    if value is ...:
        raise ValueError("an ellipsis stands for anything")
    return value


def _words(parameter: Parameter, value: Any) -> Iterator[str]:
    """An argument as words of the command line."""
    flag = parameter.flags[0]
    if isinstance(value, bool) and parameter.type is bool:
        yield flag.partition("/")[0 if value else 2]
        return
    for item in value if isinstance(value, list) and not parameter.as_json else [value]:
        if not parameter.positional:
            yield flag
        yield item if isinstance(item, str) else json.dumps(item)
