"""`halteres models`, `export`, `checkpoints`: base models, adapters for other programs, those that
others made.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halteres.cli.output import AsJson, print_json, print_table
from halteres.errors import NotFound, ProcessFailed, UserError
from halteres.tokenizer import SET_EOS

if TYPE_CHECKING:
    from halteres.models.model_store import ModelStore, RegisteredModel
    from halteres.runs.planning.known_models import KnownModel
    from halteres.runs.reading.named_weights import Adapter

app = typer.Typer(
    help="Base models: what is here, what fits, what they are called.", no_args_is_help=True
)

WEIGHTS_CHECKED_WITHIN_S = 300.0
"""It reads no weights, but imports transformers: seconds, on a machine at work minutes."""


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Base models on this disk, then well-known ones, each with its size and whether it fits."""
    from halteres.runs.planning.known_models import known_models, proposed

    models = known_models()
    first, registered = proposed(models), _store().registered()
    if as_json:
        facts = [{**model.facts, "registered": model.name in registered} for model in models]
        print_json({"models": facts, "proposed": first.name, "registered": registered})
        return
    by_presence = sorted(models, key=lambda model: not model.present)
    rows = [_row(model, is_proposed=model is first) for model in by_presence]
    print_table(("model", ">parameters", ">needs", "fits", ">spare", "remarks"), rows)
    for name, tokenizers in registered.items():
        typer.echo(
            f"registered: {name} (its tokenizer is found as {', '.join(tokenizers) or 'nothing'})"
        )
    if not all(model.present for model in models):
        typer.echo(
            "Those marked * are not on this disk: `halteres models add NAME` fetches one from the "
            "hub,"
        )
        typer.echo(
            "`halteres models add FOLDER --as NAME` registers a folder that has it, or a GGUF file."
        )


@app.command()
def add(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder in Hugging Face format, a GGUF file, a model here, or a name of the hub."
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--as", help="What it is called. [default: its own name]")
    ] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy its files, so that the folder may go.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Register a base model: it can be served by name, and clients find its tokenizer by that name
    without a hub.
    """
    from halteres.runs.planning.checks import proposed_settings

    file = Path(model).expanduser()
    if file.suffix.lower() == ".gguf" or os.path.isfile(file):  # False for what can be no path, too
        added = _convert(file.absolute(), name or file.stem)
    else:
        source, own_name = _source(model)
        _refuse_missing_weights(source)
        added = _store().add(source, name or own_name, copy=copy)
    if as_json:
        facts = {
            "name": added.name,
            "folder": str(added.folder),
            "parameters": added.shape.parameters,
        }
        print_json({**facts, "tokenizer_names": added.tokenizer_names, "ends": added.ends})
        return
    typer.echo(
        f"{added.name}: {added.shape.parameters / 1e6:.2f} M parameters, {added.folder.resolve()}"
    )
    for known in added.tokenizer_names:
        typer.echo(f"With HF_HUB_OFFLINE=1 clients find its tokenizer as '{known}'.")
    if added.unknown_end_tokens:
        ids = ", ".join(map(str, added.unknown_end_tokens))
        typer.echo(
            f"{added.end_token_file} names the end token {ids}, which is not in its vocabulary of "
            f"{added.shape.vocabulary} tokens (0 to {added.shape.vocabulary - 1})."
        )
    why = "no end token is named"
    if added.end_tokens:
        why = "its end token is not in the vocabulary"
    if not added.ends:
        typer.echo(f"Nothing ends its answers but max_tokens: {why}. {SET_EOS}")
    proposed = {"model": added.name, **proposed_settings(added.shape)}
    settings = " ".join(f"--set {name}={value}" for name, value in proposed.items())
    typer.echo(f"Next: halteres train arithmetic {settings}")
    typer.echo(f"To serve it: halteres serve --model {added.name}")


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="As `halteres models list` tells it.")],
) -> None:
    """Take a registered model out of the store; a folder that it leads to stays."""
    _store().remove(name)
    typer.echo(f"'{name}' is registered no more.")


def _store() -> ModelStore:
    from halteres.config import environ
    from halteres.models.model_store import HubCache, ModelStore

    return ModelStore(environ.home() / "models", HubCache(environ.hub_cache()))


def _refuse_missing_weights(folder: Path) -> None:
    """Refuse a model that transformers computes and whose files lack weights of it: by the engine's
    own check, in a process with torch. The tensors of other models are known without it; where
    torch is not installed, a model is checked when it is loaded.
    """
    from halteres.models.model_store import checked_model
    from halteres.models.shape import FAMILIES
    from halteres.process import run_caught

    if checked_model(folder).family in FAMILIES or find_spec("torch") is None:
        return
    command = (sys.executable, "-P", "-m", "halteres.engine.torch.loading", str(folder))
    try:
        ended = run_caught(command, Path.cwd(), WEIGHTS_CHECKED_WITHIN_S)
        found = json.loads(ended.out.strip().splitlines()[-1])
    except (TimeoutError, IndexError, ValueError) as error:
        what = f"The weights of the model in {folder} could not be checked."
        raise ProcessFailed(what, f"{error}.", "Run the command again.") from error
    if found:
        raise UserError(found["what"], found["why"], found["next"])


def _convert(file: Path, name: str) -> RegisteredModel:
    from halteres.models.gguf import read_gguf

    model = read_gguf(file)
    size = f"{model.parameters / 1e6:.0f} M parameters, {4 * model.parameters / 1e9:.2f} GB in fp32"
    typer.echo(f"Converting {file}: {model.family}, {size} ...", err=True)
    return _store().add_written(model.write, name)


def _source(named: str) -> tuple[Path, str]:
    """The folder that is meant, and its own name; what is nowhere on this disk is asked of the
    hub.
    """
    from halteres.config import environ
    from halteres.models import model_folder
    from halteres.models.model_store import checked_name, download, suggested_name

    known = model_folder(named, environ.home() / "models")
    path = Path(named).expanduser()
    if known is not None and known != path.absolute():
        return known, named
    if os.path.isdir(path) or path.is_absolute() or named.startswith("."):
        return path.absolute(), suggested_name(path.absolute())
    return download(checked_name(named), environ.hub_cache()), named


def _row(model: KnownModel, *, is_proposed: bool) -> tuple[str, ...]:
    name = model.name
    if not model.present:
        name += " *"
    size = f"{model.parameters / 1e6:.2f} M"
    if model.parameters >= 1e8:
        size = f"{model.parameters / 1e9:.2f} B"
    spare = ""
    if model.spare_gb is not None:
        spare = f"{model.spare_gb:+.1f} GB"
    remarks: list[str] = []
    if is_proposed:
        remarks.append("<- proposed")
    if model.note and model.present:
        remarks.append(model.note)
    return (name, size, f"{model.need_gb:.1f} GB", model.fits, spare, "  ".join(remarks))


def export(
    what: Annotated[
        str, typer.Argument(help="A run (its result), a tinker:// path, or a PEFT folder.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write: a new one, or an empty one.")],
    form: Annotated[
        Literal["peft", "merged", "gguf"],
        typer.Option(
            "--format", help="The adapter alone; the whole model; one file for llama.cpp."
        ),
    ] = "peft",
    model: Annotated[
        str | None,
        typer.Option(help="The base model to merge into. [default: the one it was trained on]"),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="State directory of a tinker:// path. [default: the service's, and every run's]"
        ),
    ] = None,
    dtype: Annotated[
        Literal["base", "float32"],
        typer.Option(
            help=(
                "Of merged weights: the base model's, to which they are rounded, or all that was "
                "trained."
            )
        ),
    ] = "base",
    converter: Annotated[
        Path | None,
        typer.Option(help="llama.cpp's convert_hf_to_gguf.py. [default: the one on PATH]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write weights for other programs: PEFT, vLLM, SGLang, transformers, llama.cpp. With them goes
    a model card, README.md.
    """
    import asyncio

    from halteres.runs.reading.named_weights import adapter_of, base_of
    from halteres.service.conversion import write_adapter, write_gguf, write_merged

    adapter = adapter_of(what, state)
    if form == "peft":
        size = write_adapter(adapter.folder, out)
    elif form == "merged":
        size = asyncio.run(write_merged(base_of(adapter, model), adapter.folder, out, dtype=dtype))
    else:
        base = base_of(adapter, model)
        size = asyncio.run(write_gguf(base, adapter.folder, out, converter=converter, dtype=dtype))
    base, command = _describe(adapter, model, out, form)
    if as_json:
        facts: dict[str, Any] = {"folder": str(out.absolute()), "format": form, "size_bytes": size}
        run_id = None
        if adapter.run is not None:
            run_id = adapter.run.run_id
        print_json({**facts, "base_model": base, "run_id": run_id, "serve": command})
        return
    typer.echo(f"{out}: {size / 1e6:.1f} MB, described in README.md")
    if command:
        typer.echo(f"Next: {command}")


