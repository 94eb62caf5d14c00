"""Which weights a name means: a run's result, a checkpoint's tinker:// path, a folder; and how vLLM
serves them.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.config import environ
from halteres.errors import NotFound
from halteres.files import NOT_JSON, read_regular
from halteres.next_step import NextStep
from halteres.runs.directory import RunDirectory, RunNotFound, find_run, list_runs, runs_home
from halteres.service.base import BaseModel, base_model
from halteres.service.checkpoint_folders import folder_of

CONFIG = "adapter_config.json"

VLLM_DEFAULT_RANK = 16
VLLM_RANKS = (32, 64, 128, 256, 320, 512)
"""The largest adapter that vLLM (0.11 to 0.32) has room for unless it is told, and what else it can
be told.
"""

NO_RUN = (
    "A run's own service samples them: give the run's id, a tinker:// path of "
    "rl_get_results, or its adapter/."
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A PEFT folder."""

    folder: Path
    model: str | None  # the base model it was trained on, as it was called there
    run: RunDirectory | None = None  # that trained it, where it was one of ours
    step: int | None = None  # optimiser steps it has had; None: those of the whole run


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWeights:
    """Weights that the service of a run can sample from."""

    run: RunDirectory
    path: str  # tinker://
    step: int | None = None  # optimiser steps they have had; None: not known


def weights_of(name: str) -> PolicyWeights:
    """The weights that a name means: of a run (id, unique beginning, name) the newest; a tinker://
    path of a run; the adapter folder of a run, or the run's own folder. NotFound: there are none,
    or they are no run's; InvalidData: a broken tinker:// path.
    """
    if name.startswith("tinker://"):
        for run in list_runs():
            for row in run.checkpoints():
                if name in (row.get("sampler_path"), row.get("state_path")):
                    return PolicyWeights(run=run, path=name, step=row["step"])
            if folder_of(run.path / "service", name).is_dir():
                return PolicyWeights(run=run, path=name)
        raise NotFound(f"No run has weights {name}.", NO_RUN, NextStep("rl_list_runs"))
    folder = Path(name).expanduser()
    if run := _run_of(name, folder):
        return newest_weights(run)
    path = (folder.parent if (folder / CONFIG).is_file() else folder).resolve()
    if path.parent != runs_home().resolve() or not (path / "run.json").is_file():
        raise NotFound(f"{folder} belongs to no run.", NO_RUN, NextStep("rl_list_runs"))
    return newest_weights(find_run(path.name))


def _run_of(name: str, folder: Path) -> RunDirectory | None:
    """The run of this name; None where it means a folder: one that holds an adapter, whose name is
    a path, or that no run is called after. RunNotFound: it is neither.
    """
    if folder.is_dir() and ("/" in name or (folder / CONFIG).is_file()):
        return None
    try:
        return find_run(name)
    except RunNotFound:
        if folder.is_dir():
            return None
        raise


def newest_policy(run: RunDirectory) -> str:
    """The tinker:// path of the newest sampler weights of a run. NotFound: it has none."""
    return newest_weights(run).path


def newest_weights(run: RunDirectory) -> PolicyWeights:
    """The newest weights of a run. NotFound: it has none."""
    rows = [row for row in run.checkpoints() if row.get("sampler_path")]
    if not rows:
        raise NotFound(
            f"Run {run.run_id} has no weights to sample from.",
            f"It is {run.state().status} and has written no checkpoint.",
            NextStep("rl_check_status", {"run_id": run.run_id}, "Look at it with"),
        )
    return PolicyWeights(run=run, path=rows[-1]["sampler_path"], step=rows[-1]["step"])


def adapter_of(name: str, state: Path | None = None) -> Adapter:
    """The adapter that a tinker:// path, a folder, or a run (id, unique beginning, name) means.

    `state`: the state directory that a tinker:// path is looked for in; None: the service's own,
    and every run's. NotFound: there is none. InvalidData: a broken tinker:// path.
    """
    if name.startswith("tinker://"):
        if state:
            states = [state]
        else:
            states = [environ.home() / "service", *(run.path / "service" for run in list_runs())]
        for one in states:
            if (folder := folder_of(one, name)).is_dir():
                return _checkpoint(one, name, folder)
        raise NotFound(
            f"There are no weights {name} on this disk.",
            f"Looked in {', '.join(map(str, states[:4]))}{' …' if len(states) > 4 else ''}.",
            "Name the service's state directory with --state.",
        )
    folder = Path(name).expanduser()
    if (folder / CONFIG).is_file():
        return Adapter(folder, _model_in(folder))
    run = _run_of(name, folder) or RunDirectory(folder)
    if not (run.path / "run.json").is_file():
        raise NotFound(f"{folder} is no adapter.", f"It lacks {CONFIG}.", "Name a PEFT folder.")
    result = run.path / "adapter"
    if not (result / CONFIG).is_file():
        saved = [row["state_path"] for row in run.checkpoints() if row.get("state_path")]
        raise NotFound(
            f"Run {run.run_id} has no result yet.",
            f"It is {run.state().status}, and its adapter/ is written at the end.",
            f"Name a checkpoint of it: {saved[-1]}" if saved else "It has no checkpoint either.",
        )
    return Adapter(result, run.settings().inference.model, run)


def _checkpoint(state: Path, name: str, folder: Path) -> Adapter:
    """The weights of a tinker:// path; of a run's own service, with that run and their step."""
    run = RunDirectory(state.parent)
    if not (run.path / "run.json").is_file():
        return Adapter(folder, _model_in(folder))
    for row in run.checkpoints():
        if name in (row.get("sampler_path"), row.get("state_path")):
            return Adapter(folder, _model_in(folder), run, row["step"])
    return Adapter(folder, _model_in(folder), run)


def base_of(adapter: Adapter, name: str | None = None) -> BaseModel:
    """The base model of this name, else the one that the adapter was trained on. NotFound: it is
    not on this disk, or it is not known which it is.
    """
    model = name or adapter.model
    if model is None:
        what = f"The adapter in {adapter.folder} does not say which base model it belongs to."
        raise NotFound(what, f"{CONFIG} has no base_model_name_or_path.", "Name it with --model.")
    return base_model(model)


def vllm_command(base: str | Path, folder: Path, name: str, *, shown: str = "") -> str:
    """The line for a shell with which vLLM serves the adapter in `folder` as `name`. `base` is a
    folder: vLLM looks for a name on the hub. `shown`: what stands for the folder, where the line
    is for another machine.
    """
    words = [
        "vllm",
        "serve",
        str(base),
        "--enable-lora",
        "--lora-modules",
        f"{name}={shown or folder.absolute()}",
    ]
    rank = _config_in(folder).get("r")
    if isinstance(rank, int) and rank > VLLM_DEFAULT_RANK:
        words += ["--max-lora-rank", str(next((room for room in VLLM_RANKS if room >= rank), rank))]
    return shlex.join(words)


def _model_in(folder: Path) -> str | None:
    name = _config_in(folder).get("base_model_name_or_path")
    if isinstance(name, str) and name:
        return name
    return None


def _config_in(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / CONFIG))
    except (OSError, *NOT_JSON):
        return {}
    if isinstance(found, dict):
        return found
    return {}
