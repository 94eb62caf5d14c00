"""Starting a run.

Owns: everything or nothing: a failed check leaves no directory; the detached supervisor, which holds the run's lock
from before the directory can be seen.
Never: waits for the run to get going; readers of the directory see that.
Promise: one key starts one run, and the policy's cap on runs at once holds, however many processes start at the same
time: from looking at the runs that there are until the new one can be seen, one of them goes on (`preflight`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import yaml

from halteres.config import environ
from halteres.config.policies import Policy, load_policy
from halteres.config.projection import NOTHING_GIVEN, Addresses, Effective, Sources, resolved, to_seed_format, wired
from halteres.config.settings import ENV_WIRING, Settings
from halteres.errors import Conflict, HalteresError, InvalidConfig
from halteres.files import replace_file
from halteres.next_step import NextStep
from halteres.process import detach
from halteres.runs import lock
from halteres.runs.directory import RunDirectory, new_run_id, runs_home
from halteres.runs.starting.preflight import Ground, Plan, admitting, check_concurrency, examine, run_of_key
from halteres.runs.starting.resume import ResumePoint, carry_over
from halteres.runs.starting.reward_models import with_absolute_folders
from halteres.runs.state import RESERVE, RESERVE_BYTES, RunState, write_state

ROLES = ("api", "trainer", "env")


def link_run(run: RunDirectory) -> None:
    """Make the links. What they lead to may not be there yet."""
    home, hermes = environ.home(), environ.hermes_home()
    for folder in (home / "logs", *((hermes / "logs" / "rl_training",) if hermes else ())):
        for role in ROLES:
            _link(folder / f"{role}_{run.run_id}.log", run.log(role))
    _link(home / "configs" / f"run_{run.run_id}.yaml", run.path / "config.yaml")


def _link(link: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # it is there already, or the folder is not ours to write
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


FILE = "config.resolved.json"


def config_text(
    settings: Settings,
    state: RunState,
    path: Path,
    *,
    api_url: str | None = None,
    api_key: str | None = None,
    folder: Path | None = None,
) -> str:
    """config.yaml of a run; before its supervisor has ports, with the default ones.

    Args:
        api_url: of the trajectory server, with its login; None: as the state has it.
        api_key: of the service.
        folder: where the run's files lie, while that is not `path` yet. config.resolved.json is among them.
    """
    config = to_seed_format(settings, _addresses(state, path, api_url, api_key), sources_of(folder or path))
    # Through JSON: an environment's values may be of types that only its own interpreter knows.
    return yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False)


def wiring_of_run(settings: Settings, state: RunState, path: Path) -> Effective:
    """What the run fills in itself, for config.resolved.json: addresses, folders, and what is copied from section to
    section. No key is among it."""
    env = to_seed_format(settings, _addresses(state, path))["env"]
    filled = {f"env.{name}": value for name, value in env.items() if name in ENV_WIRING}
    return wired({**filled, "inference.url": state.urls.get("service")})


def write_resolved(folder: Path, values: Effective) -> None:
    """config.resolved.json: these values laid over what it says already."""
    replace_file(folder / FILE, json.dumps({**_written(folder), **values}, indent=1).encode() + b"\n")


def sources_of(folder: Path) -> Sources:
    """Where the settings of the run in this folder come from."""
    return {key: one["source"] for key, one in _written(folder).items()}


def _written(folder: Path) -> Effective:
    file = folder / FILE
    return json.loads(file.read_bytes()) if file.exists() else {}


def _addresses(state: RunState, path: Path, api_url: str | None = None, api_key: str | None = None) -> Addresses:
    return Addresses(
        run_id=state.run_id,
        run_dir=str(path),
        service_url=state.urls.get("service", "http://127.0.0.1:8001"),
        api_url=api_url or state.urls.get("api", "http://127.0.0.1:8000"),
        tokenizer=state.tokenizer,
        api_key=api_key or "x",
    )


FOLDERS = ("control", "logs", "rollouts", "evals", "api")
SUPERVISOR = (sys.executable, "-m", "halteres.runs.supervision.supervisor")


class StartFailed(HalteresError):
    """The run's directory or its supervisor could not be made."""

    code = "preflight_failed"


