"""`halteres install-agent`: an agent host gets the tools and the skills."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from halteres.agent.hosts.changes import Plan
    from halteres.agent.hosts.hosts import Host
    from halteres.agent.hosts.install import Installation

Client = Literal["claude", "codex", "cursor", "gemini", "hermes", "generic"]

_DONE: Mapping[str, str] = {
    "write": "wrote",
    "update": "updated",
    "remove": "removed",
    "leave": "already there",
    "keep": "left alone",
}
_PLANNED: Mapping[str, str] = {
    "write": "would write",
    "update": "would update",
    "remove": "would remove",
    "leave": "already there",
    "keep": "would leave alone",
}


def install_agent(
    client: Annotated[Client, typer.Option(help="Which host; generic prints the block that most hosts take.")],
    project: Annotated[
        bool, typer.Option("--project", help="For this folder, with its `environments`, not for all you do.")
    ] = False,
    show: Annotated[bool, typer.Option("--print", help="Show what would be written, and write nothing.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take it all out again.")] = False,
    plugin: Annotated[
        bool, typer.Option("--plugin", help="Hermes: as its plugin, where both share an environment; not over MCP.")
    ] = False,
) -> None:
    """Give an agent host the rl_* tools and the skills; what is there already stays, and no key is written."""
    from halteres.agent.hosts.install import Installation

    host = _host(client, plugin)
    installation = Installation(host, Path.cwd() if project else None)
    if remove:
        _carry_out(host, installation.removing(), show=show)
        return
    _require(plugin)
    plan = installation.adding()
    pasted = show or host.place(installation.project).settings is None
    if pasted:
        typer.echo(installation.shown().rstrip("\n"))
    _carry_out(host, plan, show=show, aside=pasted)
    if not show:
        _tell_next(installation, aside=pasted)


def _host(client: Client, plugin: bool) -> Host:
    from halteres.agent.hosts.hosts import HERMES_PLUGIN, HOSTS
    from halteres.errors import UserError

    if plugin and client != "hermes":
        raise UserError("--plugin is for Hermes.", f"{HOSTS[client].title} takes the tools over MCP.", "Leave it out.")
    return HERMES_PLUGIN if plugin else HOSTS[client]


def _require(plugin: bool) -> None:
    """What the host would only find out when it starts the server."""
    from halteres.agent.faces import mcp

    if not plugin:
        mcp.require()


def _carry_out(host: Host, plan: Plan, *, show: bool, aside: bool = False) -> None:
    """Do it, and tell it: on stderr where standard output is for what is to be pasted."""
    if not show:
        plan.carry_out()
    typer.echo(host.title, err=aside)
    for step in plan.steps:
        why = f" ({step.kept})" if step.kept else ""
        typer.echo(f"  {(_PLANNED if show else _DONE)[step.verb]:17} {step.what}{why}", err=aside)
        if step.backup:
            typer.echo(f"  {'':17} as it was: {step.backup}", err=aside)
    if not plan.steps:
        typer.echo("  nothing of ours is there", err=aside)


def _tell_next(installation: Installation, *, aside: bool) -> None:
    then = installation.host.then(installation.project)
    typer.echo(f'Next: {then}\nThen ask: "Train a model on arithmetic with the rl tools. What did it gain?"', err=aside)
    if installation.project:
        typer.echo("What was written names paths of this machine: elsewhere, run the same command again.", err=aside)
