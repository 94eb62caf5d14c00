"""`halteres serve`: the servers, in the foreground."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Serve the training service, the trajectory server, or the agent's tools.", invoke_without_command=True
)

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")]


@app.callback()
def service(
    context: typer.Context,
    port: Port = 8001,
    model: Annotated[str, typer.Option(help="'halteres/tiny' or a model folder.")] = "halteres/tiny",
    state: Annotated[
        Path | None, typer.Option(help="Folder of the service's state. [default: HALTERES_HOME/service]")
    ] = None,
    engine: Annotated[str, typer.Option(help="'torch', or 'scripted' (a deterministic fake for tests).")] = "torch",
    threads: Annotated[int | None, typer.Option(min=1, help="Engine threads. [default: cores - 1]")] = None,
) -> None:
    """Serve the Tinker API and inference (`halteres variables` prints what an SDK user exports)."""
    if context.invoked_subcommand is not None:
        return
    from halteres.config import environ

    folder = state or environ.home() / "service"
    count = ["--threads", str(threads)] if threads else []
    _become(
        "halteres.service", "--state", str(folder), "--port", str(port), "--model", model, "--engine", engine, *count
    )


@app.command()
def trajectories(
    port: Port = 8000,
    database: Annotated[
        Path | None, typer.Option(help="SQLite file of the queue. [default: HALTERES_HOME/trajectories.sqlite]")
    ] = None,
) -> None:
    """Serve the Atropos trajectory API."""
    from halteres.config import environ

    file = database or environ.home() / "trajectories.sqlite"
    file.parent.mkdir(parents=True, exist_ok=True)
    _become("halteres.trajectories", "--database", str(file), "--port", str(port))


@app.command()
def control(
    port: Port = 8080,
    auth: Annotated[
        str, typer.Option(metavar="open|token", help="Whether the seed's routes want the token too, as Basic password.")
    ] = "open",
) -> None:
    """Serve the agent's tools over HTTP; the token is in HALTERES_HOME/token."""
    _become("halteres.agent.faces.http", "--port", str(port), "--auth", auth)


def _become(module: str, *arguments: str) -> None:
    """Replace this process by a module of ours: signals and exit code are then its own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - no shell, our own interpreter
