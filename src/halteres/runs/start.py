"""Starting a run.

Owns: everything or nothing: a failed check leaves no directory; the detached supervisor, which holds the run's lock
from before the directory can be seen.
Never: waits for the run to get going; readers of the directory see that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from halteres.config import environ
from halteres.config.projection import ENV_WIRING, Addresses, to_seed_format
from halteres.config.settings import Settings
from halteres.config.sources import NOTHING_GIVEN, Effective, Sources, resolved, wired
from halteres.errors import Conflict, HalteresError, InvalidConfig
from halteres.files import replace_file
from halteres.runs import lock
from halteres.runs.directory import RunDirectory, new_run_id, runs_home
from halteres.runs.preflight import Ground, check
from halteres.runs.resume import ResumePoint, carry_over, resume_point
from halteres.runs.state import RESERVE, RESERVE_BYTES, RunState, write_state

FOLDERS = ("control", "logs", "rollouts", "evals", "api")
SUPERVISOR = (sys.executable, "-m", "halteres.runs.supervisor")


class StartFailed(HalteresError):
    """The run's directory or its supervisor could not be made."""

    code = "preflight_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """One run about to begin."""

    run_id: str
    settings: Settings
    ground: Ground
    service_url: str | None
    resume: ResumePoint | None
    sources: Sources

    def state(self) -> RunState:
        environment = self.settings.run.environment_name
        return RunState(
            run_id=self.run_id,
            name=self.settings.run.name or f"{environment}-{self.run_id}",
            environment=environment,
            environment_file=str(self.ground.environment.path),
            interpreter=self.ground.environment.interpreter,
            base_model=self.ground.base_model,
            tokenizer=self.ground.tokenizer,
            total_steps=self.settings.trainer.total_steps,
            created_at=time.time(),
            step=self.resume.step if self.resume else 0,
            urls={"service": self.service_url} if self.service_url else {},
            service_given=self.service_url is not None,
            resumed_from=self.resume.run.run_id if self.resume else None,
            resume_point=self.resume.wiring if self.resume else None,
            processes={role: {"pid": None, "exit": None, "state": "not started"} for role in ("api", "trainer", "env")},
        )


def start_run(
    settings: Settings,
    *,
    service_url: str | None = None,
    resume: RunDirectory | None = None,
    sources: Sources = NOTHING_GIVEN,
    run_id: str | None = None,
    supervisor: Sequence[str] = SUPERVISOR,
) -> RunDirectory:
    """Start a run under a detached supervisor; returns once its directory exists and the supervisor is started.

    Args:
        settings: from `resolve_settings` or `load_settings`.
        service_url: a training service to use instead of starting one; the run never stops it.
        resume: a run to go on from, at its newest checkpoint; this one is a new run.
        sources: where those settings come from that were given, from `resolve_settings`.
        run_id: eight hex digits; default: a new one.
        supervisor: command that supervises; the directory and its lock are appended.

    Raises:
        InvalidConfig, NotFound, NotReady, Conflict: with what to mend; nothing was written.
    """
    service_url = service_url.rstrip("/") if service_url else None
    home = runs_home()
    if run_id is not None:
        _check_id(run_id, home)
    point = resume_point(resume, settings, service_url) if resume else None
    start = _Start(
        run_id=run_id or new_run_id(),
        settings=settings,
        ground=check(settings, home, service_url),
        service_url=service_url,
        resume=point,
        sources=sources,
    )
    try:
        return _launch(start, home, supervisor)
    except OSError as error:
        raise StartFailed(
            f"The run could not be started in {home}.",
            f"{error.strerror or error}.",
            "Nothing was left behind. Mend it, or set HALTERES_HOME to another folder.",
        ) from error


def _launch(start: _Start, home: Path, supervisor: Sequence[str]) -> RunDirectory:
    """Make the folder out of sight, lock it, show it, start the supervisor; undo all of it on any failure."""
    beside, path = home / f".new-{start.run_id}", home / start.run_id
    held, shown = None, False
    try:
        for folder in FOLDERS:
            (beside / folder).mkdir(parents=True)
        _write(start, beside, path)
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
    return RunDirectory(path)


def _write(start: _Start, folder: Path, path: Path) -> None:
    (folder / "settings.json").write_text(start.settings.model_dump_json(indent=1))
    (folder / "config.yaml").write_text(config_text(start.settings, start.state(), path))
    effective = resolved(start.settings, start.sources, is_resumed=start.resume is not None)
    write_resolved(folder, {**effective, **wiring_of_run(start.settings, start.state(), path)})
    for name in ("events.jsonl", "metrics.jsonl", "checkpoints.jsonl", "heartbeat"):
        (folder / name).touch()
    if start.resume:
        carry_over(start.resume, folder)
    (folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))
    write_state(folder / "run.json", start.state())


def config_text(settings: Settings, state: RunState, path: Path, api_key: str | None = None) -> str:
    """config.yaml of a run; before its supervisor has ports, with the default ones."""
    config = to_seed_format(settings, _addresses(state, path, api_key))
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
    file = folder / "config.resolved.json"
    before = json.loads(file.read_bytes()) if file.exists() else {}
    replace_file(file, json.dumps({**before, **values}, indent=1).encode() + b"\n")


def _addresses(state: RunState, path: Path, api_key: str | None = None) -> Addresses:
    return Addresses(
        run_id=state.run_id,
        run_dir=str(path),
        service_url=state.urls.get("service", "http://127.0.0.1:8001"),
        api_url=state.urls.get("api", "http://127.0.0.1:8000"),
        tokenizer=state.tokenizer,
        api_key=api_key or "x",
    )


def _spawn(command: Sequence[str], path: Path, held: int) -> None:
    with (path / "logs" / "supervisor.log").open("ab") as log:
        child = subprocess.Popen(
            command,
            cwd=path,
            env=environ.for_child(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(held,),
        )
    threading.Thread(target=child.wait, name=f"reaper of {path.name}", daemon=True).start()


def _check_id(run_id: str, home: Path) -> None:
    if len(run_id) != 8 or set(run_id) - set("0123456789abcdef"):
        raise InvalidConfig(f"'{run_id}' is no run id.", "Run ids are eight hex digits.", "Leave it out for a new one.")
    if (home / run_id).exists():
        raise Conflict(
            f"There is a run {run_id} already.",
            f"{home / run_id} is one run's directory.",
            f"Start another, or go on with it: halteres train --resume {run_id}",
        )
