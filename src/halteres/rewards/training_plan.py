"""A reward model's training as it is asked for: which model, which data, which settings. What it
will take is forecast in `forecast`.

The settings have TRL's and transformers' names; a preset by the model's size fills in what is not
given. Nothing here loads weights or needs torch.

Sources: TRL 1.16 `RewardConfig`, transformers 5.23 `TrainingArguments`, PEFT 0.21 `LoraConfig`; the
presets are those of the reward-modelling seed. Different on purpose: no bf16 and no gradient
checkpointing unless asked for, batches by length, the learning rate of the preset, texts that are
too long are cut instead of dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from halteres.config.edits import Schema, read_edit, schema_at
from halteres.config.problem import Problem
from halteres.documents import DocumentError, half_characters
from halteres.errors import InvalidConfig, InvalidData, nearest, unknown
from halteres.files import UnreadableFile, read_json, replace_file
from halteres.rewards.components import problems_of, read_data
from halteres.rewards.model_folder import (
    RESULT,
    Rendered,
    ScoringTemplate,
    Truncation,
)
from halteres.rewards.preferences import (
    IDENTICAL,
    MOST_ROWS,
    Comparison,
    MarginFrom,
    OnIdentical,
    Preferences,
    hold_out,
    overlap,
    prefers_to_itself,
    read_preferences,
    row_numbers,
    tied_ranks,
)
from halteres.tokenizer import Tokenizer

TiePolicy = Literal["soft", "rao_kupper", "drop"]
When = Literal["no", "steps", "epoch"]

# in the directory of a run that trains a reward model: what it was asked for
RUN_FILE = "reward_training.json"
LORA_LEARNING_RATE = 1e-4
# Settings of TRL's that change no number: accepted, so that a config written for it is read.
_IGNORED = frozenset(
    {"report_to", "dataset_num_proc", "remove_unused_columns", "activation_offloading", "use_cpu"}
)


@dataclass(frozen=True, slots=True)
class Preset:
    """What a model of this size is trained with where nothing else is asked for."""

    name: str
    below: float  # parameters
    learning_rate: float  # of full fine-tuning
    batch_size: int  # rows


TINY_PRESET = Preset("tiny", 10_000_000, 1e-3, 8)  # the built-in model's size
_PRESETS = (
    TINY_PRESET,
    Preset("below 1B", 1_000_000_000, 2e-5, 8),
    Preset("1B to 7B", 7_000_000_000, 1e-5, 4),
    Preset("7B and above", math.inf, 5e-6, 2),
)


def preset_for(num_parameters: int) -> Preset:
    """The preset of a model with so many parameters."""
    return next(preset for preset in _PRESETS if num_parameters < preset.below)


class LoraSettings(BaseModel, frozen=True, extra="forbid"):
    """A low-rank adapter, by PEFT's names. The head is always trained whole beside it."""

    r: Annotated[int, Field(ge=1, description="rank")] = 16
    lora_alpha: Annotated[float, Field(gt=0)] = 32
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class RewardConfig(BaseModel, frozen=True, extra="forbid"):
    """How a reward model is trained. An unknown name is an error that offers the nearest."""

    output_dir: str = "reward-model"
    preset: Literal["auto", "off"] = "auto"

    learning_rate: Annotated[float, Field(gt=0)] | None = None  # None: of the preset
    # rows; None: of the preset
    per_device_train_batch_size: Annotated[int, Field(ge=1)] | None = None
    per_device_eval_batch_size: Annotated[int, Field(ge=1)] = 8
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    num_train_epochs: Annotated[float, Field(gt=0)] = 1.0
    max_steps: int = -1  # of the optimiser; above 0 it goes before the epochs
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_steps: Annotated[float, Field(ge=0)] = 0  # below 1: a share of all steps
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0  # 0: gradients are not clipped
    seed: int = 42

    center_rewards_coefficient: Annotated[float, Field(ge=0)] | None = None
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    tie_policy: TiePolicy = "soft"
    # of rows with more than two completions
    listwise_loss: Literal["pairs", "plackett_luce"] = "pairs"
    # of each objective in the score; None: equal shares of 1
    objective_weights: dict[str, FiniteFloat] | None = None

    max_length: Annotated[int, Field(ge=2)] | None = 1024
    truncation: Truncation = "keep_end"
    eos_token: str | None = None
    chat_template_path: str | None = None
    pad_to_multiple_of: Annotated[int, Field(ge=1)] | None = None
    train_sampling_strategy: Literal["group_by_length", "random"] = "group_by_length"
    max_tokens_per_forward: Annotated[int, Field(ge=16)] = 8192
    share_prefixes: bool = True

    lora: LoraSettings | None = None
    model_init_kwargs: dict[str, Any] = {}
    trust_remote_code: bool = False
    disable_dropout: bool = True
    bf16: bool = False
    gradient_checkpointing: bool = False

    logging_steps: Annotated[int, Field(ge=1)] = 10
    eval_strategy: When = "no"
    eval_steps: Annotated[int, Field(ge=1)] | None = None  # None: logging_steps
    save_strategy: When = "steps"
    save_steps: Annotated[int, Field(ge=1)] = 500
    save_total_limit: Annotated[int, Field(ge=1)] | None = None
    disable_tqdm: bool = False  # no progress is shown

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _refusal(error) from error

    @model_validator(mode="before")
    @classmethod
    def _with_known_names(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping):
            return settings
        given = {name: value for name, value in settings.items() if name not in _IGNORED}
        if given.get("pad_to_multiple_of") == "auto":
            given["pad_to_multiple_of"] = None
        if "warmup_ratio" in given:  # until transformers 5
            given["warmup_steps"] = given.pop("warmup_ratio")
        for name in ("eval_strategy", "save_strategy"):
            if given.get(name) is False:  # what YAML takes an unquoted no for
                given[name] = "no"
        for name in given:
            if name not in cls.model_fields:
                raise unknown(InvalidConfig, "setting", str(name), cls.model_fields)
        return given

    def settled(self, num_parameters: int) -> RewardConfig:
        """With nothing left open: the preset fills in what was not given. InvalidConfig where it is
        off.
        """
        preset = preset_for(num_parameters)
        rate = LORA_LEARNING_RATE
        if not (self.lora is not None and preset is not TINY_PRESET):
            rate = preset.learning_rate
        own = {"learning_rate": rate, "per_device_train_batch_size": preset.batch_size}
        missing = {name: value for name, value in own.items() if getattr(self, name) is None}
        if missing and self.preset == "off":
            raise InvalidConfig(
                f"The setting '{next(iter(missing))}' is missing.", "The preset is off."
            )
        return self.model_copy(update=missing)


