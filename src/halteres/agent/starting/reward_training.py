"""The tool that trains a reward model: rl_train_reward_model.

Owns: the call as a plan, its answer.
Never: trains; watches: the run that it starts is looked at as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from halteres.agent.tool import Caller, Hints, Result, chosen_run, tool
from halteres.errors import UserError
from halteres.models import TINY
from halteres.next_step import worded
from halteres.rewards.training_plan import Forecast, read_plan
from halteres.runs.directory import RunDirectory
from halteres.runs.starting.reward_training import (
    RewardStart,
    plan_resumed_training,
    plan_reward_training,
    start_reward_training,
)
from halteres.runs.starting.start import run_of_key

WAIT_S = 45

_FORECAST = ("num_parameters", "learning_rate", "batch_size", "num_rows", "num_held_out", "total_steps", "memory_gb")


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
        str | None, Field(description="file of preferences: JSON lines with prompt, chosen, rejected, and maybe kind")
    ] = None,
    model: Annotated[str, Field(description="base model: a name or a folder")] = TINY,
    eval_data: Annotated[str | None, Field(description="file of held-out preferences")] = None,
    hold_out: Annotated[
        float | None, Field(gt=0, lt=1, description="share of the prompts to hold out, without eval_data")
    ] = None,
    settings: Annotated[
        dict[str, Any] | None,
        Field(description='of TRL\'s RewardConfig: {"learning_rate": 1e-4, "num_train_epochs": 2, "lora": {"r": 16}}'),
    ] = None,
    dry_run: Annotated[bool, Field(description="only check the data, and forecast steps and memory")] = False,
    name: Annotated[str | None, Field(description="readable name of the run", max_length=80)] = None,
    resume_from: Annotated[str | None, Field(description="run to go on from, at its newest checkpoint")] = None,
    idempotency_key: Annotated[
        str | None, Field(description="a repeated key answers with the first run", max_length=200)
    ] = None,
) -> RewardTraining:
    """Train a reward model on preference pairs, as a run: watch it with rl_check_status, as any other.

    Its model is then named in a draft's `rewards` or `reward_model_path` (rl_edit_config).
    """
    if not dry_run and (first := run_of_key(idempotency_key)) is not None:
        return _answer(first, message="This idempotency_key has started this run already; nothing new was started.")
    if resume_from:
        if data or eval_data or hold_out or settings:
            raise UserError(
                "resume_from goes on with the data and the settings of its run.",
                "data, eval_data, hold_out and settings cannot be changed.",
                f'rl_train_reward_model(resume_from="{resume_from}")',
            )
        start = plan_resumed_training(chosen_run(resume_from), name=name, idempotency_key=idempotency_key)
    elif data is None:
        raise UserError("data is needed.", "It names a file of preferences.", 'rl_train_reward_model(data="...")')
    else:
        given = {"model": model, "data": data, "eval_data": eval_data, "hold_out": hold_out}
        fields = {key: value for key, value in given.items() if value is not None}
        plan = read_plan(None, {**(settings or {}), **fields})
        start = plan_reward_training(plan, name=name, idempotency_key=idempotency_key)
    if dry_run:
        return _rehearsed(start)
    run = start_reward_training(start)
    return _answer(run, forecast=_facts(start.forecast), warnings=[*start.forecast.warnings][:6])


def _rehearsed(start: RewardStart) -> RewardTraining:
    return RewardTraining(
        status="rehearsed",
        base_model=start.training.plan.model,
        total_steps=start.total_steps,
        forecast=_facts(start.forecast),
        warnings=[*start.forecast.warnings][:6],
        next="the same call without dry_run",
    )


def _facts(forecast: Forecast) -> dict[str, Any]:
    fields: Mapping[str, Any] = asdict(forecast)
    facts = {name: fields[name] for name in _FORECAST if fields[name] is not None}
    if forecast.rows_too_long:
        facts |= {"rows_too_long": forecast.rows_too_long, "tokens_lost": forecast.tokens_lost}
    return facts


def _answer(run: RunDirectory, **more: Any) -> RewardTraining:
    state = run.state()
    if state.kind != "reward":
        raise UserError(f"Run {run.run_id} trains no reward model.", "", worded("rl_check_status", run.run_id))
    answer: dict[str, Any] = {"run_id": run.run_id, "base_model": state.base_model, "total_steps": state.total_steps}
    answer["status"] = "starting" if state.status == "pending" else state.status
    if state.resumed_from:
        answer["resumed_from"] = state.resumed_from
    follow = worded("rl_check_status", run.run_id, wait_s=WAIT_S, until="terminal")
    return RewardTraining(**answer, **more, next=follow)
