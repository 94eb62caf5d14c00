"""An environment's settings and its inference server's, and how a file and arguments are laid over them.

Source: atroposlib 0.4.0, BaseEnvConfig and APIServerConfig. Departures: `use_wandb` is off (an original defect: a run
asked for an account), `tokenizer_name` is the built-in model's (the original's must be downloaded).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from halteres.clients.inference import ServerType
from halteres.config.problem import Problem, refusal
from halteres.config.settings import Wiring
from halteres.errors import InvalidConfig, nearest
from halteres.models import TINY
from halteres.rewards.components import Aggregation, RewardSpec, RewardSpecs, check_specs


class EvalHandling(Enum):
    """What happens to training rollouts while `serve` evaluates."""

    STOP_TRAIN = "STOP_TRAIN"  # none is started
    LIMIT_TRAIN = "LIMIT_TRAIN"  # `eval_limit_ratio` of them
    NONE = "NONE"  # all of them


class BaseEnvConfig(BaseModel):
    """Settings that every environment has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(default=4, ge=1, description="rollouts of one task, scored together")
    batch_size: int = Field(
        default=-1,
        ge=-1,
        description="rollouts in one optimiser step, whole groups; -1: the trainer's, about 128 in a run",
    )
    total_steps: int = Field(
        default=1000, ge=-1, description="serve: batches to fill, -1: the trainer's; process: groups to write"
    )
    max_token_length: int = Field(
        default=2048, description="tokens; prompt and answer together stay below it; 0 or less: no limit"
    )
    max_new_tokens: int = Field(default=512, ge=1, description="tokens of one answer at most")
    temperature: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="sampling temperature of training rollouts; 1 is the policy that is trained",
    )
    system_prompt: str | None = Field(
        default=None, description="system message, the first of every chat; default: none"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="seeds tasks and sampling")
    success_threshold: float = Field(default=0.0, description="a score above it counts as success")

    max_num_workers: int = Field(
        default=-1, ge=-1, description="groups under way at once; -1: max_num_workers_per_node"
    )
    max_num_workers_per_node: int = Field(
        default=8, ge=1, description="groups under way at once on one inference server"
    )
    worker_timeout: float = Field(default=600, description="seconds for one group; -1: no limit")
    rollout_retries: int = Field(
        default=3, ge=0, le=100, description="rounds in which failed rollouts of a group are sampled again"
    )
    max_failed_groups: int = Field(
        default=8, ge=1, description="groups that fail one after another before the environment gives up"
    )
    max_batches_offpolicy: int = Field(
        default=3, description="batches that may wait at the trajectory server, where it names no number itself"
    )
    max_dropped_groups: int = Field(
        default=256, ge=0, description="groups dropped one after another before the environment gives up; 0: never"
    )
    ensure_scores_are_not_same: bool = Field(
        default=True, description="drop groups whose scores are all equal: nothing is learnt from them"
    )
    min_batch_allocation: float | None = Field(
        default=None, ge=0, le=1, description="least share (0 to 1) of this environment in every batch; default: none"
    )
    inference_weight: float = Field(
        default=1.0, description="weight of this environment among several on one trajectory server; -1: ignore"
    )

    steps_per_eval: int = Field(default=100, description="serve without a run: optimiser steps between evaluations")
    eval_tasks: int = Field(default=128, ge=1, description="held-out tasks of an evaluation")
    eval_samples: int = Field(
        default=4, ge=1, description="answers to each held-out task at temperature 1, beside one greedy answer"
    )
    max_eval_workers: int = Field(default=16, ge=1, description="held-out tasks under way at once")
    eval_handling: EvalHandling = Field(
        default=EvalHandling.STOP_TRAIN,
        description="training rollouts during an evaluation: none, eval_limit_ratio of them, or all (NONE)",
    )
    eval_limit_ratio: float = Field(
        default=0.5, ge=0, le=1, description="share (0 to 1) of training rollouts that go on under LIMIT_TRAIN"
    )
    data_dir_to_save_evals: str | None = Field(
        default=None, description="folder for an evaluation's files; default: none are written"
    )

    spool_dir: str | None = Field(
        default=None, description="serve: folder for groups that cannot be sent; by default in run_dir"
    )
    include_messages: bool = Field(default=False, description="send and write the chats beside the tokens")
    data_path_to_save_groups: str | None = Field(
        default=None, description="process: the JSONL file that groups are written to; default: data/NAME.jsonl"
    )
    min_items_sent_before_logging: int = Field(default=2, description="accepted for compatibility; no effect")
    num_rollouts_to_keep: int = Field(default=32, description="accepted for compatibility; no effect")
    num_rollouts_per_group_for_logging: int = Field(default=1, description="accepted for compatibility; no effect")
    use_wandb: bool = Field(default=False, description="forward the run's metrics to W&B, as run.sinks: [wandb]")
    thinking_mode: bool = Field(
        default=False, description="accepted for compatibility; no effect: write a system_prompt"
    )
    reasoning_effort: str | None = Field(default=None, description="accepted for compatibility; no effect")
    max_reasoning_tokens: int | None = Field(
        default=None, ge=1024, le=32_000, description="accepted for compatibility; no effect"
    )
    custom_thinking_prompt: str | None = Field(default=None, description="accepted for compatibility; no effect")

    tokenizer_name: Annotated[
        str,
        Wiring("the tokenizer is the base model's"),
        Field(description="tokenizer: the built-in model, or a model folder"),
    ] = TINY
    rollout_server_url: Annotated[
        str,
        Wiring("the supervisor writes the trajectory server's address"),
        Field(description="address of the trajectory server"),
    ] = "http://localhost:8000"
    wandb_name: Annotated[
        str | None, Wiring("the supervisor names the run"), Field(description="name given to the trajectory server")
    ] = None
    weights_lag: Annotated[
        int | None,
        Wiring("it follows from the trainer's settings"),
        Field(ge=0, description="deterministic: batches that the weights lag behind"),
    ] = None
    run_dir: Annotated[
        str | None,
        Wiring("the supervisor owns the run directory"),
        Field(description="the run's directory, for metrics and rollouts"),
    ] = None

    rewards: RewardSpecs = Field(
        default=(), description="what rollouts are scored by, summed with weights; default: the environment's own score"
    )
    reward_aggregation: Aggregation = Field(
        default="sum_then_normalize",
        description="sum the components as they are, or each standardised within its group",
    )
    reward_model_path: str | None = Field(
        default=None, description="short for one component of weight 1: a reward model's folder or its server's address"
    )
    missing_eos_penalty: float = Field(
        default=0.0, ge=0, description="taken off the training score of an answer cut off by length"
    )
    panel: RewardSpecs = Field(
        default=(), description="what held-out answers are scored by at every evaluation, and nothing is trained on"
    )
    eval_best_of: int = Field(
        default=1, ge=1, description="held-out score of the answer that `rewards` likes best of so many; 1: none"
    )

    inert: ClassVar[tuple[str, ...]] = (
        "min_items_sent_before_logging",
        "num_rollouts_to_keep",
        "num_rollouts_per_group_for_logging",
        "thinking_mode",
        "reasoning_effort",
        "max_reasoning_tokens",
        "custom_thinking_prompt",
    )
    """Accepted, with no effect yet."""

    @model_validator(mode="after")
    def _batch_is_whole_groups(self) -> Self:
        if self.batch_size > 0 and self.batch_size % self.group_size:
            below = self.batch_size // self.group_size * self.group_size
            suggest = [size for size in (below, below + self.group_size) if size > 0]
            raise PydanticCustomError(
                "whole_groups",
                "a multiple of group_size ({group_size}), for example {example}",
                {"field": "batch_size", "group_size": self.group_size, "example": suggest[-1], "suggest": suggest},
            )
        return self

    @model_validator(mode="after")
    def _rewards_go_together(self) -> Self:
        check_specs(self.all_rewards, self.reward_aggregation)
        check_specs(self.panel, "sum_then_normalize", "panel")
        if self.eval_best_of > 1 and not self.all_rewards:
            raise PydanticCustomError(
                "best_of",
                "the best of several is chosen by `rewards`, and there are none: set them, or name a reward model"
                " (env.reward_model_path; `halteres env eval --reward-model`)",
                {"field": "eval_best_of"},
            )
        return self

    @property
    def all_rewards(self) -> tuple[RewardSpec, ...]:
        """`rewards`, and the component that `reward_model_path` stands for."""
        if self.reward_model_path is None:
            return self.rewards
        return (*self.rewards, RewardSpec(name="reward_model", model=self.reward_model_path))

    @property
    def num_eval_samples(self) -> int:
        """Answers to each held-out task at temperature 1."""
        return max(self.eval_samples, self.eval_best_of)

    @property
    def max_workers(self) -> int:
        """Groups under way at once, on one inference server."""
        return self.max_num_workers if self.max_num_workers > 0 else self.max_num_workers_per_node

    @property
    def set_without_effect(self) -> tuple[str, ...]:
        """Fields that were set and have no effect."""
        fields = type(self).model_fields
        return tuple(name for name in self.inert if getattr(self, name) != fields[name].default)