class TrainingPlan(BaseModel, frozen=True, extra="forbid"):
    """What is trained, on what, how."""

    model: str  # name or folder of a base model
    data: str  # whatever `read_preferences` reads
    eval_data: str | None = None
    # share of the prompts, where there is no eval_data
    hold_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    on_identical: OnIdentical = "error"
    margin_from: MarginFrom | None = None
    settings: RewardConfig = RewardConfig()

    def preferences(self) -> tuple[Preferences, Preferences | None, tuple[str, ...]]:
        """The rows to train on, the held-out ones, and what is odd about them. Raises as
        `read_preferences`.
        """
        how: dict[str, Any] = {"on_identical": self.on_identical, "margin_from": self.margin_from}
        train = read_preferences(self.data, **how)
        if self.eval_data is not None:
            held_out = read_preferences(self.eval_data, **how)
        elif self.hold_out is not None:
            train, held_out = hold_out(train, self.hold_out)
        else:
            return train, None, train.warnings
        shared = overlap(train, held_out)
        return train, held_out, (*train.warnings, *held_out.warnings, *([shared] if shared else []))


class TrainingRun(BaseModel, frozen=True, extra="forbid"):
    """What a run that trains a reward model is asked for: reward_training.json in its directory."""

    plan: TrainingPlan
    resume_from: str | None = None  # a checkpoint's folder

    @classmethod
    def read(cls, run: Path) -> Self:
        """Of the run in this directory. InvalidData where it cannot be read."""
        try:
            return cls.model_validate(read_json(run / RUN_FILE, dict[str, Any]))
        except (UnreadableFile, ValidationError) as error:
            raise InvalidData(f"{run / RUN_FILE} cannot be read.", f"{error}.") from error

    def write(self, run: Path) -> None:
        """Into this directory; only what was given, so that what was not stays open."""
        replace_file(
            run / RUN_FILE, self.model_dump_json(indent=1, exclude_unset=True).encode() + b"\n"
        )

    def settings(self, run: Path) -> RewardConfig:
        """The settings in the run of this directory: every step is a row of its metrics, unless
        asked for otherwise.
        """
        given = self.plan.settings.model_fields_set
        own: dict[str, Any] = {"output_dir": str(run / RESULT), "disable_tqdm": True}
        if "logging_steps" not in given:
            own["logging_steps"] = 1
        if "eval_strategy" not in given and (
            self.plan.eval_data is not None or self.plan.hold_out is not None
        ):
            own["eval_strategy"] = "epoch"
        return self.plan.settings.model_copy(update=own)


