"""The checkpoint that a run goes on from, and whether it can."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.clients.critic import step_name
from halteres.config import environ
from halteres.config.problem import Problem, refusal
from halteres.config.settings import Settings
from halteres.errors import Conflict, NotFound
from halteres.models import model_folder
from halteres.next_step import NextStep
from halteres.observe.metrics import Row
from halteres.process import alive
from halteres.rewards.model_folder import RESULT
from halteres.runs.directory import CRITIC, RunDirectory, find_run
from halteres.runs.planning.models import critic_place
from halteres.runs.reading.report import environment_of

LONGEST_STEP = 10  # digits
ROLES_END_WITHIN_S = 15.0  # of a run whose supervisor was killed


class RunGoesOn(Conflict):
    """The run to go on from has not ended."""


class CheckpointMissing(NotFound):
    """The run has no checkpoint, or none of this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on."""

    run: RunDirectory
    checkpoint: dict[str, Any]  # name, step, state_path

    @property
    def step(self) -> int:
        """Optimiser steps that are done."""
        return self.checkpoint["step"]

    @property
    def wiring(self) -> dict[str, Any]:
        """What the trainer is given of the checkpoint."""
        names = ("name", "step", "state_path", "version")
        return {name: self.checkpoint[name] for name in names if name in self.checkpoint}

    def metrics(self) -> list[Row]:
        """The old run's metrics up to here."""
        return [row for row in self.run.metrics() if row.get("step", self.step + 1) <= self.step]


def find_origin(text: str) -> tuple[RunDirectory, int | None]:
    """The run that RUN or RUN@STEP names, and the step of the checkpoint to go on from; None: its
    newest. A run may have a name of the second form.
    """
    word, _, step = text.rpartition("@")
    if not (word and step.isdecimal() and len(step) < LONGEST_STEP):
        return find_run(text), None
    try:
        return find_run(text), None
    except NotFound:
        return find_run(word), int(step)


def checkpoint_of(old: RunDirectory, step: int | None) -> Row:
    """The checkpoint of this step, or the newest one (None).

    Raises:
        CheckpointMissing: there is none; `steps` has those that there are.
    """
    found = old.newest_checkpoint()
    if found is None:
        state = old.state()
        verb = "is"
        if state.terminal:
            verb = "ended"
        if state.is_on_file:
            raise CheckpointMissing(
                f"Run {old.run_id} has no checkpoint.",
                f"It {verb} at step {state.step}.",
                NextStep.of("rl_start_training", data=state.environment_file, method=state.kind),
            )
        environment = environment_of(state)
        raise CheckpointMissing(
            f"Run {old.run_id} has no checkpoint.",
            f"It {verb} at step {state.step}.",
            f"Start anew with its environment, {environment}.",
            environment=environment,
        )
    if step is None:
        return found
    there = {row["step"]: row for row in old.resumable_checkpoints()}
    if step not in there:
        nearest = min(there, key=lambda known: abs(known - step))
        raise CheckpointMissing(
            f"Run {old.run_id} has no checkpoint of step {step}.",
            f"It has those of {', '.join(map(str, there))}.",
            NextStep("rl_start_training", {"resume_from": f"{old.run_id}@{nearest}"}),
            steps=list(there),
        )
    return there[step]


