"""The tools on reward models: rl_list_reward_models, rl_train_reward_model,
rl_evaluate_reward_model, rl_rank_completions; and the process that scores for the last two: `python
-m halteres.agent.reward_models FOLDER --lock-fd N`.

The process of the tools has no torch, and scores nothing. A training is a run as any other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field

from halteres import process
from halteres.agent.answer_text import nonempty
from halteres.agent.tool import (
    READS,
    Caller,
    Facts,
    Hints,
    LongArguments,
    Result,
    RunName,
    WaitSeconds,
    chosen_run,
    tool,
)
from halteres.agent.trial import folder as folders
from halteres.agent.trial.folder import TestFolder
from halteres.config import environ
from halteres.errors import HalteresError, ServerError, UserError
from halteres.models import TINY, stored_models
from halteres.next_step import NextStep
from halteres.rewards.forecast import Forecast
from halteres.rewards.model_folder import RESULT, ModelFolder, read_model_folder
from halteres.rewards.training_plan import read_plan
from halteres.runs.directory import RunDirectory, list_runs
from halteres.runs.planning.reward_plan import plan_resumed_training, plan_reward_training
from halteres.runs.start import run_of_key, start_reward_training
from halteres.short_texts import rounded

MODULE = "halteres.agent.reward_models"
MOST_LISTED, MOST_COMPLETIONS, MOST_WARNINGS = 20, 64, 6

LIST = NextStep("rl_list_reward_models")

WAIT_S = 45
WITHIN_S = 3600  # how long scoring may take
_METRICS = ("eval_accuracy", "accuracy", "eval_loss", "loss")
_FORECAST = (
    "num_parameters",
    "learning_rate",
    "batch_size",
    "num_rows",
    "num_held_out",
    "total_steps",
    "memory_gb",
)

Model = Annotated[
    str,
    Field(description="a reward model: its folder, a run that trained it, or a server's address"),
]
EvaluationId = Annotated[
    str | None, Field(max_length=100, description="go on waiting for this one")
]


class RewardModelRow(Facts):
    """A reward model, and what is known of it."""

    model: str  # folder
    run_id: str | None = None
    base: str | None = None
    figures: dict[str, float] = {}
    num_rows: int | None = None  # that it was trained on
    calibrated: bool = False


class RewardModels(Result):
    """Reward models on this machine, the newest first."""

    reward_models: list[RewardModelRow]
    count: int


@tool(title="List reward models", hints=READS)
def rl_list_reward_models(caller: Caller) -> RewardModels:
    """List the reward models on this machine: trained by runs, or put into the store."""
    found = [_row(folder, run_id) for folder, run_id in _folders()]
    path = None
    if found:
        path = found[0].model
    following = NextStep.of("rl_train_reward_model", dry_run=True)
    if path:
        following = NextStep.of("rl_edit_config", "reward_model_path", path)
    return RewardModels(reward_models=found[:MOST_LISTED], count=len(found), next=following)


def _folders() -> list[tuple[ModelFolder, str | None]]:
    """With the run that trained it, where one did."""
    places: list[tuple[Path, str | None]] = [(run.path / RESULT, run.run_id) for run in list_runs()]
    places += [(folder, None) for _, folder in stored_models(environ.home() / "models")]
    found = list[tuple[ModelFolder, str | None]]()
    for place, run_id in places:
        try:
            found.append((read_model_folder(place), run_id))
        except HalteresError:  # a base model, or a training that has not ended
            continue
    return found


def _row(folder: ModelFolder, run_id: str | None) -> RewardModelRow:
    facts = folder.facts
    metrics = facts.get("metrics") or {}
    figures = {name: rounded(metrics[name]) for name in _METRICS if name in metrics}
    rows, is_calibrated = (facts.get("data") or {}).get("rows"), bool(facts.get("calibration"))
    known = nonempty(run_id=run_id, base=folder.base, figures=figures, num_rows=rows)
    return RewardModelRow(model=str(folder.path), **known, calibrated=is_calibrated)


class RewardTraining(Result):
    """A reward training that was started, or rehearsed."""

    run_id: str | None = None  # None: a dry run
    status: str  # starting, rehearsed, or what the run of a repeated key is
    base_model: str = ""
    total_steps: int = 0
    forecast: dict[str, Any] = {}  # rows, steps, learning rate, memory; rows that are too long
    warnings: list[str] = []
    resumed_from: str | None = None
    message: str = ""


@tool(title="Train a reward model", hints=Hints())
def rl_train_reward_model(
    caller: Caller,
    data: Annotated[
        str | None,
        Field(
            description=(
                "file of preferences: JSON lines with prompt, chosen, rejected, and maybe kind"
            )
        ),
    ] = None,
    model: Annotated[str, Field(description="base model: a name or a folder")] = TINY,
    eval_data: Annotated[str | None, Field(description="file of held-out preferences")] = None,
    hold_out: Annotated[
        float | None,
        Field(gt=0, lt=1, description="share of the prompts to hold out, without eval_data"),
    ] = None,
    settings: Annotated[
        dict[str, Any] | None,
        Field(
            description=(
                'of TRL\'s RewardConfig: {"learning_rate": 1e-4, "num_train_epochs": 2, '
                '"lora": {"r": 16}}'
            )
        ),
    ] = None,
    dry_run: Annotated[
        bool, Field(description="only check the data, and forecast steps and memory")
    ] = False,
    name: RunName = None,
    resume_from: Annotated[
        str | None, Field(description="run to go on from, at its newest checkpoint")
    ] = None,
    idempotency_key: Annotated[
        str | None, Field(description="a repeated key answers with the first run", max_length=200)
    ] = None,
) -> RewardTraining:
    """Train a reward model on preference pairs, as a run: watch it with rl_check_status, as any
    other.

    Its model is then named in a draft's `rewards` or `reward_model_path` (rl_edit_config).
    """
    if not dry_run and (first := run_of_key(idempotency_key)) is not None:
        return _training(
            first,
            message="This idempotency_key has started this run already; nothing new was started.",
        )
    if resume_from:
        if data or eval_data or hold_out or settings:
            raise UserError(
                "resume_from goes on with the data and the settings of its run.",
                "data, eval_data, hold_out and settings cannot be changed.",
                NextStep.of("rl_train_reward_model", resume_from=resume_from),
            )
        plan = plan_resumed_training(chosen_run(resume_from), name=name)
    elif data is None:
        raise UserError(
            "data is needed.",
            "It names a file of preferences.",
            NextStep.of("rl_train_reward_model", data="..."),
        )
    else:
        given = {"model": model, "data": data, "eval_data": eval_data, "hold_out": hold_out}
        fields = {key: value for key, value in given.items() if value is not None}
        training = read_plan(None, {**(settings or {}), **fields})
        plan = plan_reward_training(training, name=name)
    forecast = _forecast_facts(plan.forecast)
    warnings = [*plan.forecast.warnings][:MOST_WARNINGS]
    if not dry_run:
        run = start_reward_training(plan, idempotency_key=idempotency_key)
        return _training(run, forecast=forecast, warnings=warnings)
    return RewardTraining(
        status="rehearsed",
        base_model=plan.training.plan.model,
        total_steps=plan.total_steps,
        forecast=forecast,
        warnings=warnings,
        next="the same call without dry_run",
    )


def _forecast_facts(forecast: Forecast) -> dict[str, Any]:
    fields: Mapping[str, Any] = asdict(forecast)
    facts = {name: fields[name] for name in _FORECAST if fields[name] is not None}
    if forecast.rows_too_long:
        facts |= {name: fields[name] for name in ("rows_too_long", "tokens_lost")}
    return facts


def _training(run: RunDirectory, **more: Any) -> RewardTraining:
    state = run.state()
    if state.kind != "reward":
        raise UserError(
            f"Run {run.run_id} trains no reward model.",
            "",
            NextStep.of("rl_check_status", run.run_id),
        )
    return RewardTraining(
        run_id=run.run_id,
        base_model=state.base_model,
        total_steps=state.total_steps,
        status="starting" if state.status == "pending" else state.status,
        **nonempty(resumed_from=state.resumed_from),
        **more,
        next=NextStep.of("rl_check_status", run.run_id, wait_s=WAIT_S, until="terminal"),
    )


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True):
    """request.json: preferences to measure a model on, or completions to rank."""

    model: str
    data: str | None = None
    prompt: str | None = None
    completions: tuple[str, ...] = ()


class PairAccuracy(Facts):
    """The same of one kind of pairs."""

    accuracy: float
    interval: list[float]
    num_pairs: int


class RewardEvaluated(Result):
    """A reward model on held-out preferences, done or under way."""

    evaluation_id: str
    status: str  # running, done, failed
    model: str
    accuracy: float | None = None  # share of pairs whose better side has the higher score
    interval: list[float] = []  # 95 %, Wilson
    num_pairs: int = 0
    by_kind: dict[str, PairAccuracy] = {}
    warnings: list[str] = []
    files: str = ""  # folder: result.json has every figure


class Ranked(Result):
    """Completions of one prompt, the best first."""

    evaluation_id: str
    status: str  # running, done, failed
    order: list[int] = []  # places in what was given, from 0; what could not be scored comes last
    scores: list[float | None] = []  # as given; null: could not be scored


@tool(title="Evaluate a reward model", hints=Hints())
async def rl_evaluate_reward_model(
    caller: Caller,
    model: Annotated[
        Model | None, Field(description="needed, unless evaluation_id is given")
    ] = None,
    data: Annotated[
        str | None, Field(description="file of held-out preferences: prompt, chosen, rejected")
    ] = None,
    evaluation_id: EvaluationId = None,
    wait_s: WaitSeconds = 45,
) -> RewardEvaluated:
    """Measure how often a reward model prefers the better of two answers, overall and by kind, on
    held-out pairs.
    """

    def request() -> RewardRequest:
        if not model or not data:
            raise UserError(
                "model and data are needed.",
                "",
                NextStep.of("rl_evaluate_reward_model", model="...", data="..."),
            )
        file = Path(data).expanduser()
        return RewardRequest(
            model=_place(model), data=str(file.absolute()) if file.exists() else data
        )

    answer, result = await _scored("rl_evaluate_reward_model", evaluation_id, wait_s, request)
    if result is not None:
        kinds = {kind: _pairs(of_kind) for kind, of_kind in result["by_kind"].items()}
        answer |= {
            **_pairs(result["overall"]),
            "by_kind": kinds,
            "warnings": result["warnings"][:MOST_WARNINGS],
        }
        answer["next"] = NextStep.of("rl_edit_config", "reward_model_path", answer["model"])
    return RewardEvaluated(**answer)


def _pairs(figures: Mapping[str, Any]) -> dict[str, Any]:
    accuracy = figures["accuracy"]
    interval = [rounded(accuracy["low"]), rounded(accuracy["high"])]
    return {
        "accuracy": rounded(accuracy["value"]),
        "interval": interval,
        "num_pairs": accuracy["count"],
    }


@tool(title="Rank completions", hints=Hints(), arguments=LongArguments)
async def rl_rank_completions(
    caller: Caller,
    model: Annotated[
        Model | None, Field(description="needed, unless evaluation_id is given")
    ] = None,
    completions: Annotated[
        list[str] | None, Field(max_length=MOST_COMPLETIONS, description="two or more")
    ] = None,
    prompt: Annotated[str | None, Field(description="what they answer")] = None,
    evaluation_id: EvaluationId = None,
    wait_s: WaitSeconds = 45,
) -> Ranked:
    """Order answers to one prompt by a reward model, the best first."""

    def request() -> RewardRequest:
        if not model or not completions or len(completions) < 2:
            raise UserError("model and two completions are needed.", "", LIST)
        return RewardRequest(model=_place(model), prompt=prompt, completions=tuple(completions))

    answer, result = await _scored("rl_rank_completions", evaluation_id, wait_s, request)
    if result is not None:
        del answer["files"]
        scores = [None if score is None else rounded(score) for score in result["scores"]]
        answer |= {"order": result["order"], "scores": scores, "next": LIST}
    return Ranked(**answer)


def _place(model: str) -> str:
    """An address as it is; the folder of a run's model; else a folder that must be one of a reward
    model.
    """
    if model.startswith(("http://", "https://")):
        return model
    trained = {run_id: folder.path for folder, run_id in _folders() if run_id}
    return str(trained.get(model) or read_model_folder(model).path)


async def _scored(
    name: str, evaluation_id: str | None, wait_s: float, make_request: Callable[[], RewardRequest]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The answer so far of a process that scores, started now or before, and its result once it is
    done.
    """

    def start() -> TestFolder:
        request = make_request()
        keys = ()
        if "://" in request.model:
            keys = (environ.REWARD_KEY,)
        return folders.begin("r", MODULE, request, *keys)

    folder = await folders.awaited("r", evaluation_id, wait_s, start, LIST)

    def answer() -> tuple[dict[str, Any], dict[str, Any] | None]:
        body = {"evaluation_id": folder.test_id, "model": folder.request(RewardRequest).model}
        so_far = folders.unfinished(folder, name, "process that scores", wait_s)
        if so_far is not None:
            return {**body, **so_far}, None
        return {**body, "status": "done", "files": str(folder.path)}, folder.result()

    return await asyncio.to_thread(answer)