class Startable(Protocol):
    """A run about to begin, of whatever kind."""

    @property
    def run_id(self) -> str:
        """Eight hex digits."""
        ...

    @property
    def home(self) -> Path:
        """Of all runs."""
        ...

    @property
    def policy(self) -> Policy:
        """What the operator locks and caps."""
        ...

    @property
    def idempotency_key(self) -> str | None:
        """Of the call that starts it."""
        ...

    def write(self, folder: Path, path: Path) -> None:
        """The run's files, in a folder that will be `path`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One run of reinforcement learning about to begin."""

    plan: Plan
    ground: Ground  # of that plan, as `preflight.examine` found it
    sources: Sources
    run_id: str = field(default_factory=new_run_id)
    idempotency_key: str | None = None

    @property
    def home(self) -> Path:
        """Of all runs."""
        return self.plan.home

    @property
    def policy(self) -> Policy:
        """What the operator locks and caps."""
        return self.plan.policy

    @property
    def resume(self) -> ResumePoint | None:
        """Where it goes on."""
        return self.ground.resume

    @property
    def settings(self) -> Settings:
        """As they will hold: models by names that mean the same from any folder."""
        asked = with_absolute_folders(self.plan.settings)
        if self.plan.service_url or asked.inference.model == self.ground.model.name:
            return asked
        inference = asked.inference.model_copy(update={"model": self.ground.model.name})
        return asked.model_copy(update={"inference": inference})

    def state(self) -> RunState:
        """What run.json says first."""
        environment, url = self.settings.run.environment_name, self.plan.service_url
        return RunState(
            run_id=self.run_id,
            name=self.settings.run.name or self.settings.run.default_name(self.run_id),
            environment=environment,
            environment_file=str(self.ground.environment.path),
            interpreter=self.ground.environment.interpreter,
            working_directory=str(self.ground.environment.working_directory),
            is_foreign=self.ground.environment.is_foreign,
            base_model=self.ground.model.name,
            tokenizer=self.ground.model.tokenizer,
            total_steps=self.settings.trainer.total_steps,
            created_at=time.time(),
            step=self.resume.step if self.resume else 0,
            urls={"service": url} if url else {},
            service_given=url is not None,
            policy=self.plan.policy.name,
            resumed_from=self.resume.run.run_id if self.resume else None,
            resume_point=self.resume.wiring if self.resume else None,
            idempotency_key=self.idempotency_key,
            processes={role: {"pid": None, "exit": None, "state": "not started"} for role in ("api", "trainer", "env")},
        )

    def write(self, folder: Path, path: Path) -> None:
        """The run's files, in a folder that will be `path`."""
        (folder / "settings.json").write_text(self.settings.model_dump_json(indent=1))
        (folder / "policy.json").write_text(self.plan.policy.model_dump_json(indent=1))
        effective = resolved(self.settings, self.sources, is_resumed=self.resume is not None)
        write_resolved(folder, {**effective, **wiring_of_run(self.settings, self.state(), path)})
        (folder / "config.yaml").write_text(config_text(self.settings, self.state(), path, folder=folder))
        for name in ("events.jsonl", "metrics.jsonl", "checkpoints.jsonl", "heartbeat"):
            (folder / name).touch()
        if self.resume:
            carry_over(self.resume, folder, self.state().name)
        (folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))
        write_state(folder / "run.json", self.state())


