"""`halteres init`: a folder becomes a workspace."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[Path, typer.Argument(help="Made if it is not there. Default: this one.")] = Path("."),
) -> None:
    """Lay out a workspace: AGENTS.md, an environment that works, .gitignore. What is there already stays."""
    from halteres.agent.workspace import ENVIRONMENTS, lay_out

    folder = folder.expanduser().absolute()
    for laid in lay_out(folder):
        typer.echo(f"  {laid.outcome:14} {laid.file}")
    here = "" if folder == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    typer.echo(f"Next, an agent: {here}halteres install-agent --project --client claude  # or codex, cursor, gemini")
    typer.echo(f"Or by hand: export HALTERES_ENVIRONMENTS={shlex.quote(str(folder / ENVIRONMENTS))}; halteres env list")
