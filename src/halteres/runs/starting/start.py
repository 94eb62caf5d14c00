"""Starting a run, of RL or of a reward model: everything or nothing. A failed check leaves no
directory.

The detached supervisor holds the run's lock from before the directory can be seen. One key starts
one run, and the policy's cap on runs at once holds, however many processes start at the same time:
a lock admits one after another.

A resumed run is a new run with `resumed_from`; the old one's end stays what it was. Its service
stands on a copy of the old one's state (journal copied, checkpoint files linked: they alone are
never written again), so that the new run lives on when the old one is deleted; somebody else's
service must be the same. Metrics, evaluations, rollouts and what the environment saved of itself
come along up to the checkpoint. Groups do not: those under way are drawn again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from halteres.config import environ
from halteres.config.discovery import in_file_name
from halteres.config.operator_policy import Policy, load_policy, over_cap
from halteres.config.problem import Problem, refusal, rule_of
from halteres.config.projection import (
    NOTHING_GIVEN,
    Addresses,
    Effective,
    Sources,
    resolved,
    to_seed_format,
)
from halteres.config.settings import ENV_WIRING, RunSettings, Settings
from halteres.errors import Conflict, HalteresError, InvalidConfig, NotFound
from halteres.files import linked, replace_file
from halteres.logins import without_logins
from halteres.observe.metrics import Row, append_row
from halteres.process import detach
from halteres.redaction import without_secrets
from halteres.rewards.training_plan import Forecast, TrainingPlan, TrainingRun, forecast
from halteres.runs.directory import CONFIG, SETTINGS, RunDirectory, list_runs, new_run_id, runs_home
from halteres.runs.starting import resources
from halteres.runs.starting.preflight import (
    Ground,
    Plan,
    ResumePoint,
    TooLarge,
    check_concurrency,
    check_keys,
    examine,
)
from halteres.runs.starting.run_models import find_folder, with_absolute_folders
from halteres.runs.state import (
    RESERVE,
    RESERVE_BYTES,
    RunState,
    locked,
    read_state,
    take_lock,
    write_state,
)

ROLES = ("api", "trainer", "env")  # whose logs are linked to where the seeds have them

FOLDERS = ("control", "logs", "rollouts", "evals", "api")
SUPERVISOR = (sys.executable, "-m", "halteres.runs.supervision.supervisor")

LOCK, ADMITTED_WITHIN_S = ".starting", 30.0
"""Making a run takes milliseconds; going on from one with large checkpoints may take seconds."""

RESOLVED = "config.resolved.json"

REWARD_MODEL = "reward-model"  # what stands in run.json where runs of RL have their environment


class StartFailed(HalteresError):
    """The run's directory or its supervisor could not be made."""

    code = "preflight_failed"


def config_text(
    settings: Settings,
    state: RunState,
    path: Path,
    *,
    api_url: str | None = None,
    api_key: str | None = None,
    folder: Path | None = None,
) -> str:
    """config.yaml of a run; before its supervisor has ports, with the default ones. `api_url` has a
    login; `folder` is where the run's files lie, while that is not `path` yet.
    """
    config = to_seed_format(
        settings, _addresses(state, path, api_url, api_key), sources_of(folder or path)
    )
    # Through JSON: an environment's values may be of types that only its own interpreter knows.
    return yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False)


def write_resolved(
    folder: Path, settings: Settings, state: RunState, path: Path, values: Effective
) -> None:
    """config.resolved.json of the run that is, or will be, at `path`: these values laid over what
    it says already, and what the run fills in itself: addresses, folders, what is copied from
    section to section. No key is among it.
    """
    env = to_seed_format(settings, _addresses(state, path))["env"]
    filled = {f"env.{name}": value for name, value in env.items() if name in ENV_WIRING}
    filled["inference.url"] = state.urls.get("service")
    wired: Effective = {
        name: {"value": value, "source": "wiring"} for name, value in filled.items()
    }
    whole = {**_resolved(folder), **values, **wired}
    shown = without_secrets({name: one["value"] for name, one in whole.items()})
    rows = {name: {**one, "value": shown[name]} for name, one in whole.items()}
    replace_file(folder / RESOLVED, json.dumps(rows, indent=1).encode() + b"\n")


def sources_of(folder: Path) -> Sources:
    """Where the settings of the run in this folder come from."""
    return {key: one["source"] for key, one in _resolved(folder).items()}