def start_run(
    settings: Settings,
    *,
    service_url: str | None = None,
    resume: RunDirectory | None = None,
    sources: Sources = NOTHING_GIVEN,
    run_id: str | None = None,
    policy: Policy | None = None,
    idempotency_key: str | None = None,
    supervisor: Sequence[str] = SUPERVISOR,
    warn: Callable[[str], None] = lambda warning: None,
) -> RunDirectory:
    """Start a run under a detached supervisor; returns once its directory exists and the supervisor is started.

    Args:
        settings: from `resolve_settings` or `load_settings`.
        service_url: a training service to use instead of starting one; the run never stops it.
        resume: a run to go on from, at its newest checkpoint; this one is a new run.
        sources: where those settings come from that were given, from `resolve_settings`.
        run_id: eight hex digits; default: a new one.
        policy: what the operator locks and caps; default: the policy file's.
        idempotency_key: a key that a run was started with already answers with that run, whatever else has changed.
        supervisor: command that supervises; the directory and its lock are appended.
        warn: is called with each thing that a run is not refused for.

    Raises:
        InvalidConfig, NotFound, NotReady, Conflict: with what to mend; nothing was written. Where a check failed,
            `checks` in the details tells them all.
    """
    if (first := run_of_key(idempotency_key)) is not None:
        return first
    plan = plan_of(settings, service_url=service_url, resume=resume, policy=policy)
    if run_id is not None:
        _check_id(run_id, plan.home)
    examined = examine(plan)
    start = Start(
        plan=plan,
        ground=examined.demand(),
        sources=sources,
        run_id=run_id or new_run_id(),
        idempotency_key=idempotency_key,
    )
    for warning in examined.warnings:
        warn(warning)
    return begin_run(start, supervisor)


def begin_run(start: Startable, supervisor: Sequence[str] = SUPERVISOR) -> RunDirectory:
    """Start what was examined; the run of its key, where there is one by now.

    Raises:
        PolicyCap, StartFailed, NotReady: nothing was left behind.
    """
    home = start.home
    try:
        with admitting(home):
            if (first := run_of_key(start.idempotency_key)) is not None:
                return first
            check_concurrency(start.policy)
            return _launch(start, home, supervisor)
    except OSError as error:
        raise StartFailed(
            f"The run could not be started in {home}.",
            f"{error.strerror or error}.",
            "Nothing was left behind. Mend it, or set HALTERES_HOME to another folder.",
        ) from error


def plan_of(
    settings: Settings,
    *,
    service_url: str | None = None,
    resume: RunDirectory | None = None,
    policy: Policy | None = None,
) -> Plan:
    """What `start_run` would examine with the same arguments."""
    return Plan(
        settings=settings,
        home=runs_home(),
        policy=policy or load_policy(),
        service_url=service_url.rstrip("/") if service_url else None,
        resume=resume,
    )


def _launch(start: Startable, home: Path, supervisor: Sequence[str]) -> RunDirectory:
    """Make the folder out of sight, lock it, show it, start the supervisor; undo all of it on any failure."""
    beside, path = home / f".new-{start.run_id}", home / start.run_id
    held, shown = None, False
    try:
        for folder in FOLDERS:
            (beside / folder).mkdir(parents=True)
        start.write(beside, path)
        held = lock.take(beside / "lock")
        beside.rename(path)
        shown = True
        _spawn([*supervisor, str(path), "--lock-fd", str(held)], path, held)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        if shown:
            shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        if held is not None:
            os.close(held)
    run = RunDirectory(path)
    link_run(run)
    return run


def _spawn(command: Sequence[str], path: Path, held: int) -> None:
    detach(command, path, path / "logs" / "supervisor.log", environ.for_child(), held)


def _check_id(run_id: str, home: Path) -> None:
    if len(run_id) != 8 or set(run_id) - set("0123456789abcdef"):
        raise InvalidConfig(f"'{run_id}' is no run id.", "Run ids are eight hex digits.", "Leave it out for a new one.")
    if (home / run_id).exists():
        raise Conflict(
            f"There is a run {run_id} already.",
            f"{home / run_id} is one run's directory.",
            NextStep("rl_start_training", {"resume_from": run_id}, "Start another, or go on with it"),
        )
