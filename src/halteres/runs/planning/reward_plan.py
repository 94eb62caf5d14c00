"""What a training of a reward model will be: its settings, its data, its steps and memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from halteres.config.operator_policy import Policy, load_policy, over_cap
from halteres.config.problem import Problem, refusal, rule_of
from halteres.config.settings import RunSettings
from halteres.errors import Conflict, InvalidConfig
from halteres.rewards.forecast import Forecast, forecast
from halteres.rewards.training_plan import TrainingPlan, TrainingRun
from halteres.runs.directory import RunDirectory
from halteres.runs.planning import resources
from halteres.runs.planning.checks import TooLarge, check_disk, check_keys
from halteres.runs.planning.models import find_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    """A training of a reward model before it begins."""

    training: TrainingRun
    forecast: Forecast
    base_model: str  # its name; `training` has its folder
    name: str | None = None
    resumed: RunDirectory | None = None
    policy: Policy = field(default_factory=load_policy)  # what the operator locks and caps

    @property
    def total_steps(self) -> int:
        """Optimiser steps; the trainer knows better once it has read the rows as tokens."""
        return self.forecast.total_steps or 1


def plan_reward_training(plan: TrainingPlan, *, name: str | None = None) -> RewardPlan:
    """Check everything that can be checked without loading the model.

    Raises:
        NotFound: there is no such model or file.
        InvalidConfig, InvalidData: a setting is wrong; rows cannot be used, the message tells them
            by number.
        TooLarge: the memory that is free is less than what it takes.
        DiskFull: so is the room on the disk of runs, for its checkpoints and the model.
        PreflightFailed: the folder of runs cannot be made.
        MissingKey, PolicyCap: the operator's policy does not allow it.
    """

    def absolute(data: str) -> str:  # what is no file is a name of the hub
        if Path(data).expanduser().exists():
            return str(Path(data).expanduser().absolute())
        return data

    if "output_dir" in plan.settings.model_fields_set:
        raise InvalidConfig(
            "output_dir cannot be set.",
            "A run has a directory of its own.",
            "Take output_dir out of the settings, or train without --detach.",
            field="output_dir",
        )
    folder = find_folder(plan.model)
    places = {"model": str(folder), "data": absolute(plan.data)}
    if plan.eval_data:
        places["eval_data"] = absolute(plan.eval_data)
    whole = plan.model_copy(update=places)
    return RewardPlan(
        training=TrainingRun(plan=whole),
        forecast=_checked(forecast(whole, folder)),
        base_model=plan.model,
        name=_checked_name(name),
    )


def plan_resumed_training(run: RunDirectory, *, name: str | None = None) -> RewardPlan:
    """Go on from the newest checkpoint of a reward training, with its settings, as a new run.
    Conflict: it goes on yet, is complete, or has no checkpoint; else as `plan_reward_training`.
    """
    state, newest = run.state(), run.newest_checkpoint()
    if not state.terminal:
        raise Conflict(
            f"Run {run.run_id} has not ended.", f"It is {state.status}.", "Stop it first."
        )
    if newest is None or newest.get("final"):
        why = "It has no checkpoint."
        if newest:
            why = "It is complete."
        raise Conflict(f"Run {run.run_id} cannot be resumed.", why, "Start a new one.")
    plan = TrainingRun.read(run.path).plan
    return RewardPlan(
        training=TrainingRun(plan=plan, resume_from=str(newest["state_path"])),
        forecast=_checked(forecast(plan, Path(plan.model))),
        base_model=state.base_model,
        name=_checked_name(name),
        resumed=run,
    )


def _checked_name(name: str | None) -> str | None:
    """A name as a run may have it. Raises InvalidConfig."""
    try:
        return RunSettings(name=name).name
    except ValidationError as error:
        rule = rule_of(error.errors()[0])
        raise refusal([Problem(field="name", got=name, rule=rule)]) from error


def _checked(forecast: Forecast) -> Forecast:
    """See that the operator's policy, the memory and the disk allow it."""
    policy = load_policy()
    check_keys(policy)
    problem = over_cap(policy, forecast.total_steps or 1)
    if problem is not None:
        fix = f"Set max_steps to {problem.limit:g} or less, or train on fewer rows or epochs."
        raise replace(problem, field="max_steps").alone(fix)
    free, needed_gb = resources.this_machine().memory.free, forecast.memory_gb
    if free is not None and needed_gb is not None and needed_gb * 1e9 > free:
        raise TooLarge(
            f"Too little memory: about {needed_gb:.1f} GB are needed, {free / 1e9:.1f} GB are "
            "free.",
            "Weights, gradients and two moments of each are held at once.",
            "Train an adapter (lora), lower max_tokens_per_forward, or take a smaller model.",
            need_gb=needed_gb,
            free_gb=resources.gb(free),
        )
    room = check_disk(int((forecast.disk_gb or 0.0) * 1e9))
    if room.failure is not None:
        raise room.failure
    return forecast