def resume_point(
    old: RunDirectory, settings: Settings, service_url: str | None, step: int | None = None
) -> ResumePoint:
    """The checkpoint of this step of `old` (None: its newest), if a run with these settings can go
    on from it.
    """
    state = old.state()
    if state.kind == "reward":
        arguments = {"model": str(old.path / RESULT), "data": "HELD_OUT"}
        evaluate = NextStep("rl_evaluate_reward_model", arguments, "It is complete")
        following = evaluate
        if state.status != "completed":
            following = state.resume("Go on with it")
        raise Conflict(f"Run {old.run_id} trains a reward model, no policy.", next=following)
    if not state.terminal:
        stop = NextStep("rl_stop_training", {"run_id": old.run_id}, "Stop it first")
        raise RunGoesOn(f"Run {old.run_id} is still {state.status}.", next=stop)
    # A run whose supervisor was killed has processes that are just ending; their files must be at
    # rest.
    ends = time.monotonic() + ROLES_END_WITHIN_S
    while living := {
        role: str(facts["pid"]) for role, facts in state.processes.items() if alive(facts)
    }:
        if time.monotonic() > ends:
            raise Conflict(
                f"Processes of run {state.run_id} are still alive: {', '.join(living)}.",
                "Its supervisor is gone, and they have not ended by themselves.",
                f"End them (pid {', '.join(living.values())}), then resume.",
            )
        time.sleep(0.1)
    checkpoint = checkpoint_of(old, step)
    check_settings(
        old.settings(), settings, checkpoint["step"], has_completed=state.status == "completed"
    )
    if settings.trainer.uses_critic and old.settings().trainer.uses_critic:
        check_critic(old, checkpoint)
    if state.service_given and service_url is None:
        raise NotFound(
            f"The checkpoints of run {old.run_id} are in the service at "
            f"{state.urls.get('service')}.",
            "It used a service that it had not started.",
            f"Set TINKER_BASE_URL={state.urls.get('service')} where it is started.",
        )
    if service_url is not None and not state.service_given:
        raise NotFound(
            f"The service at {service_url} does not have the checkpoints of run {old.run_id}.",
            "That run started a service of its own.",
            "Start it where TINKER_BASE_URL is not set, and name no service.",
        )
    return ResumePoint(run=old, checkpoint=checkpoint)


def check_critic(old: RunDirectory, checkpoint: Row) -> None:
    """CheckpointMissing where the critic of this checkpoint is gone."""
    folder = critic_folder(old, checkpoint["step"])
    if not folder.is_dir():
        raise CheckpointMissing(
            f"The critic of checkpoint '{checkpoint['name']}' of run {old.run_id} is missing.",
            f"There is no folder {folder}.",
            "Take another checkpoint, or an advantage without a critic.",
        )


def critic_folder(run: RunDirectory, step: int) -> Path:
    """Where a run keeps its critic's state of the checkpoint after this step."""
    return run.path / CRITIC / step_name(step)


def check_settings(before: Settings, now: Settings, step: int, *, has_completed: bool) -> None:
    """Refuse settings that do not fit the checkpoint, and a run that has nothing left to do. A run
    with all its steps that was not completed has: its last evaluation and its results.
    """

    def made_with(field: str, old: object, new: object) -> Problem:
        return Problem(
            field=field, got=new, rule=f"the checkpoint was made with {old!r}", suggest=(old,)
        )

    problems: list[Problem] = []
    old, new = before.inference.model, now.inference.model
    folders = [model_folder(model, environ.home() / "models") or model for model in (old, new)]
    if str(folders[0]) != str(folders[1]):
        problems.append(made_with("inference.model", old, new))
    if before.trainer.lora_rank != now.trainer.lora_rank:
        problems.append(
            made_with("trainer.lora_rank", before.trainer.lora_rank, now.trainer.lora_rank)
        )
    use_critics = before.trainer.uses_critic and now.trainer.uses_critic
    if use_critics and critic_place(before.trainer) != critic_place(now.trainer):
        problems.append(made_with("trainer.critic", before.trainer.critic, now.trainer.critic))
    concludes = not has_completed and before.trainer.total_steps == now.trainer.total_steps == step
    if now.trainer.total_steps <= step and not concludes:
        rule = f"the checkpoint is at step {step}: nothing is left to do"
        more = step + before.trainer.total_steps
        problems.append(
            Problem(
                field="trainer.total_steps", got=now.trainer.total_steps, rule=rule, suggest=(more,)
            )
        )
    if problems:
        raise refusal(problems)
