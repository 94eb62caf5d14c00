"""`halteres rl`, `tools`, `mcp`, `install-agent`, `init`: the tools for agents, and setting up who
calls them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from halteres.agent.skill_copies import Step

Client = Literal["claude", "codex", "cursor", "gemini", "hermes", "generic"]

_VERBS: Mapping[str, tuple[str, str]] = {  # of a step: what was done, what would be done
    "write": ("wrote", "would write"),
    "update": ("updated", "would update"),
    "remove": ("removed", "would remove"),
    "leave": ("already there", "already there"),
    "keep": ("left alone", "would leave alone"),
    "run": ("ran", "would run"),
    "absent": ("was not registered", "is not registered"),
}


def rl(context: typer.Context) -> None:
    """Call the agent's tools: find, configure, test, start, watch, judge (`halteres rl --help`
    lists them).
    """
    from halteres import process
    from halteres.agent.transports.command_line import tools_app

    process.block_torch()
    tools_app()(args=context.args, prog_name="halteres rl")


def tools(
    format: Annotated[
        Literal["names", "openai", "mcp"],
        typer.Option(help="names; openai: function definitions; mcp: as in tools/list."),
    ] = "names",
) -> None:
    """Print the rl_* tools: their names, or their definitions as JSON."""
    from halteres.agent.table import TOOLS

    if format == "names":
        typer.echo("\n".join(tool.name for tool in TOOLS))
    elif format == "openai":
        from halteres.agent.transports.openai import definitions

        typer.echo(json.dumps(definitions(), ensure_ascii=False, indent=2))
    else:
        from halteres.agent.transports.mcp.server import tool_definition

        typer.echo(
            json.dumps(
                {"tools": [tool_definition(tool) for tool in TOOLS]}, ensure_ascii=False, indent=2
            )
        )


def mcp(
    http: Annotated[
        bool, typer.Option("--http", help="Streamable HTTP instead of standard input and output.")
    ] = False,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port on 127.0.0.1, with --http; 0 takes a free one."),
    ] = 8765,
) -> None:
    """Serve the rl_* tools over MCP (`halteres install-agent` sets a host up to start this)."""
    from halteres.agent.transports.mcp import require

    require()
    from halteres.agent.transports.mcp import server

    server.begin()
    if http:
        server.serve_http(port)
    else:
        server.serve_stdio()


def install_agent(
    client: Annotated[
        Client, typer.Option(help="Which client; generic prints the block that most of them take.")
    ],
    project: Annotated[
        bool,
        typer.Option(
            "--project", help="For this folder, with its `environments`, not for all you do."
        ),
    ] = False,
    show: Annotated[
        bool, typer.Option("--print", help="Show what would be run or written, and do nothing.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take it all out again.")] = False,
) -> None:
    """Give an agent client the rl_* tools and the skills; what is there already stays, and no key
    is written.
    """
    from halteres.agent.agent_clients import CLIENTS, ByHand, Installation, carry_out
    from halteres.agent.transports.mcp import require

    host = CLIENTS[client]
    installation = Installation(host, Path.cwd() if project else None)
    if show:
        if not remove:
            typer.echo(installation.shown().rstrip("\n"))
            return
        _report(host.title, installation.removing(), show=True)
        return
    if remove:
        _report(host.title, carry_out(installation.removing()))
        return
    # What the client would only find out when it starts the server.
    require()
    is_pasted = isinstance(installation.place.registration, ByHand)
    steps = list(carry_out(installation.adding()))
    if is_pasted:
        typer.echo(installation.shown().rstrip("\n"))
    _report(host.title, steps, to_stderr=is_pasted)
    typer.echo(f"Next: {installation.place.then}", err=is_pasted)
    typer.echo(
        'Then ask: "Train a model on arithmetic with the rl tools. What did it gain?"',
        err=is_pasted,
    )
    if installation.project:
        note = (
            "What was written names paths of this machine: elsewhere, run the same command again."
        )
        typer.echo(note, err=is_pasted)


def _report(
    title: str, steps: Iterable[Step], *, show: bool = False, to_stderr: bool = False
) -> None:
    """Say what was done; on stderr where standard output is for what is to be pasted."""
    typer.echo(title, err=to_stderr)
    is_empty = True
    for step in steps:
        is_empty = False
        why = ""
        if step.why:
            why = f" ({step.why})"
        typer.echo(f"  {_VERBS[step.verb][show]:18} {step.what}{why}", err=to_stderr)
    if is_empty:
        typer.echo("  nothing of ours is there", err=to_stderr)


def init(
    folder: Annotated[
        Path, typer.Argument(help="Made if it is not there. Default: this one.")
    ] = Path("."),
) -> None:
    """Lay out a workspace: AGENTS.md, an environment that works, .gitignore. What is there already
    stays.
    """
    from halteres.agent.skills import ENVIRONMENTS, lay_out

    folder = folder.expanduser().absolute()
    for laid in lay_out(folder):
        typer.echo(f"  {laid.outcome:14} {laid.file}")
    here = ""
    if folder != Path.cwd():
        here = f"cd {shlex.quote(str(folder))} && "
    typer.echo(
        f"Next, an agent: {here}halteres install-agent --project --client claude  # or cursor, "
        "gemini"
    )
    typer.echo(
        f"Or by hand: export HALTERES_ENVIRONMENTS={shlex.quote(str(folder / ENVIRONMENTS))}; "
        "halteres env list"
    )
