"""A reward model's training as it is asked for: which model, which data, which settings; and what it will take.

Owns: the form of a config file, which rows are trained on and which are held out, whether they fit model and settings,
the forecast of a dry run.
Never: loads weights, needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import BaseModel, Field, ValidationError

from halteres.errors import InvalidConfig, InvalidData, nearest
from halteres.models.shape import ModelShape, read_shape
from halteres.rewards.preferences import (
    Comparison,
    MarginFrom,
    OnIdentical,
    Preferences,
    hold_out,
    overlap,
    read_preferences,
)
from halteres.rewards.reward_file import read_reward_file
from halteres.rewards.template import Rendered, ScoringTemplate, template_for
from halteres.rewards.training_config import RewardConfig, TiePolicy, settled_weights
from halteres.text import Tokenizer

ADAM_BYTES, FROZEN_BYTES = 16, 4
"""Of memory for one parameter in fp32: weight, gradient and two moments; a weight alone."""

PROCESS_BYTES = 500_000_000
"""What torch and transformers take before any weight."""


class TrainingPlan(BaseModel, frozen=True, extra="forbid"):
    """What is trained, on what, how."""

    model: str  # name or folder of a base model
    data: str  # whatever `read_preferences` reads
    eval_data: str | None = None
    hold_out: Annotated[float, Field(gt=0, lt=1)] | None = None  # share of the prompts, where there is no eval_data
    on_identical: OnIdentical = "error"
    margin_from: MarginFrom | None = None
    settings: RewardConfig = RewardConfig()

    def preferences(self) -> tuple[Preferences, Preferences | None, tuple[str, ...]]:
        """The rows to train on, the held-out ones, and what is odd about them.

        Raises:
            InvalidData, NotFound, InvalidConfig: rows that cannot be used or read.
        """
        train = read_preferences(self.data, on_identical=self.on_identical, margin_from=self.margin_from)
        if self.eval_data is not None:
            held_out = read_preferences(self.eval_data, on_identical=self.on_identical, margin_from=self.margin_from)
        elif self.hold_out is not None:
            train, held_out = hold_out(train, self.hold_out)
        else:
            return train, None, train.warnings
        shared = overlap(train, held_out)
        return train, held_out, (*train.warnings, *held_out.warnings, *([shared] if shared else []))


def read_plan(file: Path | None, given: Mapping[str, Any]) -> TrainingPlan:
    """A plan from a YAML file, whose fields are those of the plan and of `RewardConfig` side by side, and from fields
    that go before the file's.

    Raises:
        InvalidConfig: no such file, no YAML, an unknown field, a value of the wrong type.
    """
    fields = {**(_read_yaml(file) if file is not None else {}), **given}
    own = {name: fields.pop(name) for name in TrainingPlan.model_fields if name in fields and name != "settings"}
    for name in ("model", "data"):
        if name not in own:
            raise InvalidConfig(f"'{name}' is missing.", next=f"Give --{name}, or `{name}:` in a config file.")
    try:
        return TrainingPlan(**own, settings=RewardConfig(**fields))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidConfig(f"'{name}' is {first['input']!r}.", f"{first['msg']}.", field=name) from error


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Fields given as NAME=VALUE, values in YAML; `lora.r=8` sets a field of a field.

    >>> parse_settings(["learning_rate=0.001", "lora.r=8"])
    {'learning_rate': 0.001, 'lora': {'r': 8}}
    """
    found: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidConfig(f"'{assignment}' is no setting.", next="Write --set NAME=VALUE.")
        *sections, last = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = yaml.safe_load(value)
    return found


def taught_rows(preferences: Preferences, tie_policy: TiePolicy) -> list[Comparison]:
    """The rows that there is something to learn from: not those of weight 0, nor ties alone where ties are dropped.

    Raises:
        InvalidData: there is none.
    """
    weighing = [one for one in preferences.comparisons if one.weight > 0]
    found = [one for one in weighing if tie_policy != "drop" or one.labels or len(set(one.ranks)) > 1]
    if not found:
        num_idle = len(preferences.comparisons) - len(weighing)
        raise InvalidData(
            f"No row of {preferences.source} teaches anything.",
            f"{num_idle} have the weight 0, {len(weighing)} are ties, which tie_policy 'drop' leaves out.",
            "Give rows a weight above 0, or take another tie_policy.",
        )
    return found


