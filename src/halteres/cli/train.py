"""`halteres train`: start a run, or go on with one, and watch it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halteres.errors import InvalidConfig


def train(
    environment: Annotated[
        str | None, typer.Argument(help="Environment: a name (`halteres env list`), FAMILY:VARIANT, or a file.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Settings, as --set; or those of a recipe.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Settings that go together, by names of their own: gem.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML: run/env/inference/trainer, or env/openai/tinker.")
    ] = None,
    edits: Annotated[
        list[str] | None, typer.Option("--set", help="One setting: trainer.total_steps=20, or total_steps=20.")
    ] = None,
    resume: Annotated[str | None, typer.Option("--resume", help="Go on from this run's newest checkpoint.")] = None,
    service: Annotated[
        str | None, typer.Option("--service", help="URL of a training service to use instead of starting one.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same settings give the same bits: trainer.deterministic=true.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start and return; the run goes on by itself.")] = False,
) -> None:
    """Train a model on an environment by reinforcement learning."""
    from halteres.config import environ
    from halteres.config.files import resolve_settings
    from halteres.runs.directory import find_run
    from halteres.runs.starting.start import start_run

    environment, given = _asked(environment, assignments or [], recipe)
    edits = [*given, *(edits or []), *(["trainer.deterministic=true"] if deterministic else [])]
    if environment is None and config is None and resume is None:
        raise InvalidConfig("Nothing to train on.", "No environment was named.", "Try: halteres train arithmetic")
    if resume is not None:
        old = find_run(resume)
        if environment is not None or config is not None:
            raise InvalidConfig(
                "A resumed run keeps its settings.",
                "An environment or a config file was named besides --resume.",
                f"Try: halteres train --resume {resume} --set trainer.total_steps=80",
            )
        asked = resolve_settings(None, None, edits, base=old.settings())  # under the policy that holds now
    else:
        if environment is not None and any(edit.startswith(("run.environment=", "environment=")) for edit in edits):
            raise InvalidConfig(
                "Two environments were named.", f"'{environment}', and one by --set.", "Leave one of them out."
            )
        old, asked = None, resolve_settings(environment, config, edits)
    url = service or environ.service_url()
    run = start_run(
        asked.settings,
        resume=old,
        sources=asked.sources,
        service_url=url,
        warn=lambda warning: typer.echo(f"warning: {warning}", err=True),
    )
    attend(run.run_id, detach=detach)


def _asked(environment: str | None, assignments: list[str], recipe: str | None) -> tuple[str | None, list[str]]:
    """The environment, and `name=value` as edits: under a recipe's own names, otherwise as `--set` takes them."""
    from halteres.config.files import find_recipe

    if environment is not None and "=" in environment and not environment.endswith(".py"):
        environment, assignments = None, [environment, *assignments]
    if recipe is None:
        return environment, assignments
    found = find_recipe(recipe)
    edits = found.edits(assignments)
    for note in found.notes(assignments):
        typer.echo(f"note: {note}", err=True)
    named = _taken(edits, "run.environment")
    return environment or named, edits


def _taken(edits: list[str], key: str) -> str | None:
    """The value of an edit, which is taken out."""
    found = [edit for edit in edits if edit.startswith(f"{key}=")]
    for edit in found:
        edits.remove(edit)
    return found[-1].partition("=")[2] if found else None


def attend(run_id: str, *, detach: bool = False) -> None:
    """Say which run it is, follow it to its end, tell how it went; exit code 1 where it failed."""
    from rich.console import Console

    from halteres.cli.follow import follow
    from halteres.cli.summary import tell
    from halteres.runs.directory import find_run

    run = find_run(run_id)
    console = Console(highlight=False)
    console.print(f"run {run.run_id} in {run.path}", soft_wrap=True)
    if (state := run.state()).service_given:
        console.print(f"trains on the service at {state.urls['service']} (TINKER_BASE_URL)", soft_wrap=True)
    if detach:
        console.print(f"next:    halteres runs status {run.run_id}", soft_wrap=True)
        return
    tell(run, follow(run, console), console)
