"""Rubrics: criteria that a judge grades by, as data (JSON, TOML, YAML or a mapping).

    criteria:
      - {name: correct, text: "Is the result right?", weight: 2, choices: [wrong, nearly right, right]}

Choices run from worst to best: the first is worth 0, the last 1, the others lie evenly between. Read as well: a bare
list of such criteria and `[[criteria]]` (verifiers 0.4), and Harbor's `[[criterion]]` with `description` and `type`
(binary, likert with `points`, numeric with `min` and `max`).
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from halteres.errors import InvalidConfig
from halteres.rewards.components import RESERVED_PARTS

MOST_CHOICES = 11  # of one criterion: each has a letter of its own, and a likert scale seldom has more

Aspect = Literal["presence", "correctness"]
"""What a criterion looks for: that something is there, or that it is right."""


class Criterion(BaseModel, frozen=True, extra="forbid"):
    """One question about an answer."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    text: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    choices: Annotated[tuple[str, ...], Field(min_length=2, max_length=MOST_CHOICES)] = ("no", "yes")  # worst … best
    aspect: Aspect | None = None

    @field_validator("choices", mode="before")
    @classmethod
    def _are_words(cls, choices: Any) -> Any:
        """YAML takes an unquoted no and yes for truth values."""
        words = {False: "no", True: "yes"}
        return [words.get(one, one) if isinstance(one, bool) else one for one in choices or ()]

    @field_validator("choices")
    @classmethod
    def _are_different(cls, choices: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(choices)) < len(choices):
            raise ValueError("two choices are the same")
        return choices

    @property
    def values(self) -> tuple[float, ...]:
        """What each choice is worth, 0 to 1."""
        return tuple(place / (len(self.choices) - 1) for place in range(len(self.choices)))


class Rubric(BaseModel, frozen=True, extra="forbid"):
    """Criteria that make one score together."""

    criteria: Annotated[tuple[Criterion, ...], Field(min_length=1)]

    @field_validator("criteria")
    @classmethod
    def _have_names_and_weight(cls, criteria: tuple[Criterion, ...]) -> tuple[Criterion, ...]:
        names = [one.name for one in criteria]
        if len(set(names)) < len(names):
            raise ValueError("two criteria have the same name")
        if taken := set(names) & set(get_args(Aspect)):
            raise ValueError(f"'{taken.pop()}' is an aspect, and no name of a criterion")
        if taken := set(names) & set(RESERVED_PARTS):
            raise ValueError(f"'{taken.pop()}' is the name of another metric")
        if not any(one.weight for one in criteria):
            raise ValueError("every criterion has the weight 0")
        return criteria

    @property
    def digest(self) -> str:
        """SHA-256 of its criteria."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def score(self, grades: Mapping[str, float]) -> float:
        """The weighted mean of the criteria's grades, 0 to 1.

        >>> two = ({"name": "a", "text": "?"}, {"name": "b", "text": "?", "weight": 3})
        >>> Rubric.model_validate({"criteria": two}).score({"a": 1.0, "b": 0.0})
        0.25
        """
        whole = math.fsum(one.weight for one in self.criteria)
        return math.fsum(one.weight * grades[one.name] for one in self.criteria) / whole

    def aspects(self, grades: Mapping[str, float]) -> dict[str, float]:
        """The mean grade of the criteria of each aspect, where a criterion names it."""
        named: dict[str, list[float]] = {}
        for one in self.criteria:
            if one.aspect is not None:
                named.setdefault(one.aspect, []).append(grades[one.name])
        return {aspect: math.fsum(found) / len(found) for aspect, found in named.items()}


def read_rubric(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Rubric:
    """The rubric in a file (.json, .toml, .yaml), in a text of JSON or YAML, or in a mapping or list. InvalidConfig
    names the field, where it is unreadable or none."""
    where, criteria = read_data(source, "rubric")
    if isinstance(criteria, Mapping) and "criterion" in criteria:
        criteria = [_from_harbor(one, number) for number, one in enumerate(criteria["criterion"], 1)]
    elif isinstance(criteria, Mapping):
        criteria = criteria.get("criteria")
    try:
        return Rubric.model_validate({"criteria": criteria})
    except ValidationError as error:
        raise InvalidConfig(f"{where} is no rubric.", problems_of(error)) from error


def read_data(source: str | Path | Mapping[str, Any] | Sequence[Any], noun: str) -> tuple[str, Any]:
    """How to call a source in an error, and what is in it: a file, a text of JSON or YAML, or the data themselves.
    InvalidConfig where the source, which should hold this noun, is unreadable."""
    if not isinstance(source, str | Path):
        return "This", source
    try:
        if not isinstance(source, Path) and ("\n" in source or source.lstrip()[:1] in ("{", "[")):
            return "This text", yaml.safe_load(source)
        file = Path(source).expanduser()
        text = file.read_text(encoding="utf-8")
        readers = {".json": json.loads, ".toml": tomllib.loads}
        return str(file), readers.get(file.suffix, yaml.safe_load)(text)
    except OSError as error:
        raise InvalidConfig(f"The {noun} {source} cannot be read.", f"{error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidConfig(f"The {noun} {source} cannot be read.", f"{' '.join(str(error).split())}.") from error


def problems_of(error: ValidationError) -> str:
    """Every field that is wrong, and why."""
    found = error.errors(include_url=False)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found) + "."


def _from_harbor(one: Any, number: int) -> Any:
    if not isinstance(one, Mapping):
        return one
    match one.get("type", "binary"):
        case "binary":
            choices = ["no", "yes"]
        case "likert":
            choices = [str(point) for point in range(1, int(one.get("points", 5)) + 1)]
        case "numeric":
            low, high = float(one.get("min", 0)), float(one.get("max", 10))
            choices = [f"{low + (high - low) * step / 10:g}" for step in range(11)]
        case other:
            raise InvalidConfig(f"Criterion {number} has the type '{other}'.", next="binary, likert or numeric.")
    name = one.get("name") or one.get("id") or f"criterion_{number}"
    return {"name": name, "text": one.get("description"), "weight": one.get("weight", 1.0), "choices": choices}
