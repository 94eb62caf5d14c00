"""`halteres models`: which base models there are, and which fit this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from halteres.agent.starting.models import KnownModel

app = typer.Typer(help="Base models: what is here, what fits.", no_args_is_help=True)


@app.callback()
def _models() -> None:  # pyright: ignore[reportUnusedFunction] - a group, though it has one verb so far
    """Base models: what is here, what fits."""


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Base models on this disk, then well-known ones, each with its size and whether it fits."""
    from halteres.agent.starting.models import known_models, proposed

    models = known_models()
    first = proposed(models)
    if as_json:
        typer.echo(json.dumps({"models": [model.facts for model in models], "proposed": first.name}))
        return
    for model in sorted(models, key=lambda model: not model.present):
        typer.echo(_line(model) + ("   <- proposed" if model is first else ""))
    if absent := next((model for model in models if not model.present), None):
        typer.echo(f"Those marked * are {absent.note.replace(absent.name, 'NAME')}.")


def _line(model: KnownModel) -> str:
    name = f"{model.name}{'' if model.present else ' *'}"
    size = f"{model.parameters / 1e9:6.2f} B" if model.parameters >= 1e8 else f"{model.parameters / 1e6:6.2f} M"
    spare = "" if model.spare_gb is None else f", {abs(model.spare_gb):.1f} GB {_how(model)}"
    note = f"  {model.note}" if model.note and model.present else ""
    return f"{name:36} {size}  needs {model.need_gb:6.1f} GB   fits: {model.fits}{spare}{note}"


def _how(model: KnownModel) -> str:
    return "to spare" if (model.spare_gb or 0) >= 0 else "too little"
