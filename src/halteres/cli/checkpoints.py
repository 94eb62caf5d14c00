"""`halteres checkpoints`: adapters that somebody else made, for a service of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Bring adapters of your own to a training service.", no_args_is_help=True)


@app.callback()
def checkpoints() -> None:
    """Bring adapters of your own to a training service."""


@app.command()
def add(
    folder: Annotated[Path, typer.Argument(help="A PEFT folder: adapter_config.json, adapter_model.safetensors.")],
    name: Annotated[str, typer.Option("--as", help="What it is called.")],
    state: Annotated[
        Path | None, typer.Option(help="The service's state directory. [default: HALTERES_HOME/service]")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose it is, where the service has keys.")] = "local",
) -> None:
    """Copy an adapter into a service's state: it can be trained on and sampled from; the service may be running."""
    from halteres.config import environ
    from halteres.service.checkpoints.peft_folders import add_adapter

    typer.echo(str(add_adapter(folder, name, state or environ.home() / "service", tenant=tenant)))
