"""The settings of a run: four sections, one value; each field's name, type, range, default and
meaning.

run         the attempt itself: name, seed, time limit
env         the environment's config class: Atropos's fields and its own; validated by the
            environment
inference   the base model and where it is served
trainer     the RL loop
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from halteres.config import environ, sampler_list
from halteres.config.discovery import in_file_name, joined_name, split_name
from halteres.config.reach import Reach, WebAddress, declared
from halteres.errors import InvalidData, nearest
from halteres.losses import LOSSES, complete_settings, find_kind
from halteres.models import TINY

# where metrics can be forwarded to (`observe.sinks`)
SinkName = Literal["wandb", "trackio", "tensorboard"]

Estimator = Literal[
    "group_std",
    "group_mean",
    "rloo",
    "reinforce",
    "rebn",
    "rebn_per_environment",
    "rebn_leave_one_out",
    "turn_mean",
]
"""How advantages are made of rewards (`training.advantages` has the formulas and their papers)."""

# what counts the same in the loss, however many tokens it has
Weighting = Literal["token", "turn", "episode"]
# updates of a run whose older weights can be sampled from by their version, beside the newest
MOST_PINNED = 32


_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of what is not seen, or changes how others are seen: controls, directions of
reading, line breaks, blanks of no width."""


STORED = {"is_stored": True}
"""Context in which settings are read that a run was made with: rules on names may have been others
then.
"""


def _on_one_line(text: str, info: ValidationInfo) -> str:
    if info.context == STORED:
        return text
    if any(unicodedata.category(character) in _UNSEEN for character in text):
        raise PydanticCustomError(
            "one_line",
            "must be on one line, without control characters and others that are not seen",
        )
    return text


OneLine = Annotated[str, AfterValidator(_on_one_line)]
"""A name, of a run for example, as lists, files and terminals show it: two that look alike are the
same, but for letters of different alphabets."""


def default_name(environment: str, run_id: str) -> str:
    """The name of a run of this environment that was given none. Folders and files are called by it
    too.

    >>> default_name("gsm8k", "3fa9c1d2")
    'gsm8k-3fa9c1d2'
    """
    return f"{in_file_name(environment)}-{run_id}"


@dataclass(frozen=True, slots=True)
class Wiring:
    """Marks a field that the supervisor writes; setting it by hand is refused with this reason."""

    why: str


class Section(BaseModel):
    """Frozen, strict about names; numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, given: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(given, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise PydanticCustomError("number", "must be a number")
        return given


def setting(
    default: Any,
    description: str,
    *,
    reaches: Reach | None = None,
    allowed: Sequence[str] = (),
    **limits: Any,
) -> Any:
    """A field with its default, its meaning, and pydantic's limits.

    Args:
        default: its value where none is given.
        description: what it means.
        reaches: what a text of it names beyond the run.
        allowed: its values, where a validator of the section holds them.
        limits: pydantic's.
    """
    listed = {}
    if allowed:
        listed = {"enum": list(allowed)}
    extra = declared(reaches, listed)
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


class RunSettings(Section):
    """The attempt itself."""

    name: OneLine | None = setting(
        None,
        "readable name of the run, on one line; default: ENVIRONMENT-RUN",
        reaches="nothing",
        max_length=80,
    )
    environment: str = setting(
        "arithmetic",
        "the environment's name, FAMILY:VARIANT of a family, or the path of its file",
        reaches="environment",
    )
    interpreter: str | None = setting(
        None, "Python that runs the environment file; default: this one", reaches="code"
    )
    working_directory: str | None = setting(
        None,
        "folder that the environment's commands run in; default: its project's",
        reaches="path",
    )
    seed: int = setting(
        0, "seeds the adapter's first weights, sampling and the choice of tasks", ge=0, lt=2**32
    )
    success_threshold: float = setting(
        0.0,
        "a score above it is a success; default: what the environment's config_init gives, else 0",
    )
    max_minutes: float | None = setting(
        None, "minutes of training; then the run ends with a checkpoint", gt=0
    )
    stop_when: float | None = setting(
        None, "eval/percent_correct at which the run ends early", gt=0, le=1
    )
    on_drift: Literal["warn", "stop"] = setting(
        "warn", "at an alert of drift: say so, or end the run after its step"
    )
    sinks: tuple[SinkName, ...] = setting(
        (), "where metrics are forwarded to, beside the run's own metrics.jsonl", reaches="key"
    )
    wandb_project: OneLine | None = setting(
        None,
        "project that metrics are filed under; default: WANDB_PROJECT, or atropos-tinker",
        reaches="nothing",
    )
    wandb_entity: OneLine | None = setting(
        None, "account or team of it; default: WANDB_ENTITY", reaches="nothing"
    )
    tags: tuple[OneLine, ...] = setting(
        (), "words of your own, kept with the run", reaches="nothing"
    )

    @property
    def environment_name(self) -> str:
        """The environment's name, also where it was given as a path to its file."""
        environment, variant = split_name(self.environment)
        return joined_name(
            Path(environment).stem if environment.endswith(".py") else environment, variant
        )

    @property
    def project(self) -> str:
        """What metrics are filed under."""
        return self.wandb_project or environ.wandb_project()

    def default_name(self, run_id: str) -> str:
        """The name of a run that was given none; sinks call every run by it."""
        return default_name(self.environment_name, run_id)


