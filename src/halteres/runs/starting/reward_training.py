"""Starting a run that trains a reward model: its checks, and what its directory says first."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halteres.config.operator_policy import load_policy, over_cap
from halteres.config.settings import Settings
from halteres.errors import Conflict, InvalidConfig
from halteres.rewards.training_plan import Forecast, TrainingPlan, TrainingRun, forecast
from halteres.runs.directory import RunDirectory
from halteres.runs.starting import resources
from halteres.runs.starting.preflight import TooLarge, check_keys
from halteres.runs.starting.run_models import find_folder
from halteres.runs.starting.start import SUPERVISOR, Startable, begin_run, write_run
from halteres.runs.state import RunState

ENVIRONMENT = "reward-model"  # what stands in run.json where other runs have their environment


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStart(Startable):
    """One reward training about to begin."""

    training: TrainingRun
    forecast: Forecast
    base_model: str  # its name; the plan holds its folder
    name: str | None = None
    resumed: RunDirectory | None = None

    @property
    def total_steps(self) -> int:
        """Optimiser steps; the trainer knows better once it has read the rows as tokens."""
        return self.forecast.total_steps or 1

    def write(self, folder: Path, path: Path) -> None:
        """The run's files, in a folder that will be `path`."""
        sections: dict[str, Any] = {
            "run": {"name": self.name} if self.name else {},
            "inference": {"model": self.training.plan.model},
            "trainer": {"total_steps": self.total_steps},
        }
        state, metrics = self.state(), self.resumed.metrics() if self.resumed else []
        (folder / "config.yaml").write_text("env: {}\n")
        self.training.write(folder)
        metrics = [row for row in metrics if row.get("step", 0) <= state.step]
        write_run(folder, state, Settings.model_validate(sections), self.policy, metrics)

    def state(self) -> RunState:
        """What run.json says first."""
        newest = self.resumed.newest_checkpoint() if self.resumed else None
        return RunState(
            kind="reward",
            run_id=self.run_id,
            name=self.name or f"{ENVIRONMENT}-{self.run_id}",
            environment=ENVIRONMENT,
            environment_file=self.training.plan.data,
            interpreter=sys.executable,
            base_model=self.base_model,
            tokenizer=self.training.plan.model,
            total_steps=self.total_steps,
            created_at=time.time(),
            step=newest["step"] if newest else 0,
            policy=self.policy.name,
            resumed_from=self.resumed.run_id if self.resumed else None,
            resume_point={name: newest.get(name) for name in ("name", "step", "state_path")} if newest else None,
            idempotency_key=self.idempotency_key,
            processes={"trainer": {"pid": None, "exit": None, "state": "not started"}},
        )


def plan_reward_training(
    plan: TrainingPlan, *, name: str | None = None, idempotency_key: str | None = None
) -> RewardStart:
    """Check everything that can be checked without loading the model.

    Raises:
        NotFound: there is no such model or file.
        InvalidConfig, InvalidData: a setting is wrong; rows cannot be used, the message tells them by number.
        TooLarge: the memory that is free is less than what it takes.
        MissingKey, PolicyCap: the operator's policy does not allow it.
    """

    def absolute(data: str) -> str:  # what is no file is a name of the hub
        return str(Path(data).expanduser().absolute()) if Path(data).expanduser().exists() else data

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
    return RewardStart(
        training=TrainingRun(plan=whole),
        forecast=_checked(forecast(whole, folder)),
        base_model=plan.model,
        name=name,
        idempotency_key=idempotency_key,
    )


def plan_resumed_training(
    run: RunDirectory, *, name: str | None = None, idempotency_key: str | None = None
) -> RewardStart:
    """Go on from the newest checkpoint of a reward training, with its settings, as a new run. Conflict: it goes on yet,
    is complete, or has no checkpoint; else as `plan_reward_training`."""
    state, newest = run.state(), run.newest_checkpoint()
    if not state.terminal:
        raise Conflict(f"Run {run.run_id} has not ended.", f"It is {state.status}.", "Stop it first.")
    if newest is None or newest.get("final"):
        why = "It is complete." if newest else "It has no checkpoint."
        raise Conflict(f"Run {run.run_id} cannot be resumed.", why, "Start a new one.")
    plan = TrainingRun.read(run.path).plan
    return RewardStart(
        training=TrainingRun(plan=plan, resume_from=str(newest["state_path"])),
        forecast=_checked(forecast(plan, Path(plan.model))),
        base_model=state.base_model,
        name=name,
        resumed=run,
        idempotency_key=idempotency_key,
    )


def start_reward_training(start: RewardStart, supervisor: Sequence[str] = SUPERVISOR) -> RunDirectory:
    """Begin it under a detached supervisor; the run of its key, where there is one. Raises as `begin_run` does."""
    return begin_run(start, supervisor)


def _checked(forecast: Forecast) -> Forecast:
    """See that the operator's policy and the memory allow it."""
    policy = load_policy()
    check_keys(policy)
    problem = over_cap(policy, forecast.total_steps or 1)
    if problem is not None:
        fix = f"Set max_steps to {problem.limit:g} or less, or train on fewer rows or epochs."
        raise replace(problem, field="max_steps").alone(fix)
    free, needed_gb = resources.look().memory.free, forecast.memory_gb
    if free is not None and needed_gb is not None and needed_gb * 1e9 > free:
        raise TooLarge(
            f"Too little memory: about {needed_gb:.1f} GB are needed, {free / 1e9:.1f} GB are free.",
            "Weights, gradients and two moments of each are held at once.",
            "Train an adapter (lora), lower max_tokens_per_forward, or take a smaller model.",
            need_gb=needed_gb,
            free_gb=resources.gb(free),
        )
    return forecast