class APIServerConfig(BaseModel):
    """One inference server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_name: str = Field(
        default="default", description="process, evaluate: the checkpoint or model that answers; serve: not used"
    )
    base_url: str = Field(default="http://localhost:8001/v1", description="address in OpenAI's form, ending in /v1")
    api_key: str = Field(default="", description="key that is sent along; empty: none")
    server_type: ServerType = Field(
        default="sglang", description="sglang: exact tokens and log-probabilities come back; openai: text alone"
    )
    timeout: float = Field(default=1200, gt=0, description="seconds that one request may take")
    ready_within: float = Field(default=120, gt=0, description="seconds the server may take to become ready")
    num_max_requests_at_once: int = Field(default=512, ge=1, description="connections open at once")
    num_requests_for_eval: int = Field(default=64, ge=1, description="accepted for compatibility; no effect")
    rolling_buffer_length: int = Field(default=1000, description="accepted for compatibility; no effect")
    tokenizer_name: str = Field(default="none", description="accepted for compatibility; env.tokenizer_name counts")
    n_kwarg_is_ignored: bool = Field(default=False, description="accepted for compatibility; no effect")
    health_check: bool = Field(default=True, description="accepted for compatibility; no effect")
    weight: float = Field(default=1.0, description="accepted for compatibility; there is one server")


Model = TypeVar("Model", bound=BaseModel)
Config = TypeVar("Config", bound=BaseEnvConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What a file and the arguments set; values of arguments are text."""

    env: Mapping[str, Any] = field(default_factory=dict)
    openai: Mapping[str, Any] = field(default_factory=dict)

    def over(self, below: Overrides) -> Overrides:
        """Both, these on top."""
        return Overrides(env={**below.env, **self.env}, openai={**below.openai, **self.openai})


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective(Generic[Config]):
    """Validated settings; where there are problems, the refused values are left out of them."""

    env: Config
    openai: APIServerConfig
    problems: tuple[Problem, ...]

    def checked(self) -> Effective[Config]:
        """Itself. InvalidConfig: there are problems; all of them are named."""
        if self.problems:
            raise refusal(self.problems, "Run the file with 'describe' to see every setting.")
        return self