def read_plan(file: Path | None, given: Mapping[str, Any]) -> TrainingPlan:
    """A plan from a YAML file, whose fields are those of the plan and of `RewardConfig` side by
    side, and from fields that go before the file's; InvalidConfig names the field that is wrong.
    """
    content = {}
    if file is not None:
        content = read_data(file, "config file")[1]
    if not isinstance(content, Mapping):
        raise InvalidConfig(
            f"Config file {file} holds no fields.", next="Start with `model:` and `data:`."
        )
    fields: dict[str, Any] = {**{str(name): value for name, value in content.items()}, **given}
    own = {
        name: fields.pop(name)
        for name in TrainingPlan.model_fields
        if name in fields and name != "settings"
    }
    for name in ("model", "data"):
        if name not in own:
            raise InvalidConfig(
                f"'{name}' is missing.", next=f"Give --{name}, or `{name}:` in a config file."
            )
    try:
        return TrainingPlan(**own, settings=RewardConfig(**fields))
    except ValidationError as error:
        raise _refusal(error) from error


def parse_settings(assignments: Sequence[str], schema: Schema | None = None) -> dict[str, Any]:
    """Fields given as NAME=VALUE, the values read by the fields' types; `lora.r=8` sets a field of
    a field.

    Args:
        schema: JSON Schema of an object with these fields; default: those of a plan and of
            `RewardConfig`.

    >>> parse_settings(["learning_rate=1e-3", "lora.r=8", "eos_token=#"])
    {'learning_rate': 0.001, 'lora': {'r': 8}, 'eos_token': '#'}
    """
    if schema is None:
        schema = _schema()
    found: dict[str, Any] = {}
    for assignment in assignments:
        edit = read_edit(assignment)
        if isinstance(edit, Problem):
            raise InvalidConfig(f"'{assignment}' is no setting.", next="Write --set NAME=VALUE.")
        *sections, last = names = edit.name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise InvalidConfig(
                    f"'{section}' is given as a whole and by its fields.",
                    next="Give one of the two.",
                )
        if (halves := half_characters(assignment)) is not None:
            raise InvalidConfig(f"The value of '{edit.name}' cannot be used.", f"{halves}.")
        try:
            place[last] = schema_at(schema, names).value_of(edit.value)
        except DocumentError as error:
            raise InvalidConfig(
                f"The value of '{edit.name}' cannot be used.", f"{error}."
            ) from error
    return found


@cache
def _schema() -> dict[str, Any]:
    plan, settings = TrainingPlan.model_json_schema(), RewardConfig.model_json_schema()
    return {**plan, "properties": {**plan["properties"], **settings["properties"]}}


def objective_weights(
    settings: RewardConfig,
    own: Mapping[str, float] | None,
    train: Preferences,
    held_out: Preferences | None,
) -> dict[str, float]:
    """Of each objective what it counts in the score; empty: there is one output, without a name.

    `own`: the weights of the reward model that training goes on from, which keeps its objectives;
    None: a base model. InvalidConfig for weights, InvalidData for a row that do not fit the
    objectives.
    """
    weights = settled_weights(
        settings.objective_weights or own, train.objectives if own is None else tuple(own)
    )
    if held_out is not None:
        parts = (train, held_out)
    else:
        parts = (train,)
    for one, source in [(one, rows.source) for rows in parts for one in rows.comparisons]:
        if one.objective is not None and one.objective not in weights:
            what = (
                f"Row {one.row} of {source} has the objective '{one.objective}', which the "
                "model has not."
            )
            guess = nearest(one.objective, weights)
            fix = ""
            if guess:
                fix = f"Did you mean '{guess}'?"
            raise InvalidData(what, f"It has {', '.join(weights) or 'none'}.", fix)
    return weights


def settled_weights(
    given: Mapping[str, float] | None, objectives: Sequence[str]
) -> dict[str, float]:
    """Of each objective what it counts in the score, in order: as given (else InvalidConfig), or
    equal shares of 1.
    """
    if not given:
        return {name: 1 / len(objectives) for name in objectives}
    for name in given:
        if name not in objectives:
            raise unknown(InvalidConfig, "objective", name, objectives)
    missing = [name for name in objectives if name not in given]
    if missing:
        fix = "Give it a weight; 0 leaves it out of the score."
        raise InvalidConfig(f"objective_weights has none for '{missing[0]}'.", next=fix)
    if not any(given.values()):
        why = "Every text would have the score 0."
        raise InvalidConfig(
            "Every weight of objective_weights is 0.", why, "Give one of them a weight."
        )
    return {name: given[name] for name in objectives}


