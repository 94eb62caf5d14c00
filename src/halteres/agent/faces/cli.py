"""`halteres rl`: the tools on the command line.

Owns: the command of each tool, read off its argument model; JSON for programs, a page for people; the exit code.
Never: knows one tool from another; checks a value, which the call does for every face.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from halteres.agent.call import Reply, call
from halteres.agent.faces.commands import Parameter, command_name, parameters_of
from halteres.agent.faces.functions import own_caller
from halteres.agent.table import TOOLS
from halteres.agent.tool import Tool

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
        from halteres.agent.faces.readable import show

        show(reply)
    if "error" in reply.body:
        raise typer.Exit(1)
