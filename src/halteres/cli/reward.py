"""`halteres reward`: reward models, from preference data to a served score."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halteres.cli.output import AsJson
from halteres.cli.serve import PASSED_ON, become

if TYPE_CHECKING:
    from halteres.rewards.evaluation import Evaluation
    from halteres.rewards.forecast import Forecast
    from halteres.rewards.training_plan import TrainingPlan
    from halteres.runs.planning.reward_plan import RewardPlan

app = typer.Typer(
    help="Reward models, from preference data to a served score.", no_args_is_help=True
)

Model = Annotated[
    str, typer.Argument(help="A reward model's folder, a scoring URL, or several joined by commas.")
]
Folder = Annotated[Path, typer.Argument(help="A reward model's folder.")]
HeldOut = Annotated[
    str, typer.Argument(help="Held-out preferences: a file, OWNER/NAME on the hub.")
]
OnIdentical = Annotated[
    Literal["error", "tie", "drop"],
    typer.Option(help="A row whose two completions are the same text."),
]


@app.command(context_settings=PASSED_ON)
def serve(context: typer.Context) -> None:
    """Serve reward models over HTTP: /score, /rank, and vLLM's /classify and /pooling (--help lists
    the flags).
    """
    become("halteres.rewards", *context.args)


@app.command()
def data(
    out: Annotated[Path, typer.Argument(help="Folder for train.jsonl and held_out.jsonl.")],
    pairs: Annotated[int, typer.Option(min=1, max=100_000, help="Rows to train on.")] = 600,
    held_out: Annotated[
        int, typer.Option(min=1, max=10_000, help="Rows of problems that training never sees.")
    ] = 300,
    seed: Annotated[int, typer.Option(help="The same seed gives the same rows.")] = 0,
) -> None:
    """Make preference pairs from arithmetic problems: kinds correct, polite, complete."""
    from halteres.environments.arithmetic_pairs import preference_pairs
    from halteres.files import replace_file

    out.mkdir(parents=True, exist_ok=True)
    halves = {
        "train.jsonl": preference_pairs(pairs, seed=seed, split="train"),
        "held_out.jsonl": preference_pairs(held_out, seed=seed, split="eval"),
    }
    for name, rows in halves.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        replace_file(out / name, "".join(lines).encode())
        typer.echo(f"{out / name}: {len(lines)} pairs")
    typer.echo(f"Next: halteres reward train --model halteres/tiny --data {out / 'train.jsonl'}")


@app.command()
def train(
    model: Annotated[str | None, typer.Option(help="Base model: a name, a folder.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Preferences: a file, OWNER/NAME on the hub.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out preferences.")] = None,
    hold_out: Annotated[
        float | None,
        typer.Option(help="Share of the prompts to hold out, where there is no --eval-data."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result. [default: reward-model]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML: model, data and any of RewardConfig's settings.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of RewardConfig; may be repeated.")
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train an adapter and the head, not all weights.")
    ] = False,
    on_identical: OnIdentical = "error",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if any.")
    ] = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Train as a run, and return: halteres runs status, stop."),
    ] = False,
    resume_run: Annotated[
        str | None,
        typer.Option(help="Go on with a training of a reward model, with its data, as a new run."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Readable name of the run, with --detach or --resume-run.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check data and settings; load nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a reward model on preferences."""
    from halteres.errors import InvalidConfig
    from halteres.rewards.forecast import forecast
    from halteres.rewards.training_plan import parse_settings, read_plan
    from halteres.runs.directory import find_run
    from halteres.runs.planning.reward_plan import plan_resumed_training, plan_reward_training

    flags = {"model": model, "data": data, "eval_data": eval_data, "hold_out": hold_out}
    if resume_run is not None:
        others = {"out": out, "config": config, "set": settings, "lora": lora, "resume": resume}
        others["on-identical"] = on_identical != "error"
        _refuse_changes({**flags, **others})
        resumed = plan_resumed_training(find_run(resume_run), name=name)
        if dry_run:
            return _show_forecast(resumed.forecast, as_json)
        return _start_run(resumed, as_json)
    if name is not None and not detach:
        fix = "Add --detach, or leave it out."
        raise InvalidConfig("--name is of a run.", "Without --detach there is none.", fix)
    fields: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    fields |= parse_settings(settings or [])
    if out is not None:
        fields["output_dir"] = str(out)
    if lora:
        fields.setdefault("lora", {})
    if on_identical != "error":
        fields["on_identical"] = on_identical
    if as_json:
        fields["disable_tqdm"] = True
    plan = read_plan(config, fields)
    folder = _base_model(plan.model)
    if dry_run:
        return _show_forecast(forecast(plan, folder), as_json)
    if detach:
        return _start_run(plan_reward_training(plan, name=name), as_json)
    return _train_here(plan, folder, resume, as_json)


