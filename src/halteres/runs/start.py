"""Starting a run, of RL or of a reward model: everything or nothing. A failed check leaves no
directory.

The detached supervisor holds the run's lock from before the directory can be seen. One key starts
one run, and the policy's cap on runs at once holds, however many processes start at the same time:
a lock admits one after another.

A resumed run is a new run with `resumed_from`; the old one's end stays what it was. Its service
stands on a copy of the old one's state (journal copied, checkpoint files linked: they alone are
never written again), so that the new run lives on when the old one is deleted; a service
elsewhere must be the same. Metrics, evaluations, rollouts and what the environment saved of itself
come along up to the checkpoint. Groups do not: those under way are drawn again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from halteres.clients.critic import STATE as CRITIC_STATE
from halteres.config import environ
from halteres.config.discovery import in_file_name
from halteres.config.file_training import ResolvedFile
from halteres.config.file_training import effective as in_force
from halteres.config.files import (
    Addresses,
    Effective,
    Sources,
    resolved,
    to_seed_format,
)
from halteres.config.operator_policy import Policy
from halteres.config.settings import ENV_WIRING, Settings, default_name
from halteres.engine.folders import copy_linked
from halteres.errors import HalteresError, NotFound
from halteres.files import linked, replace_file, sha256_of
from halteres.logins import without_logins
from halteres.observe.metrics import Row, append_row, read_rows
from halteres.process import detach
from halteres.redaction import without_secrets
from halteres.runs.directory import (
    CONFIG,
    CRITIC,
    QUARANTINE,
    SETTINGS,
    RunDirectory,
    list_runs,
    new_run_id,
    runs_home,
)
from halteres.runs.planning.checks import check_concurrency
from halteres.runs.planning.plan import RunPlan
from halteres.runs.planning.resume_point import ResumePoint, critic_folder
from halteres.runs.planning.reward_plan import RewardPlan
from halteres.runs.state import (
    RESERVE,
    RESERVE_BYTES,
    Kind,
    RunState,
    locked,
    read_state,
    take_lock,
    write_state,
)

ROLES = ("api", "trainer", "env")  # whose logs are linked to where the seeds have them
NOT_STARTED = {"pid": None, "exit": None, "state": "not started"}  # a process of the first state

FOLDERS = ("control", "logs", "rollouts", "evals", "api")
SUPERVISOR = (sys.executable, "-m", "halteres.runs.supervision.supervisor")

LOCK = ".starting"  # the file that is locked while a run is made

ADMITTED_WITHIN_S = 30.0
"""How long a start waits for another one. Making a run takes milliseconds; going on from one with
large checkpoints may take seconds.
"""

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
    filled: dict[str, Any] = {}
    if state.kind == "rl":
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
    if file.exists():
        return json.loads(file.read_bytes())
    return {}


def _addresses(
    state: RunState, path: Path, api_url: str | None = None, api_key: str | None = None
) -> Addresses:
    return Addresses(
        run_id=state.run_id,
        run_dir=str(path),
        service_url=state.urls.get("relay") or state.urls.get("service", "http://127.0.0.1:8001"),
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


Write = Callable[[Path, Path], None]
"""Writes a run's files into the first folder, which is renamed to the second afterwards."""


def start_run(
    plan: RunPlan,
    *,
    run_id: str | None = None,
    idempotency_key: str | None = None,
    supervisor: Sequence[str] = SUPERVISOR,
) -> RunDirectory:
    """Start a run under a detached supervisor; returns once its directory exists and the supervisor
    is started.

    Args:
        plan: from `plan_run`.
        run_id: of the new run; default: one is made.
        idempotency_key: a key that a run was started with already answers with that run, whatever
            else has changed.
        supervisor: command that supervises; the directory and its lock are appended.

    Raises:
        HalteresError: the plan's refusal; nothing was written.
        PolicyCap, StartFailed, NotReady: nothing was left behind.
    """
    first = run_of_key(idempotency_key)
    if first is not None:
        return first
    if plan.refusal is not None:
        raise plan.refusal
    state = _first_state(plan, run_id or new_run_id(), idempotency_key)
    write = partial(_write_files, plan, state)
    return _begin(state, write, plan.policy, supervisor, is_open=plan.is_open)


