"""`halteres env`: list environments, run one, measure a policy on one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from halteres.models import TINY

app = typer.Typer(help="List, serve and evaluate environments.", no_args_is_help=True)

Environment = Annotated[str, typer.Argument(help="Environment: a name, FAMILY:VARIANT, or a file.")]


@app.command("list")
def list_(
    family: Annotated[
        str | None, typer.Argument(help="Only this family: every variant of it.")
    ] = None,
    folders: Annotated[
        list[Path] | None, typer.Option("--folder", help="Look here too; may be repeated.")
    ] = None,
) -> None:
    """Every environment that was found, and every file that could not be read."""
    from halteres.config.discovery import discover, find_environment

    if family is not None:
        found = find_environment(family, folders or [])
        typer.echo("\n".join(found.members or [found.name]))
        return
    discovery = discover(folders or [])
    for environment in discovery.environments:
        typer.echo(f"{environment.name:16} {environment.description}")
        if members := environment.members:
            typer.echo(
                f"{'':16} {len(members)} variants, {members[0]} and more: halteres env list "
                f"{environment.name}"
            )
        typer.echo(f"{'':16} {environment.file_path}")
    for broken in discovery.broken:
        typer.echo(f"broken: {broken.file_path}: {broken.why}", err=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(context: typer.Context, environment: Environment) -> None:
    """Run an environment against a trajectory server; further options (--config, --env.FIELD ...)
    are its own.
    """
    from halteres.config.program import find_program

    program = find_program(environment)
    variant = [f"--env.{name}={value}" for name, value in program.variant_setting.items()]
    sys.stdout.flush()
    command = program.command("serve", *variant, *context.args)
    os.execv(command[0], command)  # noqa: S606 - no shell


@app.command("eval")
def eval_(
    environment: Environment,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Evaluate this run's newest weights, with its settings."),
    ] = None,
    model: Annotated[str, typer.Option(help="Base model, where no run is named.")] = TINY,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Held-out tasks; default: as the environment has it.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples a task at temperature 1; likewise.")
    ] = None,
    best_of: Annotated[
        int | None,
        typer.Option(
            min=2, help="Also tell the score of the answer that `rewards` likes best of so many."
        ),
    ] = None,
    reward_model: Annotated[
        str | None,
        typer.Option(help="Score the answers by this reward model, too: its folder or address."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a policy on held-out tasks, at temperature 1 and greedy."""
    from halteres.config.settings import Settings
    from halteres.runs.directory import find_run
    from halteres.runs.planning.checks import examine_reward_models
    from halteres.runs.planning.models import with_absolute_folders
    from halteres.runs.servers import served
    from halteres.runs.supervision.evaluation import examination, measure

    exam = examination(environment, find_run(run) if run else None, model)
    given = {
        "eval_tasks": tasks,
        "eval_samples": samples,
        "eval_best_of": best_of,
        "reward_model_path": reward_model,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    # the environment runs in another folder
    settings = with_absolute_folders(Settings(env=settings)).env
    for failure in (check.failure for check in examine_reward_models(settings)[0] if check.failure):
        raise failure
    with served(exam.base, exam.run) as service:
        figures = measure(exam, service, settings)
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name:32} {value:.4f}" if isinstance(value, float) else f"{name:32} {value}")