def _refuse_changes(flags: Mapping[str, Any]) -> None:
    """Refuse what was given beside --resume-run: by the name of its flag, its value."""
    from halteres.errors import InvalidConfig

    given = [f"--{flag.replace('_', '-')}" for flag, value in flags.items() if value]
    if given:
        raise InvalidConfig(
            f"{', '.join(given)} cannot be given with --resume-run.",
            "A resumed training keeps the model, data and settings that its checkpoint was made "
            "with.",
            "Leave them out, or start a new training.",
        )


def _train_here(plan: TrainingPlan, folder: Path, resume: bool, as_json: bool) -> None:
    preferences, held_out, warnings = plan.preferences()
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    from halteres.rewards import RewardTrainer

    trainer = RewardTrainer(
        str(folder), plan.settings, train_dataset=preferences, eval_dataset=held_out
    )
    result = trainer.train(resume_from_checkpoint=resume or None)
    if as_json:
        facts = {
            "num_steps": result.num_steps,
            "total_steps": result.total_steps,
            "stop_reason": result.stop_reason,
        }
        typer.echo(
            json.dumps({"folder": str(result.folder), **facts, "metrics": dict(result.metrics)})
        )
        return
    typer.echo(
        f"{result.folder}: {result.num_steps} of {result.total_steps} steps, {result.stop_reason}"
    )
    if result.stop_reason == "finished":
        typer.echo(
            f"Next: halteres reward eval {result.folder} {plan.eval_data or 'HELD_OUT'} "
            "--min-accuracy 0.80"
        )
    else:
        typer.echo("Next: the same command with --resume")


def _start_run(plan: RewardPlan, as_json: bool) -> None:
    """Start the training as a run, and say how to watch it."""
    from halteres.runs.start import start_reward_training

    for warning in plan.forecast.warnings:
        typer.echo(f"warning: {warning}", err=True)
    run = start_reward_training(plan)
    if as_json:
        typer.echo(
            json.dumps(
                {"run_id": run.run_id, "total_steps": plan.total_steps, "folder": str(run.path)}
            )
        )
        return
    typer.echo(f"Run {run.run_id}: {plan.total_steps} steps, in {run.path}")
    typer.echo(f"Next: halteres runs status {run.run_id}")


def _show_forecast(found: Forecast, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    lengths = ", ".join(f"{float(q):.0%} at most {tokens}" for q, tokens in found.lengths.items())
    lines = {
        "parameters": f"{found.num_parameters:,}" if found.num_parameters else "unknown",
        "learning rate": found.learning_rate,
        "rows of a batch": found.batch_size,
        "rows": f"{found.num_rows} to train on, {found.num_held_out} held out",
        "steps": found.total_steps,
        "tokens of the longer side": lengths,
        "rows that are too long": f"{found.rows_too_long}, {found.tokens_lost} tokens lost",
        "memory": f"about {found.memory_gb} GB" if found.memory_gb else "unknown",
        "disk": f"about {found.disk_gb} GB" if found.disk_gb is not None else "unknown",
    }
    for name, value in lines.items():
        typer.echo(f"{name:26} {value}")
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)


