"""`halteres rl`: the tools on the command line.

Owns: the command of each tool, read off its argument model; JSON for programs; for people one line per key, tables for
lists, blocks for long texts, and nothing left out; the exit code.
Never: knows one tool from another; checks a value, which the call does for every face.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from halteres.agent.call import Reply, call
from halteres.agent.faces.commands import Parameter, as_commands, command_name, parameters_of
from halteres.agent.faces.functions import own_caller
from halteres.agent.table import TOOLS
from halteres.agent.tool import Tool
from halteres.redaction import printable

HELP = """The agent's tools on the command line; --json prints what an agent sees.

Edits go to one draft, "default" unless HALTERES_SESSION names another, or --draft after a command that edits or uses
one: halteres rl get-current-config --draft NAME."""


def tools_app() -> typer.Typer:
    """One command for each tool: `rl_check_status` is `check-status`."""
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for tool in TOOLS:
        app.command(command_name(tool), help=tool.description, short_help=first_sentence(tool.description))(
            _command(tool)
        )
    return app


def first_sentence(text: str) -> str:
    """What a list of commands tells of one."""
    return re.split(r"(?<=[.?!]) ", " ".join(text.split()), maxsplit=1)[0]


def answer(name: str, arguments: Mapping[str, Any]) -> Reply:
    """Call a tool and wait for its answer, as the command line does."""
    return asyncio.run(call(name, arguments, own_caller("cli")))


def _command(tool: Tool) -> Callable[..., None]:
    """The function typer makes a command of; its signature is the tool's."""
    parameters = parameters_of(tool)

    def command(as_json: bool, **given: Any) -> None:
        arguments = {
            parameter.name: parameter.value(given[parameter.name])
            for parameter in parameters
            if given[parameter.name] not in (None, [])
        }
        _tell(answer(tool.name, arguments), as_json=as_json)

    signature = [_AS_JSON, *(_typed(parameter) for parameter in parameters)]
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined] - what typer reads
    return command


_AS_JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="Print the answer as compact JSON, and nothing else.")],
)


def _typed(parameter: Parameter) -> inspect.Parameter:
    """A parameter in typer's words. What is not given stays None: the tool's own defaults hold."""
    known: dict[str, Any] = {"help": parameter.help, "metavar": parameter.metavar, "show_default": False}
    if parameter.positional:
        annotation = Annotated[parameter.type | None, typer.Argument(**known)]
    else:
        annotation = Annotated[parameter.type | None, typer.Option(*parameter.flags, **known)]
    return inspect.Parameter(parameter.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _tell(reply: Reply, *, as_json: bool) -> None:
    """Print the answer; exit code 1 where it holds an error."""
    if as_json:
        sys.stdout.write(json.dumps(reply.for_agents, ensure_ascii=False, separators=(",", ":")) + "\n")
    else:
        show(reply)
    if "error" in reply.body:
        raise typer.Exit(1)


LONG = 60
"""Characters from which a text has a line of its own instead of a table's cell."""

PIPE_WIDTH = 1000
"""Columns where there is no terminal: paths and log lines stay whole."""

_GAP = 2


def show(reply: Reply) -> None:
    """Print an answer: on stderr where the call failed."""
    stream = sys.stderr if reply.failed else sys.stdout
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)
    with console.capture() as page:
        for part in _parts(reply, console.width):
            console.print(part, soft_wrap=isinstance(part, Text))
    stream.write("".join(f"{line.rstrip()}\n" for line in page.get().splitlines()))


def _parts(reply: Reply, width: int) -> Iterator[RenderableType]:
    body = dict(reply.body)
    following = body.pop("next", "")
    if "error" in body:
        yield Text(f"error: {_word(body.pop('error'))}", style="red")
    if body:
        yield _grid(body, width)
    for image in reply.images:
        if str(image) not in body.values():
            yield Text(f"picture: {image}")
    if following:
        yield Text(f"next: {_word(following)}", style="bold")


def _grid(body: Mapping[str, Any], width: int) -> Table:
    """One line per key, within so many columns."""
    left = width - max(map(len, body)) - _GAP
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in body.items():
        grid.add_row(name, _shown(value, left))
    return grid


def _shown(value: Any, width: int) -> RenderableType:
    if isinstance(value, Mapping) and value:
        return _grid(value, width) if _is_deep(value) else Text(_inline(value))
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and item for item in value):
        return _things(value, width)
    if isinstance(value, list):
        return _list(value)
    return Text(_word(value))


def _is_deep(value: Mapping[str, Any]) -> bool:
    """Whether a mapping wants lines of its own: it holds more mappings, or much."""
    return any(isinstance(item, Mapping) for item in value.values()) or len(_inline(value)) > 2 * LONG


def _inline(value: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}={_bracketed(item)}" for name, item in value.items())


def _bracketed(item: Any) -> str:
    return f"[{_word(item)}]" if isinstance(item, list) and item else _word(item)


def _list(items: Sequence[Any]) -> Text:
    """Names and figures side by side, sentences on one line each."""
    words = [_word(item) for item in items]
    is_prose = any(len(word.split()) > 1 or len(word) > LONG for word in words)
    return Text(("\n" if is_prose else ", ").join(words) or "–")


def _things(items: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """A table, or blocks where a cell would be long or the columns too many."""
    names = list(dict.fromkeys(name for item in items for name in item))
    columns = [[name, *(_word(item[name]) for item in items if name in item)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    has_breaks = any("\n" in cell for column in columns for cell in column)
    if has_breaks or max(widths) > LONG or sum(widths) + _GAP * len(widths) > width:
        return Group(*[part for item in items for part in (Text(), _grid(item, width))][1:])
    return _table(items, names)


def _table(items: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name in names:
        figures = all(isinstance(item.get(name), int | float | None) for item in items)
        table.add_column(name, justify="right" if figures else "left")
    for item in items:
        table.add_row(*(_word(item[name]) if name in item else "" for name in names))
    return table


def _word(value: Any) -> str:
    """One value as people write it; calls become commands."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return _inline(value) or "–"
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "–"
    return printable(as_commands(str(value)))
