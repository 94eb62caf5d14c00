"""A reward model's folder, looked at without loading it.

Owns: what makes a folder one of a reward model; its size; what halteres_reward.json says of it; what
a server calls its model, and where it answers for it.
Never: imports torch; reads a weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from halteres.errors import InvalidData, NotFound
from halteres.files import NOT_JSON, read_regular
from halteres.models.shape import read_shape, weight_files

Device = Literal["auto", "cpu", "cuda"]
"""Where a reward model computes; `auto`: a GPU where there is one."""

RESULT = "reward_model"
"""Folder in the directory of a run that trains one: the model; checkpoints are in it, as TRL leaves them."""

_NEXT = "Name a folder that `halteres reward train`, TRL's RewardTrainer or save_pretrained has written."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What is known of a reward model before it is loaded."""

    path: Path  # absolute
    num_bytes: int  # of its weights in memory, in fp32; of an adapter, its base's too where that lies on this disk
    base: str | None = None  # of an adapter: the model it was trained on
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # halteres_reward.json; empty for a foreign one


def read_model_folder(folder: str | Path) -> ModelFolder:
    """Look at a folder.

    Raises:
        NotFound: there is none.
        InvalidData: it holds no reward model (a model of one label, or an adapter of one), or one half replaced.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise NotFound(f"There is no reward model in {path}.", "There is no such folder.", _NEXT)
    from halteres.rewards.reward_file import read_reward_file  # numpy with it, which commands need not wait for

    stored = read_reward_file(path)
    facts = {} if stored is None else stored.model_dump(mode="json")
    if (path / "adapter_config.json").exists():
        return _adapter(path, facts)
    config = _object(path / "config.json")
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise _none(path, f"Its config.json names {', '.join(kinds) or 'no architecture'}, not one that classifies.")
    num_outputs, objectives = num_outputs_of(config), facts.get("objective_weights") or {}
    if num_outputs != max(1, len(objectives)):
        raise _none(path, f"It has {num_outputs} outputs; a reward model has one, or one for each of its objectives.")
    return ModelFolder(path=path, num_bytes=_num_bytes(path), facts=facts)


def num_outputs_of(config: Mapping[str, Any]) -> int:
    """Outputs of a classifier, by its config.json."""
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else config.get("num_labels", 2)  # transformers' default


def names_of(folders: Sequence[Path]) -> dict[str, Path]:
    """What the models of these folders are called: by the folder's name, with a number where an earlier one has it."""
    names: dict[str, Path] = {}
    for folder in folders:
        name, number = folder.resolve().name, 2
        while name in names:
            name, number = f"{folder.resolve().name}-{number}", number + 1
        names[name] = folder
    return names


def path_of(name: str) -> str:
    """The path below which this model answers, though a request names none."""
    return f"/models/{quote(name, safe='')}"


def _adapter(path: Path, facts: Mapping[str, Any]) -> ModelFolder:
    config = _object(path / "adapter_config.json")
    if config.get("task_type") != "SEQ_CLS":
        raise _none(path, f"Its adapter is of the task {config.get('task_type')}, not SEQ_CLS.")
    base = str(config.get("base_model_name_or_path") or "")
    there = Path(base).expanduser()
    num_bytes = _num_bytes(path) + (_num_bytes(there) if there.is_dir() else 0)
    return ModelFolder(path=path, num_bytes=num_bytes, base=base or None, facts=facts)


def _num_bytes(path: Path) -> int:
    """Of its parameters in fp32; where they cannot be counted, twice their size on disk, as of half precision."""
    try:
        return 4 * read_shape(path).parameters
    except (OSError, ValueError):
        pass
    try:
        return 2 * sum(file.stat().st_size for file in weight_files(path))
    except (OSError, ValueError) as error:
        raise _none(path, f"{error}.") from error


def _object(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(read_regular(file))
    except FileNotFoundError as error:
        raise _none(file.parent, f"{file.name} is missing.") from error
    except (OSError, *NOT_JSON) as error:
        raise _none(file.parent, f"{file.name} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise _none(file.parent, f"{file.name} holds no JSON object.")
    return content


def _none(path: Path, why: str) -> InvalidData:
    return InvalidData(f"The folder {path} holds no reward model.", why, _NEXT)