@app.command("eval")
def eval_(
    model: Annotated[
        str,
        typer.Argument(
            help=(
                "A reward model's folder, a scoring URL, several joined by commas, or a judge's "
                "file."
            )
        ),
    ],
    data: HeldOut,
    format: Annotated[
        Literal["preferences", "rewardbench"],
        typer.Option(help="Of the data; rewardbench: either version."),
    ] = "preferences",
    min_accuracy: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 1 if the accuracy of all pairs is lower."),
    ] = None,
    combination: Annotated[
        Literal["mean", "min", "mean_minus_std"], typer.Option(help="Of several models' scores.")
    ] = "mean",
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG).")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write one HTML page, with the worst mistakes.")
    ] = None,
    probes: Annotated[bool, typer.Option(help="Score some texts in other ways, too.")] = True,
    on_identical: OnIdentical = "error",
    as_json: AsJson = False,
) -> None:
    """Measure how well a scorer orders held-out preferences: overall, by kind, by length, its
    calibration.
    """
    import asyncio

    from halteres.rewards import evaluation_report
    from halteres.rewards.evaluation import JUDGE_SUFFIXES, evaluate, evaluate_judge, read_judge
    from halteres.rewards.model_folder import read_reward_file
    from halteres.rewards.preferences import read_preferences, read_rewardbench
    from halteres.rewards.scorer import comparable_units, open_scorer

    if format == "rewardbench":
        rows = read_rewardbench(data)
    else:
        rows = read_preferences(data, on_identical=on_identical)
    stored = None
    if Path(model).is_dir():
        stored = read_reward_file(Path(model))

    async def measured() -> Evaluation:
        if Path(model).suffix in JUDGE_SUFFIXES and not Path(model).is_dir():
            return await evaluate_judge(read_judge(Path(model)), rows)
        scorer = open_scorer(model, output=comparable_units(model), combination=combination)
        try:
            return await evaluate(scorer, rows, stored=stored, probe=probes)
        finally:
            await scorer.close()

    found = asyncio.run(measured())
    if plot is not None:
        evaluation_report.draw(found, plot)
    if page is not None:
        page.write_text(evaluation_report.page(found), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(evaluation_report.as_json(found)))
    else:
        _show_evaluation(found, rows.warnings)
    if min_accuracy is not None and found.overall.accuracy.value < min_accuracy:
        accuracy = found.overall.accuracy
        interval = f"95 %: {accuracy.low:.1%} to {accuracy.high:.1%}, {accuracy.count} pairs"
        typer.echo(
            f"The accuracy of {accuracy.value:.1%} is below {min_accuracy:.1%} ({interval}).",
            err=True,
        )
        raise typer.Exit(1)


def _show_evaluation(found: Evaluation, warnings: Sequence[str]) -> None:
    from rich.console import Console

    from halteres.rewards import evaluation_report

    console = Console(highlight=False)
    console.print(f"{found.scorer} on {found.source}", markup=False)
    console.print(evaluation_report.as_table(found))
    for name, value in evaluation_report.facts(found):
        console.print(f"{name:24} {value}", markup=False, soft_wrap=True)
    for warning in (*warnings, *found.warnings):
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)


@app.command()
def calibrate(
    folder: Folder,
    data: HeldOut,
    offset: Annotated[
        Literal["chosen", "both"],
        typer.Option(help="Whose mean score becomes 0: the chosen side's, or both sides'."),
    ] = "chosen",
    on_identical: OnIdentical = "error",
    as_json: AsJson = False,
) -> None:
    """Fit temperature, offset and scale on held-out pairs, and store them with the model; its
    weights stay.
    """
    import asyncio

    from halteres.rewards import RewardModel
    from halteres.rewards.evaluation import calibration_of, score_comparisons
    from halteres.rewards.model_folder import RewardFile, read_reward_file, write_reward_file
    from halteres.rewards.preferences import read_preferences
    from halteres.rewards.scorer import LocalScorer

    rows = read_preferences(data, on_identical=on_identical)
    model = RewardModel.load(folder)
    scored = asyncio.run(score_comparisons(LocalScorer(model, "raw"), rows))
    source = {"data_digest": rows.digest, "template_digest": model.template.digest}
    made = calibration_of(scored, offset_from=offset).model_copy(update=source)
    file = read_reward_file(folder) or RewardFile(template=model.template)
    write_reward_file(folder, file.model_copy(update={"calibration": made}))
    if as_json:
        typer.echo(made.model_dump_json())
        return
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
    units = f"temperature {made.temperature:.4g}, offset {made.offset:.4g}, scale {made.scale:.4g}"
    typer.echo(f"{units}: {made.num_pairs} pairs")
    for name, (before, after) in {
        "calibration error": made.calibration_error,
        "Brier score": made.brier_score,
    }.items():
        typer.echo(f"{name} {before:.3f} -> {after:.3f}")


@app.command()
def rank(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="What was asked.")],
    completions: Annotated[list[str], typer.Argument(help="Two or more answers.")],
    as_json: AsJson = False,
) -> None:
    """Order answers to one prompt, the best first."""
    import asyncio

    from halteres.rewards.scorer import comparable_units, open_scorer, score_once
    from halteres.scores import Scorable, best_first

    texts = [Scorable(prompt=prompt, completion=completion) for completion in completions]
    scores = asyncio.run(score_once(open_scorer(model, output=comparable_units(model)), texts))
    values = [None if score is None else score.value for score in scores]
    order = best_first(values)
    if as_json:
        typer.echo(json.dumps({"order": order, "scores": values}))
        return
    for place in order:
        value = values[place]
        typer.echo(
            f"{'not scored' if value is None else f'{value:10.4f}'}  [{place + 1}] "
            f"{completions[place]}"
        )


