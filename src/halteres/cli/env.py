"""`halteres env`: list environments, run one, measure a policy on one."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halteres.cli.output import AsJson, print_json, print_table
from halteres.models import TINY

if TYPE_CHECKING:
    from halteres.config.discovery import EnvironmentFile

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
    as_json: AsJson = False,
) -> None:
    """Every environment that was found, and every file that could not be read."""
    from halteres.config.discovery import BUILTIN_FOLDER, discover, find_environment

    if family is not None:
        found = find_environment(family, folders or [])
        names = list(found.members or [found.name])
        if as_json:
            print_json({"environments": names})
        else:
            typer.echo("\n".join(names))
        return
    discovery = discover(folders or [])
    if as_json:
        print_json(
            {
                "environments": [_facts(environment) for environment in discovery.environments],
                "broken": [asdict(broken) for broken in discovery.broken],
            }
        )
        return
    rows: list[tuple[str, ...]] = []
    for environment in discovery.environments:
        variants, file = "", Path(environment.file_path)
        if environment.members:
            variants = str(len(environment.members))
        if file.parent == BUILTIN_FOLDER:
            file = Path(file.name)
        rows.append((environment.name, environment.description, variants, str(file)))
    print_table(("environment", "teaches", ">variants", "file"), rows)
    typer.echo(f"Files without a folder are in {BUILTIN_FOLDER}")
    if any(environment.members for environment in discovery.environments):
        typer.echo("All variants of one: halteres env list ENVIRONMENT")
    for broken in discovery.broken:
        typer.echo(f"broken: {broken.file_path}: {broken.why}", err=True)


def _facts(environment: EnvironmentFile) -> dict[str, Any]:
    """By the names that rl_list_environments gives them; all variants, and whole descriptions."""
    return {
        "name": environment.name,
        "class_name": environment.class_name,
        "file_path": environment.file_path,
        "description": environment.description,
        "variants": list(environment.members),
    }


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
    as_json: AsJson = False,
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
        print_json(figures)
        return
    rows: list[tuple[str, str]] = []
    for name, value in figures.items():
        text = str(value)
        if isinstance(value, float):
            text = f"{value:.4f}"
        rows.append((name, text))
    print_table(("figure", ">value"), rows)