def objective_weights(
    settings: RewardConfig, own: Mapping[str, float] | None, train: Preferences, held_out: Preferences | None
) -> dict[str, float]:
    """Of each objective what it counts in the score; empty: there is one output, without a name.

    Args:
        settings: may give weights.
        own: those of the reward model that training goes on from, which keeps its objectives; None: a base model.
        train: rows that may name objectives.
        held_out: likewise.

    Raises:
        InvalidConfig: weights that do not fit the objectives.
        InvalidData: a row names an objective that the model has no output for.
    """
    weights = settled_weights(settings.objective_weights or own, train.objectives if own is None else tuple(own))
    parts = (train, held_out) if held_out is not None else (train,)
    for one, source in [(one, rows.source) for rows in parts for one in rows.comparisons]:
        if one.objective is not None and one.objective not in weights:
            guess = nearest(one.objective, weights)
            raise InvalidData(
                f"Row {one.row} of {source} has the objective '{one.objective}', which the model has not.",
                f"It has {', '.join(weights) or 'none'}.",
                f"Did you mean '{guess}'?" if guess else "",
            )
    return weights


def check_inputs(settings: RewardConfig, train: Preferences, held_out: Preferences | None) -> None:
    """See that the rows have what the settings work on.

    Raises:
        InvalidConfig: a setting that could have no effect on these rows.
    """
    if settings.eval_strategy != "no" and held_out is None:
        raise InvalidConfig(
            f"eval_strategy is '{settings.eval_strategy}', and there is nothing to evaluate on.",
            "No held-out rows are given.",
            "Give eval_data (or hold_out), or leave eval_strategy out.",
            field="eval_strategy",
        )
    if settings.tie_policy == "rao_kupper" and not any(_holds_tie(one) for one in train.comparisons):
        raise InvalidConfig(
            "tie_policy 'rao_kupper' learns from ties when a lead is one.",
            f"{train.source} holds no tie.",
            "Leave tie_policy out.",
            field="tie_policy",
        )
    if settings.center_rewards_coefficient and all(one.labels for one in train.comparisons):
        raise InvalidConfig(
            "center_rewards_coefficient is for ranked completions.",
            f"{train.source} holds steps with labels.",
            "Leave it out.",
            field="center_rewards_coefficient",
        )