def _first_state(plan: RunPlan, run_id: str, idempotency_key: str | None) -> RunState:
    """What run.json says first."""
    settings, resume, model = plan.settings, plan.resume, plan.model
    # a check would have failed
    assert model is not None  # noqa: S101 - for the type checker
    trained_on, tokenizer = _trained_on(plan), model.tokenizer
    if plan.training is not None and plan.training.tokenizer is not None:
        tokenizer = plan.training.tokenizer
    urls: dict[str, str] = {}
    if plan.service_url:
        urls["service"] = plan.service_url
    resumed_from, point = None, None
    if resume:
        resumed_from, point = resume.run.run_id, resume.wiring
    return RunState(
        run_id=run_id,
        name=settings.run.name or default_name(trained_on["environment"], run_id),
        **trained_on,
        base_model=model.name,
        tokenizer=tokenizer,
        total_steps=settings.trainer.total_steps,
        created_at=time.time(),
        step=plan.first_step,
        urls=urls,
        service_given=plan.service_url is not None,
        is_relayed=model.is_relayed,
        policy=plan.policy.name,
        resumed_from=resumed_from,
        resume_point=point,
        idempotency_key=idempotency_key,
        processes={role: dict(NOT_STARTED) for role in roles_of_kind(trained_on["kind"])},
    )


def roles_of_kind(kind: Kind) -> tuple[str, ...]:
    """The processes that every run of a kind has, by the names of their logs."""
    if kind == "rl":
        return ROLES
    return ("trainer",)


def _trained_on(plan: RunPlan) -> dict[str, Any]:
    """What run.json says of the environment, or of the file in its place."""
    if plan.training is not None:
        return {
            "kind": plan.training.method,
            "environment": plan.training.label,
            "environment_file": plan.training.data,
            "interpreter": sys.executable,
        }
    environment = plan.environment
    # a check would have failed
    assert environment is not None  # noqa: S101 - for the type checker
    return {
        "kind": "rl",
        "environment": plan.settings.run.environment_name,
        "environment_file": str(environment.path),
        "environment_sha256": sha256_of(environment.path),
        "interpreter": environment.interpreter,
        "working_directory": str(environment.working_directory),
        "is_foreign": environment.is_foreign,
    }


def _write_files(plan: RunPlan, state: RunState, folder: Path, path: Path) -> None:
    """The files of a run of reinforcement learning, or on a file."""
    settings, resume = plan.settings, plan.resume
    if plan.training is None:
        effective = resolved(settings, plan.sources, is_resumed=resume is not None)
    else:
        plan.training.write(folder)
        whole = ResolvedFile(settings=settings, training=plan.training, sources=plan.sources)
        effective = {
            key: {"value": value, "source": source} for key, value, source in in_force(whole)
        }
    write_resolved(folder, settings, state, path, effective)
    config = config_text(settings, state, path, folder=folder)
    replace_file(folder / CONFIG, config.encode(), private=True)
    metrics: list[Row] = []
    if resume:
        carry_over(resume, folder, state.name)
        metrics = resume.metrics()
    write_run(folder, state, settings, plan.policy, metrics)


def _begin(
    state: RunState,
    write: Write,
    policy: Policy,
    supervisor: Sequence[str],
    *,
    is_open: bool = False,
) -> RunDirectory:
    """Make a run and start its supervisor. Returns the run that another process has started with
    the same key meanwhile, if any.

    Args:
        state: the first of the run.
        write: writes its files.
        policy: caps the runs that go on at once.
        supervisor: command that supervises.
        is_open: the run is started without the control server's token.

    Raises:
        PolicyCap, StartFailed, NotReady: nothing was left behind.
    """
    home = runs_home()
    run = RunDirectory(home / state.run_id)
    beside = home / f".new-{state.run_id}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / LOCK, ADMITTED_WITHIN_S, "Another run is just being started."):
            first = run_of_key(state.idempotency_key)
            if first is not None:
                return first
            check_concurrency(policy, is_open=is_open)
            _launch(write, run, beside, supervisor)
    except OSError as error:
        raise StartFailed(
            f"The run could not be started in {home}.",
            f"{error.strerror or error}.",
            "Nothing was left behind. Mend it, or set HALTERES_HOME to another folder.",
        ) from error
    # Links to the run's files where the seeds have them. What they lead to may not be there yet.
    halteres, hermes = environ.home(), environ.hermes_home()
    roles = roles_of_kind(state.kind)
    links = {halteres / "configs" / f"run_{run.run_id}.yaml": run.path / "config.yaml"}
    folders = [halteres / "logs"]
    if hermes is not None:
        folders.append(hermes / "logs" / "rl_training")
    for folder in folders:
        links |= {folder / f"{role}_{run.run_id}.log": run.log(role) for role in roles}
    for link, target in links.items():
        with suppress(OSError):  # it is there already, or the folder is not ours to write
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
    return run


