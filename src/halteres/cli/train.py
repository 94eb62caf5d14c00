"""`halteres train`, `quickstart`, `watch`: start a run, or go on with one, and follow it to its
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halteres.cli.output import AsJson, print_json, tool_answer
from halteres.errors import InvalidConfig

if TYPE_CHECKING:
    from halteres.runs.planning.plan import RunPlan


def train(
    environment: Annotated[
        str | None,
        typer.Argument(
            help="Environment: a name (`halteres env list`), FAMILY:VARIANT, or a file."
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Settings, as --set; or those of a recipe."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Settings that go together, by names of their own: gem."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="YAML: run/env/inference/trainer, or env/openai/tinker."),
    ] = None,
    edits: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting: trainer.total_steps=20, or total_steps=20."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            help="Go on from this run's newest checkpoint; RUN@STEP: from that of a step.",
        ),
    ] = None,
    service: Annotated[
        str | None,
        typer.Option("--service", help="URL of a training service to use instead of starting one."),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="The same settings give the same bits: trainer.deterministic=true.",
        ),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start and return; the run goes on by itself.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on an environment by reinforcement learning."""
    from halteres.config import environ
    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.servers import end_all_kept
    from halteres.runs.start import start_run

    environment, given = _environment_and_edits(environment, assignments or [], recipe)
    edits = [*given, *(edits or []), *(["trainer.deterministic=true"] if deterministic else [])]
    url = service or environ.service_url()
    if resume is not None:
        _check_kept_settings(resume, environment, config)
        # a plan looks at the memory that is free
        end_all_kept()
        plan = _resumed(resume, edits, url)
    elif environment is None and config is None:
        raise InvalidConfig(
            "Nothing to train on.", "No environment was named.", "Try: halteres train arithmetic"
        )
    else:
        _check_one_environment(environment, edits)
        resolved = resolve_settings(environment, config, edits)
        end_all_kept()
        plan = plan_run(resolved, service_url=url, effort="remembered")
    say_plan(plan)
    run = start_run(plan)
    attend(run.run_id, detach=detach, as_json=as_json)


def _check_kept_settings(resume: str, environment: str | None, config: Path | None) -> None:
    if environment is not None or config is not None:
        raise InvalidConfig(
            "A resumed run keeps its settings.",
            "An environment or a config file was named besides --resume.",
            f"Try: halteres train --resume {resume} --set trainer.total_steps=80",
        )


def _resumed(resume: str, edits: Sequence[str], url: str | None) -> RunPlan:
    """The plan of a run that goes on, under the policy that holds now."""
    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning.file_plan import plan_file_run, resolve_resumed
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.planning.resume_point import find_origin

    old, step = find_origin(resume)
    if old.state().is_on_file:
        resolved = resolve_resumed(old, edits)
        return plan_file_run(resolved, resume=old, resume_step=step, service_url=url)
    own = resolve_settings(None, None, edits, base=old.settings())
    return plan_run(own, resume=old, resume_step=step, service_url=url)


def say_plan(plan: RunPlan) -> None:
    """What the run is not refused for, what was proposed for its model, and, where the engine's
    speed is known already, what it will take.
    """
    if plan.refusal is not None:
        return
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}", err=True)
    trainer = plan.settings.trainer
    if plan.sources.get("trainer.learning_rate") == "model":
        typer.echo(f"learning rate {trainer.learning_rate:g}, by the model's size", err=True)
    if plan.sources.get("env.batch_size") == "model":
        env = plan.settings.env
        batch = f"{env['batch_size']} answers in groups of {env['group_size']}"
        typer.echo(f"batches of {batch}, by the model's size", err=True)
    expected = plan.estimate
    if expected is not None:
        low, high = (expected.total_s * (1 / 60)).rounded
        memory = ""
        if expected.peak_gb is not None:
            memory = f", {expected.peak_gb:g} GB"
        typer.echo(f"about {low:g} to {high:g} minutes{memory} ({expected.basis})", err=True)