def check_inputs(settings: RewardConfig, train: Preferences, held_out: Preferences | None) -> None:
    """Refuse a setting that could have no effect on these rows, with InvalidConfig."""
    if settings.eval_strategy != "no" and held_out is None:
        what = f"eval_strategy is '{settings.eval_strategy}', and there is nothing to evaluate on."
        raise InvalidConfig(
            what, next="Give eval_data (or hold_out), or leave it out.", field="eval_strategy"
        )
    has_ties = any(
        not one.labels and len(set(one.ranks)) < len(one.ranks) for one in train.comparisons
    )
    if settings.tie_policy == "rao_kupper" and not has_ties:
        what, why = (
            "tie_policy 'rao_kupper' learns from ties when a lead is one.",
            f"{train.source} holds no tie.",
        )
        raise InvalidConfig(what, why, "Leave tie_policy out.", field="tie_policy")
    if settings.center_rewards_coefficient and all(one.labels for one in train.comparisons):
        field, why = "center_rewards_coefficient", f"{train.source} holds steps with labels."
        raise InvalidConfig(
            f"{field} is for ranked completions.", why, "Leave it out.", field=field
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationReport:
    """What the longest text allowed has cost, and rows that teach nothing."""

    rows_cut: int = 0
    rows_dropped: int = 0
    ties_dropped: int = 0
    tokens_lost: int = 0
    first_rows: tuple[int, ...] = ()  # numbers of the first rows cut or dropped for their length
    rows_alike: int = 0  # whose texts, ranked or labelled apart, are the same tokens
    first_alike: tuple[int, ...] = ()  # their numbers
    # what `on_identical` made of them; `error` where there are none
    alike_became: OnIdentical = "error"

    def sentences(self, max_length: int | None) -> list[str]:
        """For people; none where nothing was lost."""
        found: list[str] = []
        where = ""
        if self.first_rows:
            where = f" (first rows: {', '.join(map(str, self.first_rows))})"
        if self.rows_cut:
            found.append(
                f"{self.rows_cut} rows cut to {max_length} tokens, {self.tokens_lost} tokens "
                f"lost{where}."
            )
        if self.rows_dropped:
            found.append(
                f"{self.rows_dropped} rows dropped, longer than {max_length} tokens{where}."
            )
        if self.ties_dropped:
            found.append(f"{self.ties_dropped} rows dropped: ties alone, or of weight 0.")
        return [*found, *self.alike_sentences(max_length)]

    def alike_sentences(self, max_length: int | None) -> list[str]:
        """For people: what became of rows whose texts are the same tokens."""
        if not self.rows_alike:
            return []
        became = "read as ties"
        if self.alike_became == "drop":
            became = "dropped"
        first = ", ".join(map(str, self.first_alike))
        why = f"their texts are the same within {max_length} tokens"
        return [f"{self.rows_alike} rows {became}: {why} (first rows: {first})."]


@dataclass(frozen=True, slots=True)
class RenderedRows:
    """The rows of a data set that are trained on, as tokens."""

    rows: tuple[tuple[Comparison, tuple[Rendered, ...]], ...]
    # tokens of the longest text of each row, also of those that are dropped
    lengths: tuple[int, ...]
    report: TruncationReport


def render_rows(
    preferences: Preferences, template: ScoringTemplate, tokenizer: Tokenizer, tie_policy: TiePolicy
) -> RenderedRows:
    """Tokenise every row that there is something to learn from: not those of weight 0, nor ties
    alone where ties are dropped. InvalidData where a row is too long and that is an error, and
    where no row is left.
    """
    source, all_rows = preferences.source, preferences.comparisons
    weighing = [one for one in all_rows if one.weight > 0]
    taught = [
        one for one in weighing if tie_policy != "drop" or one.labels or len(set(one.ranks)) > 1
    ]
    if not taught:
        why = (
            f"{len(all_rows) - len(weighing)} have the weight 0, {len(weighing)} are ties, and "
            "tie_policy is 'drop'."
        )
        fix = "Give rows a weight above 0, or take another tie_policy."
        raise InvalidData(f"No row of {source} teaches anything.", why, fix)
    whole = [(one, template.render_comparison(tokenizer, one)) for one in taught]
    stay_whole = template.truncation in ("drop", "error")
    lengths = [
        max(len(text.tokens) + (0 if stay_whole else text.num_lost) for text in texts)
        for _, texts in whole
    ]
    too_long = [one.row for one, texts in whole if any(text.num_lost for text in texts)]
    if too_long and template.truncation == "error":
        what = (
            f"{len(too_long)} rows of {source} are longer than max_length = "
            f"{template.max_length} tokens."
        )
        why = f"The first: {', '.join(map(str, too_long[:MOST_ROWS]))}. {_quantiles(lengths)}"
        raise InvalidData(
            what,
            why,
            "Set a larger max_length, or truncation to 'keep_end', 'keep_start' or 'drop'.",
        )
    short = [
        (one, texts)
        for one, texts in whole
        if not (stay_whole and any(text.num_lost for text in texts))
    ]
    alike = [one.row for one, texts in short if _are_alike(one, texts)]
    rows = _without_alike(preferences, short, alike, template, lengths)
    if tie_policy == "drop":
        rows = [(one, texts) for one, texts in rows if one.labels or len(set(one.ranks)) > 1]
    if not rows and alike:
        why = f"The texts of {len(alike)} rows are the same within {template.max_length} tokens."
        fix = "Set a larger max_length, or another truncation."
        raise InvalidData(f"No row of {source} is left to train on.", why, fix)
    if not rows:
        why = f"max_length is {template.max_length}. {_quantiles(lengths)}"
        fix = "Set a larger max_length, or truncation to 'keep_end'."
        raise InvalidData(f"No row of {source} is left to train on.", why, fix)
    report = TruncationReport(
        rows_cut=len(too_long) - (len(whole) - len(short)),
        rows_dropped=len(whole) - len(short),
        ties_dropped=len(all_rows) - len(taught),
        tokens_lost=sum(text.num_lost for _, texts in rows for text in texts),
        first_rows=tuple(too_long[:MOST_ROWS]),
        rows_alike=len(alike),
        first_alike=tuple(alike[:MOST_ROWS]),
        alike_became=preferences.on_identical if alike else "error",
    )
    return RenderedRows(tuple(rows), tuple(lengths), report)


_Rows = list[tuple[Comparison, tuple[Rendered, ...]]]


def _are_alike(one: Comparison, texts: Sequence[Rendered]) -> bool:
    return prefers_to_itself([text.tokens for text in texts], one.labels or one.ranks)


def _without_alike(
    preferences: Preferences,
    rows: _Rows,
    alike: Sequence[int],
    template: ScoringTemplate,
    lengths: Sequence[int],
) -> _Rows:
    """The rows as `on_identical` says, where texts that differ as a whole are the same tokens.

    Of steps, whose labels say right and wrong of the same tokens, a tie is both of them.
    """
    if alike and preferences.on_identical == "error":
        numbers = row_numbers(alike)
        what = (
            f"{len(alike)} rows of {preferences.source} rank a text above itself, as the model "
            "reads them."
        )
        why = (
            f"Within max_length = {template.max_length} tokens their texts are the same: "
            f"{numbers}. "
        )
        raise InvalidData(
            what,
            why + _quantiles(lengths),
            "Set a larger max_length, truncation 'keep_start' or 'keep_end', or on_identical "
            "'tie' or 'drop'.",
            problems=[{"problem": IDENTICAL, "rows": list(alike[:MOST_ROWS]), "count": len(alike)}],
        )
    kept: _Rows = []
    for one, texts in rows:
        if _are_alike(one, texts):
            if preferences.on_identical == "drop":
                continue
            if not one.labels:
                one = replace(one, ranks=tied_ranks([text.tokens for text in texts], one.ranks))
        kept.append((one, texts))
    return kept


def length_quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Tokens that 5, 50, 95 and 100 % of the rows have at most, by the share."""
    import numpy as np  # commands that only read a plan need not wait for it

    return {f"{q:g}": round(float(np.quantile(lengths, q))) for q in (0.05, 0.5, 0.95, 1)}


def _quantiles(lengths: Sequence[int]) -> str:
    low, middle, high, _ = length_quantiles(lengths).values()
    return f"Tokens of the longer side: 5 % of rows have at most {low}, half {middle}, 95 % {high}."


def _refusal(error: ValidationError) -> InvalidConfig:
    field = ".".join(map(str, error.errors()[0]["loc"]))
    return InvalidConfig(f"'{field}' cannot be set so.", problems_of(error), field=field)