def read_file(file: Path) -> Overrides:
    """The `env` and `openai` parts of a YAML file in the seeds' format; its other parts are the trainer's.

    Raises:
        InvalidConfig: unreadable, no YAML, or of another shape.
    """
    try:
        content = yaml.safe_load(file.read_text()) or {}
    except OSError as error:
        raise InvalidConfig(f"The config file {file} cannot be read.", f"{error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"The config file {file} is no YAML.", " ".join(str(error).split())) from error
    if not isinstance(content, dict):
        raise InvalidConfig(f"The config file {file} is no map.", "It needs 'env:' and 'openai:' at its top level.")
    servers = content.get("openai") or {}
    if isinstance(servers, list):
        if len(servers) > 1:
            raise InvalidConfig(
                f"'openai:' in {file} names {len(servers)} servers.",
                "An environment samples from one.",
                "Keep the first, and put a load balancer behind its address.",
            )
        servers = servers[0] or {}
    sections = {"env": content.get("env") or {}, "openai": servers}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise InvalidConfig(f"'{name}:' in {file} is a {type(section).__name__}, not a map.")
    return Overrides(**sections)


def effective(env: Config, openai: APIServerConfig, overrides: Overrides) -> Effective[Config]:
    """Lay the overrides over what `config_init` gave; every problem is found, and no refused value is filled in."""
    env_config, env_problems = _laid_over(env, overrides.env, prefix="")
    server_config, server_problems = _laid_over(openai, overrides.openai, prefix="openai.")
    return Effective(env=env_config, openai=server_config, problems=(*env_problems, *server_problems))


def _laid_over(base: Model, changes: Mapping[str, Any], prefix: str) -> tuple[Model, tuple[Problem, ...]]:
    """Validate; leave out what is refused and validate the rest again, until it holds."""
    kept, problems = dict(changes), dict[str, Problem]()  # by field: a rule that joins fields may fail again
    while True:
        try:
            return type(base).model_validate({**base.model_dump(), **kept}), tuple(problems.values())
        except ValidationError as error:
            found = [_problem(detail, base, prefix) for detail in error.errors()]
        for problem in found:
            problems.setdefault(problem.field, problem)
        if not kept:
            return base, tuple(problems.values())
        refused = {problem.field.removeprefix(prefix) for problem in found} & kept.keys()
        # Where a rule joins fields, and the one that it names was not changed, none of the changes can stay.
        kept = {name: value for name, value in kept.items() if refused and name not in refused}


def _problem(detail: Any, base: BaseModel, prefix: str) -> Problem:
    name, *inside = [str(part) for part in detail["loc"]] or [str(detail.get("ctx", {}).get("field", ""))]
    is_unknown = detail["type"] == "extra_forbidden"
    rule = "there is no such setting" if is_unknown else detail["msg"][:1].lower() + detail["msg"][1:]
    got = detail["input"]
    if not detail["loc"]:  # a rule that joins fields; its input is all of them, as they came or as a model
        got = got.get(name) if isinstance(got, dict) else getattr(got, name, got)
    return Problem(
        field=prefix + name,
        got=got,
        rule=f"{'.'.join(inside)}: {rule}" if inside else rule,
        did_you_mean=nearest(name, type(base).model_fields) if is_unknown and not inside else None,
        suggest=tuple(detail.get("ctx", {}).get("suggest", ())),
    )