def _check_one_environment(environment: str | None, edits: Sequence[str]) -> None:
    named = any(edit.startswith(("run.environment=", "environment=")) for edit in edits)
    if environment is not None and named:
        raise InvalidConfig(
            "Two environments were named.",
            f"'{environment}', and one by --set.",
            "Leave one of them out.",
        )


def _environment_and_edits(
    environment: str | None, assignments: list[str], recipe: str | None
) -> tuple[str | None, list[str]]:
    """The environment, and `name=value` as edits: under a recipe's own names, otherwise as `--set`
    takes them.
    """
    from halteres.config.gem_ids import find_recipe

    if environment is not None and "=" in environment and not environment.endswith(".py"):
        environment, assignments = None, [environment, *assignments]
    if recipe is None:
        return environment, assignments
    found = find_recipe(recipe)
    edits = found.edits(assignments)
    for note in found.notes(assignments):
        typer.echo(f"note: {note}", err=True)
    key = "run.environment="
    named = [edit.removeprefix(key) for edit in edits if edit.startswith(key)]
    return environment or (named or [None])[-1], [
        edit for edit in edits if not edit.startswith(key)
    ]


def quickstart(
    steps: Annotated[int, typer.Option(min=2, help="Optimiser steps.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seeds adapter, sampling and tasks.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train the built-in model on arithmetic, on this machine, with no network and no key, and show
    what it learnt.
    """
    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning import resources
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.servers import end_all_kept
    from halteres.runs.start import start_run

    typer.echo(
        "Halteres quick start: the built-in model (0.9 M parameters) learns to work its sums "
        "instead of guessing.",
        err=as_json,
    )
    if (unused := resources.this_machine().unused_gpu) is not None:
        typer.echo(
            f"It runs on the CPU: the engine's path for {unused.name} is not verified yet "
            "(HALTERES_DEVICE=cuda).",
            err=as_json,
        )
    resolved = resolve_settings(
        "arithmetic", None, [f"trainer.total_steps={steps}", f"run.seed={seed}"]
    )
    end_all_kept()
    attend(start_run(plan_run(resolved)).run_id, as_json=as_json)


def attend(run_id: str, *, detach: bool = False, as_json: bool = False) -> None:
    """Say which run it is, follow it to its end, say how it went; exit code 1 where it failed.

    As JSON that is what rl_get_results answers, detached what rl_check_status does; what a person
    watches meanwhile is then on standard error.
    """
    from rich.console import Console

    from halteres.cli.follow import follow, summarise
    from halteres.runs.directory import find_run

    run = find_run(run_id)
    console = Console(highlight=False, stderr=as_json)
    console.print(f"run {run.run_id} in {run.path}", soft_wrap=True)
    if (state := run.state()).service_given:
        console.print(
            f"trains on the service at {state.urls['service']} (TINKER_BASE_URL)", soft_wrap=True
        )
    if detach:
        console.print(f"next:    halteres runs status {run.run_id}", soft_wrap=True)
        if as_json:
            print_json(tool_answer("rl_check_status", run_id=run.run_id))
        return
    state = follow(run, console)
    if as_json:
        print_json(tool_answer("rl_get_results", run_id=run.run_id))
    summarise(run, state, console)


def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Run id (a unique beginning will do) or name. [default: the newest run]"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Follow a run until it ends, whoever started it; Ctrl-C stops watching, the run goes on."""
    from rich.console import Console

    from halteres.cli.follow import follow, summarise
    from halteres.errors import NotFound
    from halteres.runs.directory import find_run, list_runs

    if run is None:
        runs = list_runs()
    else:
        runs = [find_run(run)]
    if not runs:
        raise NotFound("There is no run to watch.", "", "Try: halteres quickstart")
    console = Console(highlight=False, stderr=as_json)
    state = follow(runs[0], console, may_stop=False)
    if as_json:
        print_json(tool_answer("rl_get_results", run_id=runs[0].run_id))
    summarise(runs[0], state, console)
