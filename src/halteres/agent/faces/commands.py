"""Calls as commands: who reads a page in a terminal has `halteres rl`, no function.

Owns: a tool's name on the command line; the words of a call; finding the calls that a line of an answer proposes.
Never: changes a line that it cannot read.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from halteres.agent.faces.parameters import Parameter, parameters_of
from halteres.agent.table import BY_NAME
from halteres.agent.tool import Tool

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
