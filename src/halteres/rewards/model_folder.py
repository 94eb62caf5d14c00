"""A reward model's folder, looked at without loading it: what makes a folder one of a reward model, and
`halteres_reward.json`, which says how texts are shown to the model and how its scores are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from halteres.errors import InvalidData, NotFound
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.models.shape import read_shape, weight_files
from halteres.rewards.tokenization import ScoringTemplate
from halteres.scores import REWARD_FILE, Output

Device = Literal["auto", "cpu", "cuda"]
"""Where a reward model computes; `auto`: a GPU where there is one."""

Side = Literal["chosen", "both"]
"""Whose mean score an offset is."""

RESULT = "reward_model"
"""Folder in the directory of a run that trains one: the model; checkpoints are in it, as TRL leaves them."""

SAVING = "saving"
"""Folder in a model's folder that is being replaced: the new files, whole, until the last is in its place."""

_NEXT = "Name a folder that `halteres reward train`, TRL's RewardTrainer or save_pretrained has written."


class Calibration(BaseModel, frozen=True, extra="forbid"):
    """What raw scores mean, measured on held-out pairs; stored with the model, of whose template it is."""

    temperature: float = 1.0  # raw score units: P(a preferred to b) = s((a - b) / temperature)
    offset: float = 0.0  # raw score that is 0 when standardised
    scale: float = 1.0  # raw score units in one standardised
    offset_from: Side = "chosen"  # whose mean the offset is
    num_pairs: int = 0
    data_digest: str = ""  # SHA-256 of the pairs' data
    template_digest: str = ""  # of the scoring template under which they were scored; empty: not known
    calibration_error: tuple[float, float] = (0.0, 0.0)  # before (temperature 1) and after
    brier_score: tuple[float, float] = (0.0, 0.0)
    quantiles: dict[str, float] = {}  # of raw scores, both sides: "0.05" and so on
    warnings: tuple[str, ...] = ()

    def apply(self, raw: float, output: Output) -> float:
        """A raw score in other units; order is kept.

        >>> Calibration(temperature=2.0, offset=1.0, scale=4.0).apply(3.0, "standardised")
        0.5
        """
        match output:
            case "raw":
                return raw
            case "standardised":
                return (raw - self.offset) / self.scale
            case "probability":  # the sigmoid, without overflow
                return 0.5 * (1 + math.tanh((raw - self.offset) / (2 * self.temperature)))

    def covers(self, raw: float) -> bool:
        """Whether a raw score lies between the lowest and the highest that this was made from.

        >>> Calibration(quantiles={"0.0": -1.0, "1.0": 2.0}).covers(2.5)
        False
        """
        return self.quantiles.get("0.0", -math.inf) <= raw <= self.quantiles.get("1.0", math.inf)

    def check_template(self, digest: str) -> None:
        """InvalidData if the calibration was made with another scoring template, or another rule for the end token."""
        if self.template_digest and self.template_digest != digest:
            raise InvalidData(
                "The calibration was made with another scoring template.",
                f"It is of {self.template_digest[:12]}, the model's is {digest[:12]}: scores under the two differ.",
                "Calibrate again: halteres reward calibrate MODEL HELD_OUT",
            )


class Probe(BaseModel, frozen=True, extra="forbid"):
    """A text with the tokens and the raw score that it had when the model was saved."""

    text: dict[str, Any] | None  # the fields of a `Scorable`; None where the data were tokens
    tokens: list[int]
    score: float


class RewardFile(BaseModel, frozen=True, extra="forbid"):
    """How texts are shown to the model, how its scores are read, and where it comes from."""

    version: int = 1
    template: ScoringTemplate
    probes: list[Probe] = []
    calibration: Calibration | None = None
    objective_weights: dict[str, float] = {}  # of each output, in order; empty: there is one, without a name
    tie_threshold: float | None = None  # learned with `tie_policy: rao_kupper`
    settings: dict[str, Any] = {}  # of the training
    data: dict[str, Any] = {}  # where the preferences came from, rows, rows cut and dropped
    metrics: dict[str, float] = {}  # of the last evaluation, else of the last steps
    versions: dict[str, str] = {}  # of the libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What is known of a reward model before it is loaded."""

    path: Path  # absolute
    num_bytes: int  # of its weights in memory, in fp32; of an adapter, its base's too where that lies on this disk
    base: str | None = None  # of an adapter: the model it was trained on
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # halteres_reward.json; empty for a foreign one