class InferenceSettings(Section):
    """The base model and where it is served."""

    model: str = setting(
        TINY,
        "base model: 'halteres/tiny', a model folder, or a name the service knows",
        reaches="model",
        min_length=1,
    )
    trainer_ranks: int = setting(
        1, "processes that train as one, each with a part of every batch", ge=1, le=64
    )
    shard: bool = setting(
        False, "each rank of the trainer has a part of the base model; needs samplers"
    )
    threads: int | None = setting(
        None, "CPU threads of an engine; default: its share of cores - 1", ge=1
    )
    samplers: sampler_list.Given = setting(
        0,
        "engines that only sample: their number, or a list of 'own', 'vllm' and addresses of vLLMs",
        reaches="address",
    )
    vllm: str = setting(
        "vllm",
        "the vllm command of samplers called 'vllm', and further arguments of `vllm serve`",
        reaches="code",
    )
    vllm_adapters: int = setting(
        16, "adapters that a vLLM holds at a time, at most its --max-cpu-loras", ge=1, le=256
    )
    vllm_memory: float = setting(
        0.45, "share of a GPU's memory that one 'vllm' takes, beside the engine", gt=0, lt=1
    )
    weights_folder: str | None = setting(
        None,
        "folder that samplers at addresses see under the same path, for weights; default: the "
        "service's",
        reaches="path",
    )
    cache_gb: float | None = setting(
        None, "GB of keys and values; default: a quarter of what is free", gt=0
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "of base weights and matmuls; bfloat16 takes half the memory; auto: bfloat16 on a GPU, "
        "float32 on a CPU",
    )
    device: Literal["cpu", "cuda", "auto"] | None = setting(
        None, "auto: a GPU where there is one; default: HALTERES_DEVICE, or cpu"
    )
    engine: Literal["torch", "scripted"] = setting(
        "torch", "what computes; 'scripted' has no weights and learns nothing"
    )

    @field_validator("samplers", mode="before")
    @classmethod
    def _read_samplers(cls, given: Any) -> Any:
        try:
            if isinstance(given, str):
                return sampler_list.as_given(given)
            if isinstance(given, list | tuple):
                if not all(isinstance(part, str) for part in given):
                    raise ValueError(sampler_list.RULE)
                sampler_list.samplers_of(tuple(given))
        except ValueError as error:
            raise _refused("samplers", given, f"{error}") from error
        number, least = given, 0
        if isinstance(given, list | tuple):
            number, least = len(given), 1
        if isinstance(number, int) and not least <= number <= sampler_list.MOST:
            raise _refused("samplers", given, sampler_list.RULE)
        return given

    url: Annotated[
        WebAddress | None,
        Wiring("the supervisor writes the service's address; use --service to name another"),
        Field(description="address of the training service", json_schema_extra=declared("address")),
    ] = None


