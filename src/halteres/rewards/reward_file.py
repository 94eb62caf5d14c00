"""`halteres_reward.json`: what a reward model's folder says beside its weights.

Owns: the file's fields; reading and writing it.
Never: reads weights; needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from halteres.errors import InvalidData
from halteres.files import replace_file
from halteres.rewards.calibration import Calibration
from halteres.rewards.template import ScoringTemplate
from halteres.scores import REWARD_FILE

SAVING = "saving"
"""Folder in a model's folder that is being replaced: the new files, whole, until the last is in its place."""


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


def read_reward_file(folder: Path) -> RewardFile | None:
    """What the folder says; None where it says nothing: a model of somebody else's.

    Raises:
        InvalidData: the file is damaged or of a later version; its calibration was made with another template; the
            folder is half replaced.
    """
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