def run_of_key(key: str | None) -> RunDirectory | None:
    """The run that was started with this key; None where there is none, or no key."""
    if not key:
        return None
    for run in list_runs():
        with suppress(NotFound):  # removed while we looked
            if read_state(run.path / "run.json").idempotency_key == key:
                return run
    return None


def _launch(write: Write, run: RunDirectory, beside: Path, supervisor: Sequence[str]) -> None:
    """Make the folder under a hidden name, lock it, rename it, start the supervisor. A failure
    undoes all of it.
    """
    held: int | None = None
    made = beside
    try:
        for folder in FOLDERS:
            (beside / folder).mkdir(parents=True)
        write(beside, run.path)
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
    """Copy what the new run needs of the old one, besides its metrics.

    Args:
        point: the checkpoint that the new run goes on from.
        into: the new run's folder, which is still being made.
        name: of the new run.
    """
    from halteres.service.durable.journal import copy_without_requests

    old = point.run

    def is_done(entry: Path) -> bool:
        digits = re.split("[_-]", entry.stem)[-1]
        return not digits.isdigit() or int(digits) <= point.step

    for row in old.checkpoints():
        if row["step"] <= point.step:
            # the old run's last is not this one's
            append_row(into / "checkpoints.jsonl", {**row, "final": False})
    for entry in filter(is_done, (old.path / "evals").glob("step_*")):
        shutil.copytree(entry, into / "evals" / entry.name, dirs_exist_ok=True)
    for entry in filter(is_done, (old.path / "rollouts").glob("*_*.jsonl")):
        shutil.copy2(entry, into / "rollouts" / entry.name)
    for entry in filter(is_done, (old.path / CRITIC).glob("step-*")):
        copy_linked(entry, into / CRITIC / entry.name)
    if (critic := critic_folder(old, point.step)).is_dir():
        # what the new run's critic begins with
        copy_linked(critic, into / CRITIC / CRITIC_STATE)
    for row in read_rows(old.path / QUARANTINE):
        if row.get("step", 0) <= point.step:
            append_row(into / QUARANTINE, row)
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


def start_reward_training(
    plan: RewardPlan,
    *,
    idempotency_key: str | None = None,
    supervisor: Sequence[str] = SUPERVISOR,
) -> RunDirectory:
    """Start a training of a reward model, as `start_run` does a run of reinforcement learning."""
    run_id = new_run_id()
    resumed_from, newest = None, None
    if plan.resumed:
        resumed_from, newest = plan.resumed.run_id, plan.resumed.newest_checkpoint()
    step, point = 0, None
    if newest is not None:
        step = newest["step"]
        point = {name: newest.get(name) for name in ("name", "step", "state_path")}
    state = RunState(
        kind="reward",
        run_id=run_id,
        name=plan.name or f"{REWARD_MODEL}-{run_id}",
        environment=REWARD_MODEL,
        environment_file=plan.training.plan.data,
        interpreter=sys.executable,
        base_model=plan.base_model,
        tokenizer=plan.training.plan.model,
        total_steps=plan.total_steps,
        created_at=time.time(),
        step=step,
        policy=plan.policy.name,
        resumed_from=resumed_from,
        resume_point=point,
        idempotency_key=idempotency_key,
        processes={"trainer": dict(NOT_STARTED)},
    )
    return _begin(state, partial(_write_training_files, plan, state), plan.policy, supervisor)


def _write_training_files(plan: RewardPlan, state: RunState, folder: Path, path: Path) -> None:
    """The files of a training of a reward model."""
    sections: dict[str, Any] = {
        "run": {},
        "inference": {"model": plan.training.plan.model},
        "trainer": {"total_steps": plan.total_steps},
    }
    if plan.name:
        sections["run"]["name"] = plan.name
    metrics: list[Row] = []
    if plan.resumed:
        metrics = plan.resumed.metrics()
    replace_file(folder / CONFIG, b"env: {}\n", private=True)
    plan.training.write(folder)
    metrics = [row for row in metrics if row.get("step", 0) <= state.step]
    write_run(folder, state, Settings.model_validate(sections), plan.policy, metrics)