class TrainerSettings(Section):
    """The RL loop. The defaults are those with which benchmarks/learning_arithmetic.py trains the
    built-in model.
    """

    total_steps: int = setting(40, "optimiser steps of the run, one batch each", ge=1, le=1_000_000)
    lora_rank: int = setting(16, "rank of the LoRA adapter", ge=1, le=512)
    train_unembed: bool | None = setting(
        None, "adapt the unembedding too; default: where a sampler takes such adapters"
    )
    learning_rate: float = setting(1.5e-3, "largest step size of Adam", gt=0, le=1)
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "the learning rate after the warm-up: as it is, or down towards 0"
    )
    warmup_steps: int = setting(
        0, "optimiser steps over which the learning rate rises to its largest", ge=0
    )
    beta1: float = setting(0.9, "Adam's decay of the mean gradient, per step", ge=0, lt=1)
    beta2: float = setting(0.95, "Adam's decay of the mean squared gradient, per step", ge=0, lt=1)
    adam_eps: float = setting(1e-8, "Adam's epsilon, added to the divisor of a step", gt=0)
    grad_clip_norm: float = setting(
        0.0, "largest global norm of the gradient; 0: no clipping", ge=0
    )
    loss: str = setting(
        "importance_sampling",
        "loss of the policy",
        reaches="nothing",
        allowed=tuple(LOSSES),
    )
    loss_config: dict[str, float] = setting(
        {}, "settings of the loss, e.g. {clip_high_threshold: 1.28}"
    )
    epochs: int = setting(1, "times that each batch is gone through", ge=1, le=100)
    minibatches: int = setting(
        1, "optimiser steps that each time through a batch is divided into", ge=1, le=1024
    )
    advantage: Literal[Estimator, "gae", "environment"] = setting(
        "group_std",
        "made of a group's scores, of turns' returns, by a critic (gae) or by the environment",
    )
    gamma: float = setting(
        1.0,
        "what a reward one turn later is worth; for estimators of turns' returns, and gae",
        ge=0,
        le=1,
    )
    gae_lambda: float = setting(
        0.95,
        "of gae, per token: 1: returns less the critic's value; 0: one token ahead",
        ge=0,
        le=1,
    )
    critic: str | None = setting(
        None,
        "of gae: folder of a reward model or of a base model that the critic starts from; default: "
        "the base model",
        reaches="path",
        min_length=1,
    )
    critic_learning_rate: float | None = setting(
        None, "step size of the critic's Adam; default: learning_rate", gt=0, le=1
    )
    critic_epochs: int | None = setting(
        None, "times that the critic goes through each batch; default: epochs", ge=1, le=100
    )
    critic_clip: float = setting(
        0.2, "how far a value may move on one batch before its loss is clipped, reward units", gt=0
    )
    critic_warmup_steps: int = setting(
        0, "first steps of the run, on which the critic learns and the policy does not", ge=0
    )
    turn_rewards: Literal["rewards", "states"] = setting(
        "rewards", "turns report rewards, or values of the states they led to"
    )
    weighting: Weighting = setting(
        "token", "what counts the same in the loss: every token, every turn or every episode"
    )
    kl_coef: float = setting(
        0.0, "weight of the KL divergence from the reference policy, per nat; 0: none", ge=0
    )
    kl_in: Literal["reward", "loss"] = setting(
        "reward", "where the KL penalty counts: before the baselines, or at each token"
    )
    reference: Literal["base", "environment"] = setting(
        "base", "reference policy: the base model, or the environment's ref_logprobs"
    )
    kl_budget: float | None = setting(
        None, "nats per token from the reference at which an alert speaks", gt=0
    )
    correction: Literal["none", "truncate", "mask"] = setting(
        "none", "older versions' tokens: importance cut at ratio_cap, or masked"
    )
    ratio_cap: float = setting(
        2.0, "largest ratio of the present policy's probability to the sampler's", gt=1
    )
    max_staleness: int = setting(
        0, "batches trained on between a group's sampling and its step; 0: on-policy", ge=0, le=64
    )
    allow_unclipped_staleness: bool = setting(
        False, "allow older data with a loss that does not bound the ratio"
    )
    deterministic: bool = setting(
        False,
        "same settings, same bits: a batch is sampled by the weights that max_staleness names",
    )
    max_token_trainer_length: int = setting(
        2048,
        "tokens of a sequence with its prompt; longer ones are counted, not trained on",
        ge=8,
    )
    checkpoint_every: int = setting(
        10, "optimiser steps between checkpoints; 0: only at the end", ge=0
    )
    eval_every: int = setting(20, "optimiser steps between evaluations; 0: only at both ends", ge=0)

    @property
    def compares_groups(self) -> bool:
        """The estimator compares rollouts of one group, so that a group needs two at least."""
        return self.advantage in ("group_std", "group_mean", "rloo", "turn_mean")

    @property
    def uses_critic(self) -> bool:
        """Advantages are made of a critic's values, which a process of its own learns."""
        return self.advantage == "gae"

    @property
    def updates_per_batch(self) -> int:
        """Optimiser steps that one batch may take."""
        return self.epochs * self.minibatches

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, loss: str) -> str:
        if loss in LOSSES:
            return loss
        raise _refused(
            "loss", loss, f"must be one of {', '.join(LOSSES)}", nearest(loss, tuple(LOSSES))
        )

    @model_validator(mode="after")
    def _loss_fits(self) -> Self:
        try:
            complete_settings(self.loss, self.loss_config)
        except InvalidData as error:
            raise _refused("loss_config", self.loss_config, error.sentence) from error
        if self.kl_budget is not None and not self.kl_coef:
            raise _refused(
                "kl_budget",
                self.kl_budget,
                "needs kl_coef above 0: no divergence is measured without",
            )
        if self.warmup_steps >= self.total_steps:
            raise _refused(
                "warmup_steps", self.warmup_steps, f"must be below total_steps ({self.total_steps})"
            )
        if self.uses_critic and self.critic_warmup_steps >= self.total_steps:
            rule = f"must be below total_steps ({self.total_steps})"
            raise _refused("critic_warmup_steps", self.critic_warmup_steps, rule)
        if self.deterministic and self.max_staleness > MOST_PINNED:
            rule = f"must be at most {MOST_PINNED} where deterministic is set"
            raise _refused("max_staleness", self.max_staleness, rule)
        drifts = self.updates_per_batch > 1 or (
            self.max_staleness > 0 and self.correction == "none"
        )
        if drifts and not find_kind(self.loss).ratio_bounded and not self.allow_unclipped_staleness:
            if self.epochs > 1:
                field = "epochs"
            elif self.minibatches > 1:
                field = "minibatches"
            else:
                field = "max_staleness"
            corrected = " set trainer.correction,"
            if self.updates_per_batch > 1:
                corrected = ""
            rule = (
                f"the loss {self.loss} does not bound how far the policy may have moved since it "
                "sampled; train with "
                f"ppo, cispo, gspo or stable_reinforce,{corrected} or set "
                "trainer.allow_unclipped_staleness"
            )
            raise _refused(field, getattr(self, field), rule)
        return self

    @model_validator(mode="after")
    def _advantages_are_used(self) -> Self:
        if self.advantage == "environment" and self.kl_coef and self.kl_in == "reward":
            raise _refused(
                "kl_in",
                self.kl_in,
                "must be 'loss': the environment's own advantages know no reward",
            )
        if self.advantage == "environment" and self.weighting != "token":
            raise _refused(
                "weighting",
                self.weighting,
                "must be 'token': the environment's own advantages are weighted",
            )
        return self

    @property
    def learns_from_equal_scores(self) -> bool:
        """A group whose scores are all equal teaches something: it is part of a baseline, or is
        pulled.
        """
        pull = find_kind(self.loss).kl_setting
        pulled = bool(pull) and self.loss_config.get(pull, find_kind(self.loss).config[pull]) > 0
        of_groups = self.advantage in ("group_std", "group_mean", "rloo")
        return not of_groups or pulled or (self.kl_coef > 0 and self.kl_in == "loss")


