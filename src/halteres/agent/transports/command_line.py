"""`halteres rl`: the tools on the command line.

Each tool's command is read off its argument model; values are checked by the call, as for every
transport. Programs get JSON; people get one line per key, tables for lists, blocks for long texts,
and calls as commands.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
import typer
from pydantic.fields import FieldInfo
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from halteres.agent.call import Reply, call
from halteres.agent.table import BY_NAME, TOOLS
from halteres.agent.tool import Caller, Tool
from halteres.config.edits import Word
from halteres.documents import parse_json
from halteres.next_step import NextStep, Placeholder
from halteres.redaction import printable

HELP = """The agent's tools on the command line; --json prints what an agent sees.

Edits go to one draft, "default" unless HALTERES_SESSION names another, or --draft after a command
that edits or uses one: halteres rl get-current-config --draft NAME."""

_METAVARS: Final[dict[Any, str | None]] = {
    str: "TEXT",
    list[str]: "TEXT",
    int: "N",
    float: "X",
    bool: None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument of one tool."""

    name: str
    type: Any  # of its word: str, bool, or a list of str
    as_json: bool  # its word is read as JSON, or as a plain text where it is none
    is_setting: bool  # its word is a setting's value, whose type says what it means
    positional: bool
    help: str
    metavar: str | None

    @classmethod
    def of(cls, name: str, field: FieldInfo, *, positional: bool) -> Parameter:
        """Read off the argument model."""
        annotation: Any = field.annotation
        # null stands for a value that is not given
        if get_origin(annotation) in (Union, types.UnionType):
            options = [option for option in get_args(annotation) if option is not types.NoneType]
            annotation = Any
            if len(options) == 1:
                annotation = options[0]
        if get_origin(annotation) is Annotated:
            # a type with a rule of its own is read as the type
            annotation = get_args(annotation)[0]
        choices = ()
        if get_origin(annotation) is Literal:
            choices = get_args(annotation)
        is_setting = annotation is Any and positional
        # taken as it stands; any other value is written as JSON
        is_word = annotation in (str, bool, list[str])
        tails = [field.description or ""]
        if get_origin(annotation) is list and not positional:
            tails.append("(may be repeated)")
        if field.default is True:
            tails.append("[default: yes]")
        elif isinstance(field.default, int | float | str) and field.default is not False:
            tails.append(f"[default: {field.default}]")
        metavar = "|".join(choices) or _METAVARS.get(annotation, "JSON")
        if positional:
            metavar = name.upper()
        kind: type[Any] = str
        if is_word:
            kind = annotation
        return cls(
            name=name,
            type=kind,
            as_json=not is_word and not choices and not is_setting,
            is_setting=is_setting,
            positional=positional,
            help=" ".join(part for part in tails if part),
            metavar=metavar,
        )

    @property
    def flag(self) -> str:
        """Its name as an option."""
        flag = self.name.replace("_", "-")
        if self.type is bool:
            return f"--{flag}/--no-{flag}"
        return f"--{flag}"

    def value(self, given: Any) -> Any:
        """What was typed, as the tool gets it."""
        if self.is_setting:
            return Word(given)
        if self.as_json:
            return _json_or_text(given)
        return given


def parameters_of(tool: Tool[...]) -> tuple[Parameter, ...]:
    """The tool's arguments, in order. What the seeds' calls give without a name is positional: what
    is required, a run, a field and its value.
    """
    fields = tool.arguments.model_fields
    pair = ()
    if "value" in fields:
        pair = ("field", "value")
    return tuple(
        Parameter.of(name, field, positional=field.is_required() or name in ("run_id", *pair))
        for name, field in fields.items()
    )


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
        brief = first_sentence(tool.description)
        app.command(command_name(tool), help=tool.description, short_help=brief)(_command(tool))
    return app


def command_name(tool: Tool[...]) -> str:
    """The tool's name on the command line."""
    return tool.name.removeprefix("rl_").replace("_", "-")


def first_sentence(text: str) -> str:
    """What stands in a list of commands."""
    return re.split(r"(?<=[.?!]) ", " ".join(text.split()), maxsplit=1)[0]


def answer(name: str, arguments: Mapping[str, Any], caller: Caller | None = None) -> Reply:
    """Call a tool and wait for its answer, as the command line does."""
    return asyncio.run(call(name, arguments, caller or Caller.own()))