def read_reward_file(folder: Path) -> RewardFile | None:
    """What the folder says; None of a model of somebody else's. InvalidData where the file is damaged or of a later
    version, its calibration was made with another template, or the folder is half replaced."""
    if (folder / SAVING).is_dir():
        raise InvalidData(
            f"The reward model in {folder} is half replaced.",
            f"Whoever saved it was killed, or is at it: {SAVING} holds new files.",
            f"Save it again, or move the files of {SAVING} up and remove it.",
        )
    file = folder / REWARD_FILE
    if not file.is_file():
        return None
    try:
        content = RewardFile.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidData(
            f"{file} cannot be read.", f"{'.'.join(map(str, first['loc']))}: {first['msg']}.", "Save the model again."
        ) from error
    if content.calibration is not None:
        content.calibration.check_template(content.template.digest)
    return content


def write_reward_file(folder: Path, content: RewardFile) -> None:
    """Replace the file whole."""
    replace_file(folder / REWARD_FILE, content.model_dump_json(indent=1).encode() + b"\n")


def read_model_folder(folder: str | Path) -> ModelFolder:
    """Look at a folder.

    Raises:
        NotFound: there is none.
        InvalidData: it holds no reward model (a model of one label, or an adapter of one), or one half replaced.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise NotFound(f"There is no reward model in {path}.", "There is no such folder.", _NEXT)
    stored = read_reward_file(path)
    facts = {} if stored is None else stored.model_dump(mode="json")
    if (path / "adapter_config.json").exists():
        config = _json_object(path / "adapter_config.json")
        if config.get("task_type") != "SEQ_CLS":
            raise _no_model(path, f"Its adapter is of the task {config.get('task_type')}, not SEQ_CLS.")
        base = str(config.get("base_model_name_or_path") or "")
        there = Path(base).expanduser()
        num_bytes = _num_bytes(path) + (_num_bytes(there) if there.is_dir() else 0)
        return ModelFolder(path=path, num_bytes=num_bytes, base=base or None, facts=facts)
    config = _json_object(path / "config.json")
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        why = f"Its config.json names {', '.join(kinds) or 'no architecture'}, not one that classifies."
        raise _no_model(path, why)
    num_outputs, objectives = num_outputs_of(config), facts.get("objective_weights") or {}
    if num_outputs != max(1, len(objectives)):
        why = f"It has {num_outputs} outputs; a reward model has one, or one for each of its objectives."
        raise _no_model(path, why)
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
    """The path below which a server answers for this model, though a request names none."""
    return f"/models/{quote(name, safe='')}"


def _num_bytes(path: Path) -> int:
    """Of its parameters in fp32; where they cannot be counted, twice their size on disk, as of half precision."""
    try:
        return 4 * read_shape(path).parameters
    except (OSError, ValueError):
        pass
    try:
        return 2 * sum(file.stat().st_size for file in weight_files(path))
    except (OSError, ValueError) as error:
        raise _no_model(path, f"{error}.") from error


def _json_object(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(read_regular(file))
    except FileNotFoundError as error:
        raise _no_model(file.parent, f"{file.name} is missing.") from error
    except (OSError, *NOT_JSON) as error:
        raise _no_model(file.parent, f"{file.name} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise _no_model(file.parent, f"{file.name} holds no JSON object.")
    return content


def _no_model(path: Path, why: str) -> InvalidData:
    return InvalidData(f"The folder {path} holds no reward model.", why, _NEXT)