def _refused(
    field: str, got: Any, rule: str, did_you_mean: str | None = None
) -> PydanticCustomError:
    """A setting that breaks a rule beyond its own type; `config.files` makes a problem of it."""
    facts = {"rule": rule, "field": field, "got": got, "did_you_mean": did_you_mean}
    return PydanticCustomError("rule", "{rule}", facts)


ENV_WIRING: Mapping[str, str] = {
    "rollout_server_url": "the supervisor writes the trajectory server's address",
    "tokenizer_name": "it is the base model's; set inference.model",
    "total_steps": "set trainer.total_steps",
    "steps_per_eval": "set trainer.eval_every",
    "seed": "set run.seed",
    "success_threshold": "set run.success_threshold",
    "weights_lag": "set trainer.deterministic",
    "run_dir": "the supervisor writes the run's directory",
    "wandb_name": "the supervisor names the run",
    "data_dir_to_save_evals": "the supervisor names a folder for each evaluation",
}
"""Fields of an environment's config that a run fills in, each with the reason why no one else
may.
"""

SECTIONS: Mapping[str, type[Section]] = {
    "run": RunSettings,
    "inference": InferenceSettings,
    "trainer": TrainerSettings,
}
"""The sections whose fields are ours; `env` belongs to the environment."""


class Settings(Section):
    """Everything a run is made of."""

    run: RunSettings = RunSettings()
    env: dict[str, Any] = {}
    inference: InferenceSettings = InferenceSettings()
    trainer: TrainerSettings = TrainerSettings()

    @property
    def sinks(self) -> tuple[SinkName, ...]:
        """Where metrics are forwarded to: `run.sinks`, and W&B where `env.use_wandb` was set."""
        by_environment: tuple[SinkName, ...] = ()
        if self.env.get("use_wandb"):
            by_environment = ("wandb",)
        return tuple(dict.fromkeys((*by_environment, *self.run.sinks)))

    @property
    def corrects_temperature(self) -> bool:
        """Training can use the log-probabilities at env.temperature: a ratio to them weighs every
        token.

        A loss that clips the ratio instead would leave tokens out by how they were sampled, and
        greedy answers have no ratio at all.
        """
        reweighs = (
            find_kind(self.trainer.loss).importance_weighted or self.trainer.correction != "none"
        )
        return reweighs and self.env.get("temperature", 1.0) not in (0, 1)


HEADLINE = (
    "inference.model",
    "env.group_size",
    "env.batch_size",
    "trainer.total_steps",
    "trainer.learning_rate",
    "trainer.lora_rank",
    "env.max_token_length",
    "trainer.eval_every",
)
"""The settings that matter most."""


def wiring_of(model: type[BaseModel]) -> dict[str, str]:
    """Fields of a section that only the supervisor writes, each with the reason."""
    return {
        name: mark.why
        for name, info in model.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, Wiring)
    }


def settings_schema() -> dict[str, Any]:
    """JSON Schema of Settings; a field that only the supervisor writes carries `x-wiring` with the
    reason.
    """
    schema = Settings.model_json_schema()
    for model in SECTIONS.values():
        for name, why in wiring_of(model).items():
            schema["$defs"][model.__name__]["properties"][name]["x-wiring"] = why
    return schema


def by_key(settings: Settings) -> dict[str, Any]:
    """section.field -> value, as JSON."""
    sections = settings.model_dump(mode="json")
    return {
        f"{section}.{name}": value
        for section, fields in sections.items()
        for name, value in fields.items()
    }