@app.command()
def check(
    what: Annotated[
        str,
        typer.Argument(
            help="A rubric's file, a function (FILE.py:NAME, MODULE:NAME), or an environment."
        ),
    ],
    prompt: Annotated[
        str, typer.Option(help="What a function's odd answers are answers to.")
    ] = "What is 3 + 4?",
    reference: Annotated[
        str, typer.Option(help="The right answer to it, which may be paid.")
    ] = "7",
    columns: Annotated[
        list[str] | None,
        typer.Option("--column", help="NAME=VALUE of the task, for a function; may be repeated."),
    ] = None,
    paid_above: Annotated[float, typer.Option(help="A score above it counts as paid.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Look for what a policy could exploit: compound criteria; verifiers that pay for nothing, or
    crash.
    """
    import asyncio
    from dataclasses import asdict

    from halteres.agent.trial.testing import scored
    from halteres.config.discovery import discover
    from halteres.config.program import find_program
    from halteres.environments.base import BaseEnv
    from halteres.environments.config import BaseEnvConfig
    from halteres.environments.scorers import Scorers
    from halteres.models import TINY
    from halteres.rewards.checking import check_answers, check_rubric, function_scores
    from halteres.rewards.components import read_rubric
    from halteres.rewards.functions import RewardFunction
    from halteres.rewards.training_plan import parse_settings

    family, _, rest = what.partition(":")
    if Path(what).suffix in (".json", ".toml", ".yaml", ".yml"):
        found = check_rubric(read_rubric(Path(what)))
    elif (
        rest
        and "/" not in rest
        and all(environment.name != family for environment in discover([]).environments)
    ):
        task = parse_settings(columns or [], {})
        scorers = Scorers(BaseEnv, BaseEnvConfig(), _base_model(TINY), _say_uncaged)
        function = RewardFunction(what, elsewhere=scorers.function)

        async def tried() -> Mapping[str, float | str | None]:
            try:
                return await function_scores(function, prompt, reference, task)
            finally:
                function.close()

        found = check_answers(asyncio.run(tried()), paid_above)
    else:
        program = find_program(what)
        rows = scored(program, program.variant_setting, str(_base_model(TINY)), {})["scores"]
        found = check_answers(
            {row["of"]: row.get("note") or row["score"] for row in rows}, paid_above
        )
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in found]}))
    else:
        for finding in found:
            typer.echo(f"{finding.code:20} {finding.subject}: {finding.why}")
        typer.echo(f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "nothing found")
    if found:
        raise typer.Exit(1)


@app.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="The folder to write: a new one, or an empty one.")],
    objective_weights: Annotated[
        str | None,
        typer.Option(
            help="What each objective counts: helpful=0.7,safe=0.3. [default: as in the model]"
        ),
    ] = None,
) -> None:
    """Write the whole model as one folder, an adapter put into its weights, objectives into one
    score: for transformers, TRL, vLLM.
    """
    from halteres.errors import Conflict
    from halteres.rewards import RewardModel
    from halteres.rewards.training_plan import RewardConfig, parse_settings

    if out.exists() and any(out.iterdir()):
        raise Conflict(f"The folder {out} is not empty.", next="Name a new one.")
    assignments = [one.strip() for one in (objective_weights or "").split(",") if one.strip()]
    numbers = {"additionalProperties": {"type": "number"}}
    weights = RewardConfig(
        objective_weights=parse_settings(assignments, numbers) or None
    ).objective_weights
    RewardModel.load(folder).save_merged(out, weights)
    typer.echo(f"{out}: AutoModelForSequenceClassification.from_pretrained reads it")


def _say_uncaged(missing: str) -> None:
    typer.echo(f"The function names itself unsafe, and runs without a cage: {missing}", err=True)


def _base_model(name: str) -> Path:
    from halteres.config import environ
    from halteres.errors import NotFound
    from halteres.models import model_folder

    if (folder := model_folder(name, environ.home() / "models")) is None:
        raise NotFound(
            f"There is no model '{name}' on this disk.",
            next=(
                f"halteres models add {name}, or name a folder; halteres/tiny comes with the "
                "package."
            ),
        )
    return folder