def main() -> int:
    """Score, and write the result. Exit code 0, or 1 where it failed."""
    folder = folders.own_folder()
    environ.stay_offline()
    process.begin(
        "evaluator", torch=True, threads=environ.threads() or max(1, process.usable_cores() - 1)
    )

    def end_late(*_: object) -> None:
        """Leave a result and end at once: the thread that computes cannot be interrupted."""
        late = ServerError(
            "Scoring took too long.",
            f"It had {WITHIN_S} s.",
            "Give it fewer texts, or a smaller model.",
        )
        folder.write("result.json", {"status": "failed", "error": late.sentence, "code": late.code})
        os._exit(1)

    signal.signal(signal.SIGALRM, end_late)
    signal.alarm(WITHIN_S)
    return folders.leave_result(
        folder, "Scoring", lambda: asyncio.run(_score(folder.request(RewardRequest)))
    )


async def _score(request: RewardRequest) -> dict[str, Any]:
    from halteres.rewards import evaluation_report
    from halteres.rewards.evaluation import evaluate
    from halteres.rewards.model_folder import read_reward_file
    from halteres.rewards.preferences import read_preferences
    from halteres.rewards.scorer import comparable_units, open_scorer, score_once
    from halteres.scores import Scorable, best_first

    scorer = open_scorer(request.model, output=comparable_units(request.model))
    if request.data is not None:
        stored = None
        if Path(request.model).is_dir():
            stored = read_reward_file(Path(request.model))
        try:
            return evaluation_report.as_json(
                await evaluate(scorer, read_preferences(request.data), stored=stored, probe=False)
            )
        finally:
            await scorer.close()
    texts = [
        Scorable(prompt=request.prompt, completion=completion) for completion in request.completions
    ]
    values = [None if score is None else score.value for score in await score_once(scorer, texts)]
    return {"order": best_first(values), "scores": values}


if __name__ == "__main__":
    sys.exit(main())