def _describe(
    adapter: Adapter, model: str | None, out: Path, form: Literal["peft", "merged", "gguf"]
) -> tuple[str | None, str]:
    """Write the model card of an export. Returns the base model's name, None where it is not known,
    and the line with which vLLM serves an adapter, empty of other forms.
    """
    from halteres.files import replace_file
    from halteres.runs.reading.model_card import FILE, Export, model_card
    from halteres.runs.reading.named_weights import base_of, vllm_command

    base, folder = model or adapter.model, None
    # of an adapter alone, the base model may lie where the adapter is going
    with suppress(NotFound):
        folder = base_of(adapter, model).folder
    card = model_card(Export(adapter=adapter, base=base, base_folder=folder, folder=out, form=form))
    replace_file(out / FILE, card.encode())
    if form != "peft":
        return base, ""
    return base, vllm_command(folder or base or "BASE_FOLDER", out, out.absolute().name)


checkpoints = typer.Typer(
    help="Bring adapters of your own to a training service.", no_args_is_help=True
)


@checkpoints.callback()
def _checkpoints() -> None:
    """Bring adapters of your own to a training service."""


@checkpoints.command("add")
def add_checkpoint(
    folder: Annotated[
        Path, typer.Argument(help="A PEFT folder: adapter_config.json, adapter_model.safetensors.")
    ],
    name: Annotated[str, typer.Option("--as", help="What it is called.")],
    state: Annotated[
        Path | None,
        typer.Option(help="The service's state directory. [default: HALTERES_HOME/service]"),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose it is, where the service has keys.")] = "local",
) -> None:
    """Copy an adapter into a service's state: it can be trained on and sampled from; the service
    may be running.
    """
    from halteres.config import environ
    from halteres.service.checkpoint_folders import add_adapter

    typer.echo(str(add_adapter(folder, name, state or environ.home() / "service", tenant=tenant)))