def _holds_tie(comparison: Comparison) -> bool:
    return not comparison.labels and len(set(comparison.ranks)) < len(comparison.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a training will take, from data and shape alone."""

    num_parameters: int | None  # None: no model of a family whose shape is known
    learning_rate: float | None
    batch_size: int | None  # rows
    num_rows: int
    num_held_out: int
    total_steps: int | None
    lengths: Mapping[str, int]  # tokens of a row's longer side: quantiles
    rows_too_long: int  # than max_length
    tokens_lost: int
    memory_gb: float | None  # about
    warnings: tuple[str, ...]


def forecast(plan: TrainingPlan, folder: Path) -> Forecast:
    """Read and check the data, render every text, work out steps and memory; no weight is loaded.

    Args:
        folder: of the base model.

    Raises:
        HalteresError: whatever the training would be refused for before its first step.
    """
    train, held_out, warnings = plan.preferences()
    shape = _shape(folder)
    settings = plan.settings if shape is None else plan.settings.settled(shape.parameters)
    stored = read_reward_file(folder)
    objective_weights(settings, stored.objective_weights if stored is not None else None, train, held_out)
    check_inputs(settings, train, held_out)
    template = template_for(
        Tokenizer(folder), eos_token=settings.eos_token, max_length=settings.max_length, truncation=settings.truncation
    )
    tokenizer = Tokenizer(folder)
    taught = taught_rows(train, settings.tie_policy)
    rendered, lengths, too_long = _rendered(train.source, taught, template, tokenizer)
    if held_out is not None:
        _rendered(held_out.source, taught_rows(held_out, settings.tie_policy), template, tokenizer)
    if idle := len(train.comparisons) - len(taught):
        warnings = (*warnings, f"{train.source} holds rows that teach nothing, ties alone or of weight 0: {idle}.")
    batch = settings.per_device_train_batch_size
    num_rows = len(rendered)
    per_epoch = math.ceil(num_rows / (batch * settings.gradient_accumulation_steps)) if batch else None
    steps = settings.max_steps if settings.max_steps > 0 else None
    if steps is None and per_epoch is not None:
        steps = math.ceil(settings.num_train_epochs * per_epoch)
    return Forecast(
        num_parameters=shape.parameters if shape else None,
        learning_rate=settings.learning_rate,
        batch_size=batch,
        num_rows=num_rows,
        num_held_out=len(held_out.comparisons) if held_out else 0,
        total_steps=steps,
        lengths={f"{q:g}": round(float(np.quantile(lengths, q))) for q in (0.05, 0.5, 0.95, 1)},
        rows_too_long=len(too_long),
        tokens_lost=sum(text.num_lost for texts in rendered for text in texts),
        memory_gb=round(_memory(shape, settings, rendered) / 1e9, 2) if shape else None,
        warnings=warnings,
    )


def _memory(shape: ModelShape, settings: RewardConfig, rendered: Sequence[Sequence[Rendered]]) -> float:
    """Bytes: weights with what trains them, and what a micro-batch keeps for its backward pass."""
    longest = max(len(text.tokens) for texts in rendered for text in texts)
    texts_per_batch = max(map(len, rendered)) * (settings.per_device_train_batch_size or 1)
    tokens = max(longest, min(settings.max_tokens_per_forward, longest * texts_per_batch))
    layer = 8 * shape.width + 3 * shape.feed + 2 * shape.qkv + 2 * shape.heads * longest  # numbers of one token
    kept = 4 * tokens * layer * (1 if settings.gradient_checkpointing else shape.layers)
    weights = shape.parameters * (FROZEN_BYTES if settings.lora is not None else ADAM_BYTES)
    if settings.lora is not None:
        weights += ADAM_BYTES * shape.layers * settings.lora.r * (6 * shape.width + 3 * shape.feed + shape.qkv)
    return weights + kept + PROCESS_BYTES


def _rendered(
    source: str, rows: Sequence[Comparison], template: ScoringTemplate, tokenizer: Tokenizer
) -> tuple[list[tuple[Rendered, ...]], list[int], list[int]]:
    """The texts of the rows that are used, every row's length, and the numbers of those that are too long.

    Raises:
        InvalidData: a row is too long where that is an error; no row is left.
    """
    whole = [template.render_comparison(tokenizer, one) for one in rows]
    lengths = [max(len(text.tokens) + template.num_removed(text) for text in texts) for texts in whole]
    is_cut = [any(text.num_lost for text in texts) for texts in whole]
    too_long = [one.row for one, cut in zip(rows, is_cut, strict=True) if cut]
    if too_long and template.truncation == "error":
        raise template.too_long(source, too_long, lengths)
    used = [texts for texts, cut in zip(whole, is_cut, strict=True) if not (cut and template.truncation == "drop")]
    if not used:
        raise template.none_left(source, lengths)
    return used, lengths, too_long


def _shape(folder: Path) -> ModelShape | None:
    try:
        return read_shape(folder)
    except (OSError, ValueError):  # a file is missing or incomplete, or it is of an unknown family
        return None


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"Config file {file} cannot be read.", f"{error.strerror}.", "Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"Config file {file} is not YAML.", " ".join(str(error).split())) from error
    if not isinstance(found, Mapping):
        raise InvalidConfig(f"Config file {file} holds no fields.", next="Start with `model:` and `data:`.")
    return {str(name): value for name, value in found.items()}