def _resolved(folder: Path) -> Effective:
    file = folder / RESOLVED
    return json.loads(file.read_bytes()) if file.exists() else {}


def _addresses(
    state: RunState, path: Path, api_url: str | None = None, api_key: str | None = None
) -> Addresses:
    return Addresses(
        run_id=state.run_id,
        run_dir=str(path),
        service_url=state.urls.get("service", "http://127.0.0.1:8001"),
        api_url=api_url or state.urls.get("api", "http://127.0.0.1:8000"),
        tokenizer=state.tokenizer,
        api_key=api_key or "x",
    )


def write_run(
    folder: Path, state: RunState, settings: Settings, policy: Policy, metrics: Iterable[Row] = ()
) -> None:
    """The files that every run begins with; `metrics`: rows of the run that this one goes on from.

    Whoever may see a run may read them: what is secret in its settings stands in config.yaml alone.
    """
    shown = without_secrets(settings.model_dump(mode="json"))
    (folder / SETTINGS).write_text(json.dumps(shown, indent=1), encoding="utf-8")
    (folder / "policy.json").write_text(
        without_logins(policy.model_dump_json(indent=1)), encoding="utf-8"
    )
    for name in ("events.jsonl", "metrics.jsonl", "checkpoints.jsonl", "heartbeat"):
        (folder / name).touch()
    for row in metrics:
        append_row(folder / "metrics.jsonl", row)
    (folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))
    write_state(folder / "run.json", state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Startable:
    """A run about to begin, of whatever kind."""

    run_id: str = field(default_factory=new_run_id)
    policy: Policy = field(default_factory=load_policy)  # what the operator locks and caps
    idempotency_key: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is started without the control server's token."""
        return False

    def write(self, folder: Path, path: Path) -> None:
        """The run's files, in a folder that will be `path`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Startable):
    """One run of reinforcement learning about to begin."""

    plan: Plan
    ground: Ground  # of that plan, as `preflight.examine` found it
    sources: Sources

    @property
    def is_open(self) -> bool:
        """Whether it is started without the control server's token."""
        return self.plan.is_open

    @property
    def settings(self) -> Settings:
        """As they will hold: models by names that mean the same from any folder."""
        settings, model = with_absolute_folders(self.plan.settings), self.ground.model.name
        if self.plan.service_url or settings.inference.model == model:
            return settings
        return settings.model_copy(
            update={"inference": settings.inference.model_copy(update={"model": model})}
        )

    def state(self) -> RunState:
        """What run.json says first."""
        settings, environment, url = self.settings, self.ground.environment, self.plan.service_url
        resume = self.ground.resume
        return RunState(
            run_id=self.run_id,
            name=settings.run.name or settings.run.default_name(self.run_id),
            environment=settings.run.environment_name,
            environment_file=str(environment.path),
            interpreter=environment.interpreter,
            working_directory=str(environment.working_directory),
            is_foreign=environment.is_foreign,
            base_model=self.ground.model.name,
            tokenizer=self.ground.model.tokenizer,
            total_steps=settings.trainer.total_steps,
            created_at=time.time(),
            step=resume.step if resume else 0,
            urls={"service": url} if url else {},
            service_given=url is not None,
            policy=self.plan.policy.name,
            resumed_from=resume.run.run_id if resume else None,
            resume_point=resume.wiring if resume else None,
            idempotency_key=self.idempotency_key,
            processes={role: {"pid": None, "exit": None, "state": "not started"} for role in ROLES},
        )

    def write(self, folder: Path, path: Path) -> None:
        """The run's files, in a folder that will be `path`."""
        settings, state, resume = self.settings, self.state(), self.ground.resume
        write_resolved(
            folder,
            settings,
            state,
            path,
            resolved(settings, self.sources, is_resumed=resume is not None),
        )
        replace_file(
            folder / CONFIG,
            config_text(settings, state, path, folder=folder).encode(),
            private=True,
        )
        if resume:
            carry_over(resume, folder, state.name)
        write_run(folder, state, settings, self.plan.policy, resume.metrics() if resume else ())


def plan_of(
    settings: Settings,
    *,
    service_url: str | None = None,
    resume: RunDirectory | None = None,
    policy: Policy | None = None,
    is_open: bool = False,
) -> Plan:
    """What `start_run` would examine with the same arguments; `is_open`: it is started without the
    control server's token.
    """
    url = service_url.rstrip("/") if service_url else None
    return Plan(
        settings=settings,
        policy=policy or load_policy(),
        service_url=url,
        resume=resume,
        is_open=is_open,
    )


def start_run(
    settings: Settings,
    *,
    service_url: str | None = None,
    resume: RunDirectory | None = None,
    sources: Sources = NOTHING_GIVEN,
    policy: Policy | None = None,
    idempotency_key: str | None = None,
    supervisor: Sequence[str] = SUPERVISOR,
    warn: Callable[[str], None] = lambda warning: None,
) -> RunDirectory:
    """Start a run under a detached supervisor; returns once its directory exists and the supervisor
    is started.

    Args:
        settings, sources: from `resolve_settings`.
        service_url: a training service to use instead of starting one; the run never stops it.
        resume: a run to go on from, at its newest checkpoint; this one is a new run.
        policy: what the operator locks and caps; default: the policy file's.
        idempotency_key: a key that a run was started with already answers with that run, whatever
            else has changed.
        supervisor: command that supervises; the directory and its lock are appended.
        warn: is called with each thing that a run is not refused for.

    Raises:
        InvalidConfig, NotFound, NotReady, Conflict: nothing was written; `checks` in the details
            tells every finding.
    """
    if (first := run_of_key(idempotency_key)) is not None:
        return first
    plan = plan_of(settings, service_url=service_url, resume=resume, policy=policy)
    examined = examine(plan)
    ground = examined.demand()
    start = Start(
        plan=plan,
        ground=ground,
        sources=sources,
        policy=plan.policy,
        idempotency_key=idempotency_key,
    )
    for warning in examined.warnings:
        warn(warning)
    return begin_run(start, supervisor)


def begin_run(start: Startable, supervisor: Sequence[str] = SUPERVISOR) -> RunDirectory:
    """Start what was examined; the run of its key, where there is one by now. PolicyCap,
    StartFailed, NotReady: nothing was left behind.
    """
    home = runs_home()
    run, beside = RunDirectory(home / start.run_id), home / f".new-{start.run_id}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / LOCK, ADMITTED_WITHIN_S, "Another run is just being started."):
            if (first := run_of_key(start.idempotency_key)) is not None:
                return first
            check_concurrency(start.policy, is_open=start.is_open)
            _launch(start, run, beside, supervisor)
    except OSError as error:
        raise StartFailed(
            f"The run could not be started in {home}.",
            f"{error.strerror or error}.",
            "Nothing was left behind. Mend it, or set HALTERES_HOME to another folder.",
        ) from error
    # Links to the run's files where the seeds have them. What they lead to may not be there yet.
    halteres, hermes = environ.home(), environ.hermes_home()
    links = {halteres / "configs" / f"run_{run.run_id}.yaml": run.path / "config.yaml"}
    for folder in (halteres / "logs", *((hermes / "logs" / "rl_training",) if hermes else ())):
        links |= {folder / f"{role}_{run.run_id}.log": run.log(role) for role in ROLES}
    for link, target in links.items():
        with suppress(OSError):  # it is there already, or the folder is not ours to write
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
    return run


def run_of_key(key: str | None) -> RunDirectory | None:
    """The run that was started with this key; None where there is none, or no key."""
    for run in list_runs() if key else ():
        with suppress(NotFound):  # removed while we looked
            if read_state(run.path / "run.json").idempotency_key == key:
                return run
    return None


def _launch(start: Startable, run: RunDirectory, beside: Path, supervisor: Sequence[str]) -> None:
    """Make the folder out of sight, lock it, show it, start the supervisor; undo all of it on any
    failure.
    """
    held, made = None, beside
    try:
        for folder in FOLDERS:
            (beside / folder).mkdir(parents=True)
        start.write(beside, run.path)
        held = take_lock(beside / "lock")
        made = beside.rename(run.path)
        command = [*supervisor, str(run.path), "--lock-fd", str(held)]
        detach(command, run.path, run.log("supervisor"), environ.for_child(), held)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    finally:
        if held is not None:
            os.close(held)


def carry_over(point: ResumePoint, into: Path, name: str) -> None:
    """Copy what the new run of this name needs beside its metrics, into its folder that is still
    being made.
    """
    from halteres.service.durable.journal import copy_without_requests

    old = point.run

    def is_done(entry: Path) -> bool:
        digits = entry.stem[len("step_") :]
        return (int(digits) if digits.isdigit() else 0) <= point.step

    for row in old.checkpoints():
        if row["step"] <= point.step:
            # the old run's last is not this one's
            append_row(into / "checkpoints.jsonl", {**row, "final": False})
    for entry in filter(is_done, (old.path / "evals").glob("step_*")):
        shutil.copytree(entry, into / "evals" / entry.name, dirs_exist_ok=True)
    for entry in filter(is_done, (old.path / "rollouts").glob("step_*.jsonl")):
        shutil.copy2(entry, into / "rollouts" / entry.name)
    # What an environment saves of itself lies under the name of its run.
    saved = into / "env_checkpoints" / in_file_name(name)
    before = old.path / "env_checkpoints" / in_file_name(old.state().name)
    for entry in filter(is_done, before.glob("step-*.json")):
        saved.mkdir(parents=True, exist_ok=True)
        shutil.copy2(entry, saved)
    source, target = old.path / "service", into / "service"
    # checkpoints and journal, and nothing else: what the new service appends to is its own
    if source.is_dir():
        target.mkdir(exist_ok=True)
        if (source / "checkpoints").is_dir():
            shutil.copytree(
                source / "checkpoints",
                target / "checkpoints",
                copy_function=linked,
                dirs_exist_ok=True,
            )
        copy_without_requests(source, target)


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
        replace_file(folder / CONFIG, b"env: {}\n", private=True)
        self.training.write(folder)
        metrics = [row for row in metrics if row.get("step", 0) <= state.step]
        write_run(folder, state, Settings.model_validate(sections), self.policy, metrics)

    def state(self) -> RunState:
        """What run.json says first."""
        newest = self.resumed.newest_checkpoint() if self.resumed else None
        return RunState(
            kind="reward",
            run_id=self.run_id,
            name=self.name or f"{REWARD_MODEL}-{self.run_id}",
            environment=REWARD_MODEL,
            environment_file=self.training.plan.data,
            interpreter=sys.executable,
            base_model=self.base_model,
            tokenizer=self.training.plan.model,
            total_steps=self.total_steps,
            created_at=time.time(),
            step=newest["step"] if newest else 0,
            policy=self.policy.name,
            resumed_from=self.resumed.run_id if self.resumed else None,
            resume_point={name: newest.get(name) for name in ("name", "step", "state_path")}
            if newest
            else None,
            idempotency_key=self.idempotency_key,
            processes={"trainer": {"pid": None, "exit": None, "state": "not started"}},
        )


def plan_reward_training(
    plan: TrainingPlan, *, name: str | None = None, idempotency_key: str | None = None
) -> RewardStart:
    """Check everything that can be checked without loading the model.

    Raises:
        NotFound: there is no such model or file.
        InvalidConfig, InvalidData: a setting is wrong; rows cannot be used, the message tells them
            by number.
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
        name=_checked_name(name),
        idempotency_key=idempotency_key,
    )


def plan_resumed_training(
    run: RunDirectory, *, name: str | None = None, idempotency_key: str | None = None
) -> RewardStart:
    """Go on from the newest checkpoint of a reward training, with its settings, as a new run.
    Conflict: it goes on yet, is complete, or has no checkpoint; else as `plan_reward_training`.
    """
    state, newest = run.state(), run.newest_checkpoint()
    if not state.terminal:
        raise Conflict(
            f"Run {run.run_id} has not ended.", f"It is {state.status}.", "Stop it first."
        )
    if newest is None or newest.get("final"):
        why = "It is complete." if newest else "It has no checkpoint."
        raise Conflict(f"Run {run.run_id} cannot be resumed.", why, "Start a new one.")
    plan = TrainingRun.read(run.path).plan
    return RewardStart(
        training=TrainingRun(plan=plan, resume_from=str(newest["state_path"])),
        forecast=_checked(forecast(plan, Path(plan.model))),
        base_model=state.base_model,
        name=_checked_name(name),
        resumed=run,
        idempotency_key=idempotency_key,
    )


def _checked_name(name: str | None) -> str | None:
    try:
        return RunSettings(name=name).name
    except ValidationError as error:
        raise refusal([Problem(field="name", got=name, rule=rule_of(error.errors()[0]))]) from error


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
            f"Too little memory: about {needed_gb:.1f} GB are needed, {free / 1e9:.1f} GB are "
            "free.",
            "Weights, gradients and two moments of each are held at once.",
            "Train an adapter (lora), lower max_tokens_per_forward, or take a smaller model.",
            need_gb=needed_gb,
            free_gb=resources.gb(free),
        )
    return forecast
