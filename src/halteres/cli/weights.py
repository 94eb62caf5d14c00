"""`halteres export` and `halteres checkpoints`: adapters for other programs, and those that others made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    what: Annotated[str, typer.Argument(help="A run (its result), a tinker:// path, or a PEFT folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write: a new one, or an empty one.")],
    form: Annotated[
        Literal["peft", "merged", "gguf"],
        typer.Option("--format", help="The adapter alone; the whole model; one file for llama.cpp."),
    ] = "peft",
    model: Annotated[
        str | None, typer.Option(help="The base model to merge into. [default: the one it was trained on]")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="State directory of a tinker:// path. [default: the service's, and every run's]")
    ] = None,
    dtype: Annotated[
        Literal["base", "float32"],
        typer.Option(help="Of merged weights: the base model's, to which they are rounded, or all that was trained."),
    ] = "base",
    converter: Annotated[
        Path | None, typer.Option(help="llama.cpp's convert_hf_to_gguf.py. [default: the one on PATH]")
    ] = None,
) -> None:
    """Write weights for other programs: PEFT, vLLM, SGLang, transformers, llama.cpp."""
    import asyncio

    from halteres.errors import NotFound
    from halteres.runs.reading.adapter import adapter_of, base_of, vllm_command
    from halteres.service.conversion import write_adapter, write_gguf, write_merged

    adapter = adapter_of(what, state)
    if form == "peft":
        size = write_adapter(adapter.folder, out)
    elif form == "merged":
        size = asyncio.run(write_merged(base_of(adapter, model), adapter.folder, out, dtype=dtype))
    else:
        base = base_of(adapter, model)
        size = asyncio.run(write_gguf(base, adapter.folder, out, converter=converter, dtype=dtype))
    typer.echo(f"{out}: {size / 1e6:.1f} MB")
    if form == "peft":
        try:
            base = base_of(adapter, model).folder
        except NotFound:  # it lies where the adapter is going
            base = model or adapter.model or "BASE_FOLDER"
        typer.echo(f"Next: {vllm_command(base, out, out.absolute().name)}")


checkpoints = typer.Typer(help="Bring adapters of your own to a training service.", no_args_is_help=True)


@checkpoints.callback()
def _checkpoints() -> None:
    """Bring adapters of your own to a training service."""


@checkpoints.command()
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
    from halteres.service.checkpoints.added import add_adapter

    typer.echo(str(add_adapter(folder, name, state or environ.home() / "service", tenant=tenant)))
