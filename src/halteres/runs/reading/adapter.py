"""Which adapter is meant: a run's result, a checkpoint's tinker:// path, a folder.

Owns: where each of them lies on this disk, and which base model belongs to it.
Never: reads weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from halteres.config import environ
from halteres.errors import NotFound
from halteres.runs.directory import RunDirectory, find_run, list_runs
from halteres.service.base import BaseModel, base_model
from halteres.service.checkpoints.paths import folder_of

CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A PEFT folder."""

    folder: Path
    model: str | None  # the base model it was trained on, as it was called there


def adapter_of(named: str, state: Path | None = None) -> Adapter:
    """The adapter that a name means.

    Args:
        named: a tinker:// path, a folder, or a run (id, unique beginning, name).
        state: the state directory that a tinker:// path is looked for in; None: the service's own, and every run's.

    Raises:
        NotFound: there is none.
        InvalidData: a broken tinker:// path.
    """
    if named.startswith("tinker://"):
        return _at(named, [state] if state else _states())
    folder = Path(named).expanduser()
    if (folder / CONFIG).is_file():
        return Adapter(folder, _model_in(folder))
    if folder.is_dir() and not (folder / "run.json").is_file():
        raise NotFound(f"{folder} is no adapter.", f"It lacks {CONFIG}.", "Name a PEFT folder.")
    return _result(RunDirectory(folder) if folder.is_dir() else find_run(named))


def base_of(adapter: Adapter, named: str | None = None) -> BaseModel:
    """The base model that is named, else the one that the adapter was trained on.

    Raises:
        NotFound: it is not on this disk, or nobody says which it is.
    """
    asked = named or adapter.model
    if asked is None:
        raise NotFound(
            f"The adapter in {adapter.folder} does not say which base model it belongs to.",
            f"{CONFIG} has no base_model_name_or_path.",
            "Name it with --model.",
        )
    return base_model(asked)


def _result(run: RunDirectory) -> Adapter:
    folder = run.path / "adapter"
    if not (folder / CONFIG).is_file():
        saved = [row["state_path"] for row in run.checkpoints() if row.get("state_path")]
        raise NotFound(
            f"Run {run.run_id} has no result yet.",
            f"It is {run.state().status}, and its adapter/ is written at the end.",
            f"Name a checkpoint of it: {saved[-1]}" if saved else "It has no checkpoint either.",
        )
    return Adapter(folder, run.settings().inference.model)


def _at(path: str, states: list[Path]) -> Adapter:
    for state in states:
        if (folder := folder_of(state, path)).is_dir():
            return Adapter(folder, _model_in(folder))
    raise NotFound(
        f"There are no weights {path} on this disk.",
        f"Looked in {', '.join(map(str, states[:4]))}{' …' if len(states) > 4 else ''}.",
        "Name the service's state directory with --state.",
    )


def _states() -> list[Path]:
    return [environ.home() / "service", *(run.path / "service" for run in list_runs())]


def _model_in(folder: Path) -> str | None:
    try:
        found = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    name = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    return name if isinstance(name, str) and name else None
