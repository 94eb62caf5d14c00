"""The settings of a reward model's training, under TRL's and transformers' names, and presets by the model's size.

Owns: names, defaults, what a preset fills in; the error for a name that is unknown.
Never: reads data or weights.

Sources: TRL 1.16 `RewardConfig`, transformers 5.23 `TrainingArguments`, PEFT 0.21 `LoraConfig`; the presets are those
of the reward-modelling seed. Different on purpose: no bf16 and no gradient checkpointing unless asked for, batches by
length, the learning rate of the preset, texts that are too long are cut instead of dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from halteres.errors import InvalidConfig, unknown
from halteres.rewards.template import Truncation

TiePolicy = Literal["soft", "rao_kupper", "drop"]
ListwiseLoss = Literal["pairs", "plackett_luce"]
Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup"]
When = Literal["no", "steps", "epoch"]


class LoraSettings(BaseModel, frozen=True, extra="forbid"):
    """A low-rank adapter, by PEFT's names. The head is always trained whole beside it."""

    r: Annotated[int, Field(ge=1, description="rank")] = 16
    lora_alpha: Annotated[float, Field(gt=0)] = 32
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


@dataclass(frozen=True, slots=True)
class Preset:
    """What a model of this size is trained with where nothing else is asked for."""

    name: str
    learning_rate: float  # of full fine-tuning
    batch_size: int  # rows


TINY_PRESET = Preset("tiny", 1e-3, 8)
"""Below 10 million parameters, the built-in model's size."""

LORA_LEARNING_RATE = 1e-4

_PRESETS = (
    (10_000_000, TINY_PRESET),
    (1_000_000_000, Preset("below 1B", 2e-5, 8)),
    (7_000_000_000, Preset("1B to 7B", 1e-5, 4)),
)
_LARGEST = Preset("7B and above", 5e-6, 2)

_IGNORED = frozenset({"report_to", "dataset_num_proc", "remove_unused_columns", "activation_offloading", "use_cpu"})
"""Settings of TRL's that change no number: accepted, so that a config written for it is read."""


class RewardConfig(BaseModel, frozen=True, extra="forbid"):
    """How a reward model is trained. An unknown name is an error that offers the nearest."""

    output_dir: str = "reward-model"
    preset: Literal["auto", "off"] = "auto"

    learning_rate: Annotated[float, Field(gt=0)] | None = None  # None: of the preset
    per_device_train_batch_size: Annotated[int, Field(ge=1)] | None = None  # rows; None: of the preset
    per_device_eval_batch_size: Annotated[int, Field(ge=1)] = 8
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    num_train_epochs: Annotated[float, Field(gt=0)] = 1.0
    max_steps: int = -1  # of the optimiser; above 0 it goes before the epochs
    lr_scheduler_type: Schedule = "linear"
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
    listwise_loss: ListwiseLoss = "pairs"  # of rows with more than two completions
    objective_weights: dict[str, FiniteFloat] | None = None  # of each objective in the score; None: equal shares of 1

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
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise InvalidConfig(
                f"The setting '{name}' is {first['input']!r}.", f"{first['msg']}.", field=name
            ) from error

    @model_validator(mode="before")
    @classmethod
    def _named(cls, settings: Any) -> Any:
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
        """With nothing left open: the preset fills in what was not asked for.

        Raises:
            InvalidConfig: something is open, and the preset is off.
        """
        preset = preset_for(num_parameters)
        rate = LORA_LEARNING_RATE if self.lora is not None and preset is not TINY_PRESET else preset.learning_rate
        filled = {"learning_rate": rate, "per_device_train_batch_size": preset.batch_size}
        missing = {name: value for name, value in filled.items() if getattr(self, name) is None}
        if missing and self.preset == "off":
            raise InvalidConfig(f"The setting '{next(iter(missing))}' is missing.", "The preset is off.")
        return self.model_copy(update=missing)


def settled_weights(asked: Mapping[str, float] | None, objectives: Sequence[str]) -> dict[str, float]:
    """Of each objective what it counts in the score, in order: as asked for, else equal shares of 1.

    Raises:
        InvalidConfig: a weight of an objective that there is not; an objective without a weight; no weight but 0.
    """
    if not asked:
        return {name: 1 / len(objectives) for name in objectives}
    for name in asked:
        if name not in objectives:
            raise unknown(InvalidConfig, "objective", name, objectives)
    missing = [name for name in objectives if name not in asked]
    if missing:
        raise InvalidConfig(
            f"objective_weights has none for '{missing[0]}'.", next="Give it a weight; 0 leaves it out of the score."
        )
    if not any(asked.values()):
        raise InvalidConfig(
            "Every weight of objective_weights is 0.",
            "Every text would have the score 0.",
            "Give one of them a weight.",
        )
    return {name: asked[name] for name in objectives}


def preset_for(num_parameters: int) -> Preset:
    """The preset of a model with so many parameters."""
    return next((preset for below, preset in _PRESETS if num_parameters < below), _LARGEST)
