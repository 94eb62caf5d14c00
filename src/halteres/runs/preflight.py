"""What must be true before a run begins.

Owns: the checks, each with a sentence: environment, model, service, disk.
Never: writes anything.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.clients import plain
from halteres.config import environ
from halteres.config.problem import Problem, refusal
from halteres.config.program import EnvironmentProgram, describe, find_program
from halteres.config.settings import Settings
from halteres.errors import NotFound, NotReady
from halteres.models import builtin_path
from halteres.runs.failures import DiskFull

FREE_BYTES = 256 * 1024 * 1024
"""What a run needs at least: logs, journal and checkpoints of the built-in model take about a tenth of it."""

SERVICE_ANSWERS_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a run stands on, found and checked."""

    environment: EnvironmentProgram
    base_model: str  # as the service names it
    tokenizer: str  # folder of the base model, or its name where only the service has it


def check(settings: Settings, home: Path, service_url: str | None) -> Ground:
    """Everything, cheapest first. Raises the first HalteresError."""
    environ.check()
    _check_disk(home)
    base_model, tokenizer = _given_model(settings, service_url) if service_url else _own_model(settings)
    environment = find_program(settings.run.environment, settings.run.interpreter)
    told = describe(environment, settings.env)
    if told.problems:
        raise refusal(told.problems)
    return Ground(environment=environment, base_model=base_model, tokenizer=tokenizer)


def _check_disk(home: Path) -> None:
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < FREE_BYTES:
        raise DiskFull(
            f"Too little room in {home}.",
            f"{free / 1e6:.0f} MB are free; a run needs {FREE_BYTES / 1e6:.0f} MB.",
            "Make room, or set HALTERES_HOME to another disk.",
        )


def _own_model(settings: Settings) -> tuple[str, str]:
    """For a service of our own: the model must lie on this disk."""
    model = settings.inference.model
    builtin = builtin_path(model)
    folder = builtin or Path(model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        why = f"{folder} has no config.json." if folder.is_dir() else f"There is no folder {folder}."
        raise NotFound(
            f"Model '{model}' is not there.",
            why,
            "Set inference.model to 'halteres/tiny' or to a folder that `transformers` can load.",
            field="inference.model",
        )
    return model if builtin else str(folder), str(folder)


def _given_model(settings: Settings, service_url: str) -> tuple[str, str]:
    """For somebody else's service: it must answer, and have this model."""
    model = settings.inference.model
    _ask(f"{service_url}/api/v1/healthz", service_url)
    info = _ask(f"{service_url}/halteres/v1/info", service_url, optional=True)
    told = info.get("model") or {}
    name, folder = told.get("name"), told.get("folder")
    if name is None:  # a Tinker service that is not ours: it will say itself whether it knows the model
        return model, str(builtin_path(model) or model)
    wanted = {model, str(builtin_path(model) or Path(model).expanduser().absolute())}
    if not wanted & {name, folder}:
        rule = f"the service at {service_url} serves '{name}'"
        raise refusal([Problem(field="inference.model", got=model, rule=rule, suggest=(name,))])
    return name, folder if folder and Path(folder).is_dir() else str(builtin_path(model) or model)


def _ask(url: str, service_url: str, *, optional: bool = False) -> dict[str, Any]:
    """GET JSON. With `optional`, a service without this route answers {}."""
    try:
        return plain.get_json(url, SERVICE_ANSWERS_WITHIN_S)
    except plain.Refused as error:
        if optional and error.answered == 404:
            return {}
        raise NotReady(
            f"The training service at {service_url} is not ready.", f"It answered {error.answered}.", "Try again soon."
        ) from error
    except NotReady as error:
        raise NotReady(
            f"No training service answers at {service_url}.",
            error.why,
            "Check the address, or leave it out: the run then starts a service of its own.",
        ) from error
