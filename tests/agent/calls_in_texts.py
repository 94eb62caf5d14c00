"""Calls of tools and commands that a text names: found, read, and held against what there is."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from halteres.agent.table import BY_NAME
from halteres.agent.waiting import Until
from halteres.cli.main import app
from halteres.service.server import parser as service_parser

USAGE_ERROR: Any = typer.BadParameter.__base__
"""click's, of which typer may have its own copy."""

ROLES = ("service", "engine", "api", "trainer", "env", "eval", "supervisor")


def calls_in(text: str) -> Iterator[str]:
    """Every call of a tool in backticks, code blocks aside."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for quoted in re.findall(r"`([^`]+)`", prose):
        if re.match(r"rl_\w+\(", quoted):
            yield quoted


def read_call(call: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments; `run_id` and the like stand for a text."""
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name), call
    name = tree.func.id
    words = {"true": True, "false": False, "null": None}

    def value(node: ast.expr) -> Any:
        return words.get(node.id, node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)

    given = dict(zip(BY_NAME[name].arguments.model_fields, map(value, tree.args), strict=False))
    return name, {**given, **{str(word.arg): value(word.value) for word in tree.keywords}}


def check_call(call: str) -> None:
    """It is one that the tool takes."""
    name, arguments = read_call(call)
    BY_NAME[name].arguments.model_validate(arguments)
    if "until" in arguments:
        Until.parse(arguments["until"])
    if "role" in arguments:
        assert arguments["role"] in ROLES


def calls_in_blocks(text: str) -> Iterator[str]:
    """Every call that is a line of a code block, or begins one."""
    for block in _blocks(text):
        for line in block.splitlines():
            if line.startswith("rl_"):
                yield line.partition("  #")[0].strip()


def commands_in(text: str) -> Iterator[str]:
    """Every command of `halteres`, in backticks and in code blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for quoted in re.findall(r"`([^`]+)`", prose):
        if quoted.startswith("halteres ") and "/" not in quoted.split()[1]:
            yield quoted
    for block in _blocks(text):
        yield from re.findall(r"\$\((halteres [^)]+)\)", block)
        yield from (line for line in block.splitlines() if line.startswith("halteres "))


def check_command(command: str) -> None:
    """It exists, and takes these arguments; nothing is run. A word in capitals stands for whatever
    fits there.
    """
    _, *words = itertools.takewhile(
        lambda word: word not in ("&", "|"), shlex.split(command, comments=True)
    )
    read_command(command, words)


def read_command(command: str, words: list[str]) -> None:
    """Read a verb's words as the command line does. AssertionError: there is no such verb or
    option.
    """
    current: Any = typer.main.get_command(app)
    path = "halteres"
    # the text may name a group of verbs alone, or VERB
    while isinstance(current, TyperGroup) and words and not words[0].isupper():
        if words[0].startswith("-"):
            assert options_in(words) <= options_of(current), command
            return
        name = words.pop(0)
        assert name in current.commands, f"{command}: there is no {name}"
        current, path = current.commands[name], f"{path} {name}"
    if current.name == "rl":
        check_tool(words)
    if current.name == "rl" or isinstance(current, TyperGroup):
        return
    try:
        current.make_context(path, words)
    except USAGE_ERROR as error:
        # the text names it, and leaves the rest to its reader
        assert type(error).__name__ == "MissingParameter", f"{command}: {error}"


def options_in(words: list[str]) -> set[str]:
    """The options among words, without their values."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def options_of(group: TyperGroup) -> set[str]:
    """What a group of verbs takes where no verb follows: `serve` takes the service's options."""
    found = {name for param in group.params for name in param.opts} | {"--help"}
    if group.name == "serve":
        found |= set(service_parser()._option_string_actions)
    return found


def check_tool(words: list[str]) -> None:
    """`halteres rl`: the name of a tool; its options are held by test_rl_command."""
    assert not words or "rl_" + words[0].replace("-", "_") in BY_NAME, words


def _blocks(text: str) -> list[str]:
    found = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    # a line may go on in the next one
    return [block.replace("\\\n", " ") for block in found]
