"""`halteres sft`, `halteres dpo`: train a policy on a file, and follow the run to its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from halteres.cli.output import AsJson

if TYPE_CHECKING:
    from halteres.config.file_training import Method
    from halteres.runs.planning.plan import RunPlan

Model = Annotated[
    str | None,
    typer.Option("--model", help="Base model: a name (`halteres models list`) or a folder."),
]
EvalData = Annotated[
    str | None, typer.Option("--eval", help="Held-out rows. [default: 5 % of the prompts]")
]
Edits = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting: epochs=2, batch_size=16, trainer.learning_rate=1e-4."),
]
Name = Annotated[str | None, typer.Option("--name", help="Of the run.")]
Service = Annotated[
    str | None,
    typer.Option("--service", help="URL of a training service to use instead of starting one."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only check, and estimate memory and time.")
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Start and return; the run goes on by itself.")
]


def sft(
    data: Annotated[
        str,
        typer.Argument(
            help="Rows with `messages`, or `prompt` and `completion`: JSONL, JSON, Parquet, "
            "or OWNER/NAME[:SPLIT] on the hub."
        ),
    ],
    model: Model = None,
    eval_data: EvalData = None,
    edits: Edits = None,
    name: Name = None,
    service: Service = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: AsJson = False,
) -> None:
    """Train a model to give the answers of a file: supervised fine-tuning, with LoRA."""
    given = _edits(model, eval_data, name, edits)
    _train("sft", data, given, service, dry_run=dry_run, detach=detach, as_json=as_json)


def dpo(
    data: Annotated[
        str,
        typer.Argument(
            help="Rows with `prompt`, `chosen` and `rejected`: JSONL, JSON, Parquet, "
            "or OWNER/NAME[:SPLIT] on the hub."
        ),
    ],
    model: Model = None,
    eval_data: EvalData = None,
    edits: Edits = None,
    name: Name = None,
    service: Service = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: AsJson = False,
) -> None:
    """Train a model to prefer answers over others: direct preference optimisation, with LoRA."""
    given = _edits(model, eval_data, name, edits)
    _train("dpo", data, given, service, dry_run=dry_run, detach=detach, as_json=as_json)


def _edits(
    model: str | None, eval_data: str | None, name: str | None, edits: Sequence[str] | None
) -> list[str]:
    """Options as edits; those of `--set` come last."""
    options = {"inference.model": model, "data.eval_data": eval_data, "run.name": name}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return [*given, *(edits or [])]


def _train(
    method: Method,
    data: str,
    edits: Sequence[str],
    service: str | None,
    *,
    dry_run: bool,
    detach: bool,
    as_json: bool,
) -> None:
    from halteres.cli.train import attend, say_plan
    from halteres.config import environ
    from halteres.config.file_training import resolve_file_training
    from halteres.runs.planning.file_plan import plan_file_run
    from halteres.runs.servers import end_all_kept
    from halteres.runs.start import start_run

    resolved = resolve_file_training(method, data, edits)
    # a plan looks at the memory that is free
    end_all_kept()
    url = service or environ.service_url()
    if dry_run:
        show_plan(plan_file_run(resolved, service_url=url, effort="measured"), as_json=as_json)
        return
    plan = plan_file_run(resolved, service_url=url, effort="remembered")
    say_plan(plan)
    attend(start_run(plan).run_id, detach=detach, as_json=as_json)


def show_plan(plan: RunPlan, *, as_json: bool) -> None:
    """Write out every check, the settings that matter most, and the estimate; exit code 1 where the
    run cannot begin.
    """
    settings, training = plan.settings, plan.training
    assert training is not None  # noqa: S101 - for the type checker
    shown = {
        "data": training.data,
        "model": settings.inference.model,
        "learning_rate": settings.trainer.learning_rate,
        "lora_rank": settings.trainer.lora_rank,
        "batch_size": training.batch_size,
        "total_steps": settings.trainer.total_steps,
        "eval_every": settings.trainer.eval_every,
        "checkpoint_every": settings.trainer.checkpoint_every,
        "max_token_trainer_length": settings.trainer.max_token_trainer_length,
    }
    estimate = None
    if plan.estimate:
        estimate = plan.estimate.facts
    if as_json:
        checks = [check.facts for check in plan.checks]
        facts = {"ok": plan.refusal is None, "checks": checks, "settings": shown}
        typer.echo(json.dumps({**facts, "estimate": estimate}))
    else:
        for check in plan.checks:
            figures = ", ".join(f"{name} {value}" for name, value in check.figures.items())
            words, mark = check.found, "NO"
            if check.failure:
                words = check.failure.sentence
            if check.ok:
                mark = "ok"
            typer.echo(f"{mark:3} {check.name:15} {figures or words}")
            if figures and words:
                typer.echo(f"    {'':15} {words}")
        for name, value in shown.items():
            typer.echo(f"    {name:26} {value}")
        if estimate:
            typer.echo(f"    {'seconds of a step':26} {' to '.join(map(str, estimate['step_s']))}")
            typer.echo(f"    {'minutes':26} {' to '.join(map(str, estimate['total_min']))}")
            typer.echo(f"    {'basis':26} {estimate['basis']}")
    if plan.refusal is not None:
        raise typer.Exit(1)