def _command(tool: Tool[...]) -> Callable[..., None]:
    """The function that typer makes a command of; its signature is the tool's. What is not given
    stays None: the tool's own defaults hold.
    """
    parameters = parameters_of(tool)

    def command(as_json: bool, **given: Any) -> None:
        arguments = {
            parameter.name: parameter.value(given[parameter.name])
            for parameter in parameters
            if given[parameter.name] not in (None, [])
        }
        if as_json:
            reply = answer(tool.name, arguments, Caller.own(has_no_host=True))
            sys.stdout.write(
                json.dumps(reply.for_agents, ensure_ascii=False, separators=(",", ":")) + "\n"
            )
        else:
            reply = answer(tool.name, arguments, Caller.own(as_command, has_no_host=True))
            show(reply)
        if "error" in reply.body:
            raise typer.Exit(1)

    as_json = Annotated[
        bool, typer.Option("--json", help="Print the answer as compact JSON, and nothing else.")
    ]
    signature = [
        inspect.Parameter(
            "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=as_json
        )
    ]
    for parameter in parameters:
        known: dict[str, Any] = {
            "help": parameter.help,
            "metavar": parameter.metavar,
            "show_default": False,
        }
        if parameter.positional:
            how = typer.Argument(**known)
        else:
            how = typer.Option(parameter.flag, **known)
        annotation = Annotated[parameter.type | None, how]
        signature.append(
            inspect.Parameter(
                parameter.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined] - what typer reads
    return command


def _json_or_text(word: str) -> Any:
    """16 is a number, "16" in quotation marks a text; `some words` are one, too, and so is JSON
    with a key twice, which the tool refuses.
    """
    try:
        value = msgspec.json.decode(word)
        parse_json(word, most_values=len(word))
        return value
    except (ValueError, RecursionError):
        return word


def as_command(step: NextStep) -> str:
    """A call as a command of `halteres rl`.

    >>> as_command(NextStep.of("rl_check_status", "3fa9", wait_s=45, until="step>=3"))
    "halteres rl check-status 3fa9 --wait-s 45 --until 'step>=3'"
    """
    tool = BY_NAME.get(step.tool)
    if tool is None:  # of another version's event
        return step.call
    return shlex.join(
        words_of(
            tool,
            {
                **dict(zip(tool.arguments.model_fields, step.positional or (), strict=False)),
                **step.given,
            },
        )
    )


def for_person(step: NextStep) -> str:
    """A call as a command that a person types: a verb of `halteres` where one does the same.

    >>> for_person(NextStep("rl_start_training", {"resume_from": "3fa9"}))
    'halteres train --resume 3fa9'
    >>> for_person(NextStep.of("rl_get_results", "3fa9"))
    'halteres rl get-results 3fa9'
    """
    if step.command.startswith("halteres "):
        return step.command
    return as_command(step)


def words_of(tool: Tool[...], arguments: Mapping[str, Any]) -> list[str]:
    """The words that call a tool: `halteres`, `rl`, its command, its arguments.

    Raises:
        KeyError: it takes no such argument.
    """
    parameters = {parameter.name: parameter for parameter in parameters_of(tool)}
    words = ["halteres", "rl", command_name(tool)]
    for name, value in arguments.items():
        parameter = parameters[name]
        if isinstance(value, bool) and parameter.type is bool:
            yes, _, no = parameter.flag.partition("/")
            if value:
                words.append(yes)
            else:
                words.append(no)
            continue
        items = [value]
        if isinstance(value, list) and not parameter.as_json:
            items = value
        for item in items:
            if not parameter.positional:
                words.append(parameter.flag)
            if isinstance(item, Placeholder):
                words.append(item.upper())
            elif isinstance(item, str):
                words.append(item)
            else:
                words.append(json.dumps(item))
    return words


LONG = 60  # characters from which a text has a line of its own instead of a table's cell
PIPE_WIDTH = 1000  # columns where there is no terminal: paths and log lines stay whole
_GAP = 2


def show(reply: Reply) -> None:
    """Print an answer: on stderr where the call failed."""
    if reply.failed:
        stream = sys.stderr
    else:
        stream = sys.stdout
    width = PIPE_WIDTH
    if stream.isatty():
        width = None
    console = Console(file=stream, highlight=False, width=width)
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
        inline = _inline(value)
        is_deep = (
            any(isinstance(item, Mapping) for item in value.values()) or len(inline) > 2 * LONG
        )
        if is_deep:
            return _grid(value, width)
        return Text(inline)
    if not isinstance(value, list):
        return Text(_word(value))
    if value and all(isinstance(item, Mapping) and item for item in value):
        return _table(value, width)
    # names and figures side by side, sentences on one line each
    words = [_word(item) for item in value]
    between = ", "
    if any(len(word.split()) > 1 or len(word) > LONG for word in words):
        between = "\n"
    return Text(between.join(words) or "–")


def _inline(value: Mapping[str, Any]) -> str:
    words: list[str] = []
    for name, item in value.items():
        word = _word(item)
        if isinstance(item, list) and item:
            word = f"[{word}]"
        words.append(f"{name}={word}")
    return "  ".join(words)


def _table(items: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """A table, or blocks where a cell would be long or the columns too many."""
    names = list(dict.fromkeys(name for item in items for name in item))
    columns = [[name, *(_word(item[name]) for item in items if name in item)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    has_breaks = any("\n" in cell for column in columns for cell in column)
    if has_breaks or max(widths) > LONG or sum(widths) + _GAP * len(widths) > width:
        return Group(*[part for item in items for part in (Text(), _grid(item, width))][1:])
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name)
        if all(isinstance(item.get(name), int | float | None) for item in items):
            table.columns[-1].justify = "right"
    for item in items:
        words = {name: _word(value) for name, value in item.items()}
        table.add_row(*(words.get(name, "") for name in names))
    return table


def _word(value: Any) -> str:
    """One value as people write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
    if isinstance(value, Mapping):
        return _inline(value) or "–"
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "–"
    return printable(str(value))
