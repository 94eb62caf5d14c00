"""`halteres tools`: the table of tools, as data."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

Format = Literal["names", "openai", "mcp"]


def tools(
    format: Annotated[
        Format, typer.Option(help="names; openai: function definitions; mcp: as in tools/list.")
    ] = "names",
) -> None:
    """Print the rl_* tools: their names, or their definitions as JSON."""
    from halteres.agent.table import TOOLS

    if format == "names":
        typer.echo("\n".join(tool.name for tool in TOOLS))
    elif format == "openai":
        from halteres.agent.faces.openai import definitions

        typer.echo(json.dumps(definitions(), ensure_ascii=False, indent=2))
    else:
        from halteres.agent.faces.mcp.server import described

        typer.echo(json.dumps({"tools": [described(tool) for tool in TOOLS]}, ensure_ascii=False, indent=2))
