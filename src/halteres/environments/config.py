"""An environment's settings and its inference server's, and how a file and arguments are laid over
them.

Source: atroposlib 0.4.0, BaseEnvConfig and APIServerConfig. Departures: `use_wandb` is off (an
original defect: a run asked for an account), `tokenizer_name` is the built-in model's (the
original's must be downloaded).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from halteres.clients.inference import ServerType
from halteres.config.problem import Problem, refusal
from halteres.config.reach import Places, Reach, WebAddress, declared
from halteres.documents import read_document
from halteres.environments.cage import CagePolicy
from halteres.errors import InvalidConfig, nearest
from halteres.groups.rollout_rows import TokenLimits
from halteres.models import TINY
from halteres.rewards.components import Aggregation, RewardSpec, RewardSpecs, check_specs


def setting(
    default: Any,
    description: str,
    *,
    wiring: str | None = None,
    reaches: Reach | None = None,
    **rules: Any,
) -> Any:
    """A field of a config: its default, what it means, pydantic's rules; `wiring`: why its value is
    not chosen; `reaches`: what a text of it names beyond the run.
    """
    extra = declared(reaches, {"wiring": wiring} if wiring else None)
    return Field(default=default, description=description, json_schema_extra=extra, **rules)


class EvalHandling(Enum):
    """What happens to training rollouts while `serve` evaluates."""

    STOP_TRAIN = "STOP_TRAIN"  # none is started
    LIMIT_TRAIN = "LIMIT_TRAIN"  # `eval_limit_ratio` of them
    NONE = "NONE"  # all of them


class BaseEnvConfig(BaseModel):
    """Settings that every environment has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = setting(4, "rollouts of one task, scored together", ge=1)
    batch_size: int = setting(
        -1,
        "rollouts in one optimiser step, whole groups; -1: the trainer's, about 128 in a run",
        ge=-1,
    )
    total_steps: int = setting(
        1000, "serve: batches to fill, -1: the trainer's; process: groups to write", ge=-1
    )
    max_token_length: int = setting(
        2048, "tokens; prompt and answer together stay below it; 0 or less: no limit"
    )
    max_new_tokens: int = setting(512, "tokens of one answer at most", ge=1)
    temperature: float = setting(
        1.0,
        "sampling temperature of training rollouts; 1 is the policy that is trained",
        ge=0,
        le=10,
    )
    system_prompt: str | None = setting(
        None, "system message, the first of every chat; default: none", reaches="nothing"
    )
    seed: int = setting(0, "seeds tasks and sampling", ge=0, lt=2**32)
    success_threshold: float = setting(0.0, "a score above it counts as success")

    max_num_workers: int = setting(
        -1, "groups under way at once; -1: max_num_workers_per_node", ge=-1
    )
    max_num_workers_per_node: int = setting(
        8, "groups under way at once on one inference server", ge=1
    )
    worker_timeout: float = setting(
        600, "seconds for one group, and for drawing its item; -1: no limit"
    )
    rollout_retries: int = setting(
        3, "rounds in which failed rollouts of a group are sampled again", ge=0, le=100
    )
    max_failed_groups: int = setting(
        8, "groups that fail one after another before the environment gives up", ge=1
    )
    stuck_s: float = setting(
        120,
        "seconds for which the event loop may hang (a scorer that never ends, say) before a run "
        "ends the environment and starts it again; waiting is no hang; 0: no limit",
        ge=0,
    )
    max_batches_offpolicy: int = setting(
        3, "batches that may wait at the trajectory server, where it names no number itself"
    )
    max_dropped_groups: int = setting(
        256, "groups dropped one after another before the environment gives up; 0: never", ge=0
    )
    ensure_scores_are_not_same: bool = setting(
        True, "drop groups whose scores are all equal: nothing is learnt from them"
    )
    min_batch_allocation: float | None = setting(
        None, "least share (0 to 1) of this environment in every batch; default: none", ge=0, le=1
    )
    inference_weight: float = setting(
        1.0, "weight of this environment among several on one trajectory server; -1: ignore"
    )

    steps_per_eval: int = setting(100, "serve without a run: optimiser steps between evaluations")
    eval_tasks: int = setting(128, "held-out tasks of an evaluation", ge=1)
    eval_samples: int = setting(
        4, "answers to each held-out task at temperature 1, beside one greedy answer", ge=1
    )
    max_eval_workers: int = setting(16, "held-out tasks under way at once", ge=1)
    eval_handling: EvalHandling = setting(
        EvalHandling.STOP_TRAIN,
        "training rollouts during an evaluation: none, eval_limit_ratio of them, or all (NONE)",
    )
    eval_limit_ratio: float = setting(
        0.5, "share (0 to 1) of training rollouts that go on under LIMIT_TRAIN", ge=0, le=1
    )
    data_dir_to_save_evals: str | None = setting(
        None, "folder for an evaluation's files; default: none are written", reaches="path"
    )

    rollout_tokens_mb: float = setting(
        50.0,
        "megabytes of rollouts/ up to which groups are written with their tokens; 0: none are",
        ge=0,
    )
    rollout_token_groups: int = setting(
        -1, "groups of each step that are written with their tokens; -1: all", ge=-1
    )
    spool_dir: str | None = setting(
        None, "serve: folder for groups that cannot be sent; by default in run_dir", reaches="path"
    )
    include_messages: bool = setting(False, "send and write the chats beside the tokens")
    data_path_to_save_groups: str | None = setting(
        None,
        "process: the JSONL file that groups are written to; default: data/NAME.jsonl",
        reaches="path",
    )
    min_items_sent_before_logging: int = setting(2, "accepted for compatibility; no effect")
    num_rollouts_to_keep: int = setting(32, "accepted for compatibility; no effect")
    num_rollouts_per_group_for_logging: int = setting(1, "accepted for compatibility; no effect")
    use_wandb: bool = setting(False, "forward the run's metrics to W&B, as run.sinks: [wandb]")
    thinking_mode: bool = setting(
        False, "accepted for compatibility; no effect: write a system_prompt"
    )
    reasoning_effort: str | None = setting(
        None, "accepted for compatibility; no effect", reaches="nothing"
    )
    max_reasoning_tokens: int | None = setting(
        None, "accepted for compatibility; no effect", ge=1024, le=32_000
    )
    custom_thinking_prompt: str | None = setting(
        None, "accepted for compatibility; no effect", reaches="nothing"
    )

    tokenizer_name: str = setting(
        TINY,
        "tokenizer: the built-in model, or a model folder",
        reaches="model",
        wiring="the tokenizer is the base model's",
    )
    rollout_server_url: WebAddress = setting(
        "http://localhost:8000",
        "address of the trajectory server",
        reaches="address",
        wiring="the supervisor writes the trajectory server's address",
    )
    wandb_name: str | None = setting(
        None,
        "name given to the trajectory server",
        reaches="nothing",
        wiring="the supervisor names the run",
    )
    weights_lag: int | None = setting(
        None,
        "deterministic: batches that the weights lag behind",
        ge=0,
        wiring="it follows from the trainer's settings",
    )
    run_dir: str | None = setting(
        None,
        "the run's directory, for metrics and rollouts",
        reaches="path",
        wiring="the supervisor owns the run directory",
    )

    rewards: RewardSpecs = setting(
        (), "what rollouts are scored by, summed with weights; default: the environment's own score"
    )
    reward_aggregation: Aggregation = setting(
        "sum_then_normalize",
        "sum the components as they are, or each standardised within its group",
    )
    reward_model_path: Places | None = setting(
        None,
        "short for one component of weight 1: a reward model's folder or its server's address",
        reaches="path",
    )
    missing_eos_penalty: float = setting(
        0.0, "taken off the training score of an answer cut off by length", ge=0
    )
    cage: CagePolicy = setting(
        "auto",
        "scorers and reward functions in a cage of their own: those that name `unsafe_scorer` "
        "(auto), all (on), none (off)",
        reaches="code",
    )
    scorer_timeout_s: float = setting(
        10.0, "seconds that a scorer in a process of its own may take for one answer", gt=0
    )
    scorer_memory_mb: int = setting(
        2048,
        "MiB of address space of a scorer's process; one that imports torch needs more",
        ge=256,
    )
    scorer_calls: int = setting(
        10_000,
        "answers after which a scorer's process is replaced; 1: none finds what another left",
        ge=1,
    )
    panel: RewardSpecs = setting(
        (), "what held-out answers are scored by at every evaluation, and nothing is trained on"
    )
    eval_best_of: int = setting(
        1, "held-out score of the answer that `rewards` likes best of so many; 1: none", ge=1
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

    @field_validator("cage", mode="before")
    @classmethod
    def _words_that_yaml_takes_for_truth(cls, given: Any) -> Any:
        if given is True:
            return "on"
        if given is False:
            return "off"
        return given

    @model_validator(mode="after")
    def _batch_is_whole_groups(self) -> Self:
        if self.batch_size > 0 and self.batch_size % self.group_size:
            below = self.batch_size // self.group_size * self.group_size
            suggest = [size for size in (below, below + self.group_size) if size > 0]
            raise PydanticCustomError(
                "whole_groups",
                "a multiple of group_size ({group_size}), for example {example}",
                {
                    "field": "batch_size",
                    "group_size": self.group_size,
                    "example": suggest[-1],
                    "suggest": suggest,
                },
            )
        return self

    @model_validator(mode="after")
    def _rewards_go_together(self) -> Self:
        check_specs(self.all_rewards, self.reward_aggregation)
        check_specs(self.panel, "sum_then_normalize", "panel")
        if self.eval_best_of > 1 and not self.all_rewards:
            raise PydanticCustomError(
                "best_of",
                "the best of several is chosen by `rewards`, and there are none: set them, or "
                "name a reward model"
                " (env.reward_model_path; `halteres env eval --reward-model`)",
                {"field": "eval_best_of"},
            )
        return self

    @property
    def all_rewards(self) -> tuple[RewardSpec, ...]:
        """`rewards`, and the component that `reward_model_path` stands for."""
        if not self.reward_model_path:
            return self.rewards
        return (*self.rewards, RewardSpec(name="reward_model", model=self.reward_model_path))

    @property
    def token_limits(self) -> TokenLimits:
        """How many groups are recorded with their tokens."""
        return TokenLimits(megabytes=self.rollout_tokens_mb, groups=self.rollout_token_groups)

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

    model_name: str = setting(
        "default", "process, evaluate: the checkpoint or model that answers; serve: not used"
    )
    base_url: WebAddress = setting(
        "http://localhost:8001/v1", "address in OpenAI's form, ending in /v1"
    )
    api_key: str = setting("", "key that is sent along; empty: none")
    server_type: ServerType = setting(
        "sglang", "sglang: exact tokens and log-probabilities come back; openai: text alone"
    )
    timeout: float = setting(1200, "seconds that one request may take", gt=0)
    ready_within: float = setting(120, "seconds the server may take to become ready", gt=0)
    num_max_requests_at_once: int = setting(512, "connections open at once", ge=1)
    num_requests_for_eval: int = setting(64, "accepted for compatibility; no effect", ge=1)
    rolling_buffer_length: int = setting(1000, "accepted for compatibility; no effect")
    tokenizer_name: str = setting("none", "accepted for compatibility; env.tokenizer_name counts")
    n_kwarg_is_ignored: bool = setting(False, "accepted for compatibility; no effect")
    health_check: bool = setting(True, "accepted for compatibility; no effect")
    weight: float = setting(1.0, "accepted for compatibility; there is one server")


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
    defaults: Config  # `env` without overrides

    def checked(self) -> Effective[Config]:
        """Itself. InvalidConfig: there are problems; all of them are named."""
        if self.problems:
            raise refusal(self.problems, "Run the file with 'describe' to see every setting.")
        return self


def read_file(file: Path) -> Overrides:
    """The `env` and `openai` parts of a YAML file in the seeds' format; its other parts are the
    trainer's.

    Raises:
        InvalidConfig: unreadable, no YAML, or of another shape.
    """
    content = read_document(file, "config file") or {}
    if not isinstance(content, dict):
        raise InvalidConfig(
            f"The config file {file} is no map.", "It needs 'env:' and 'openai:' at its top level."
        )
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
    """Lay the overrides over what `config_init` gave; every problem is found, and no refused value
    is filled in.
    """
    env_config, env_problems = _laid_over(env, overrides.env, prefix="")
    server_config, server_problems = _laid_over(openai, overrides.openai, prefix="openai.")
    defaults, _ = _laid_over(env, {}, prefix="")
    return Effective(
        env=env_config,
        openai=server_config,
        problems=(*env_problems, *server_problems),
        defaults=defaults,
    )


def _laid_over(
    base: Model, changes: Mapping[str, Any], prefix: str
) -> tuple[Model, tuple[Problem, ...]]:
    """Validate; leave out what is refused and validate the rest once more, until it holds."""
    # by field: a rule that joins fields may fail twice
    left, problems = dict(changes), dict[str, Problem]()
    while True:
        try:
            return type(base).model_validate({**base.model_dump(), **left}), tuple(
                problems.values()
            )
        except ValidationError as error:
            found = [_problem(detail, base, prefix) for detail in error.errors()]
        for problem in found:
            problems.setdefault(problem.field, problem)
        if not left:
            return base, tuple(problems.values())
        refused = {problem.field.removeprefix(prefix) for problem in found} & left.keys()
        # Where a rule joins fields, and the one that it names was not changed, none of the changes
        # can stay.
        left = {name: value for name, value in left.items() if refused and name not in refused}


def _problem(detail: Any, base: BaseModel, prefix: str) -> Problem:
    context = detail.get("ctx", {})
    name, *inside = [str(part) for part in detail["loc"]] or [str(context.get("field", ""))]
    is_unknown = detail["type"] == "extra_forbidden"
    rule = (
        "there is no such setting" if is_unknown else detail["msg"][:1].lower() + detail["msg"][1:]
    )
    got = detail["input"]
    # a rule that joins fields; its input is all of them, as they came or as a model
    if not detail["loc"]:
        got = got.get(name) if isinstance(got, dict) else getattr(got, name, got)
    return Problem(
        field=prefix + name,
        got=got,
        rule=f"{'.'.join(inside)}: {rule}" if inside else rule,
        did_you_mean=nearest(name, type(base).model_fields) if is_unknown and not inside else None,
        suggest=tuple(context.get("suggest", ())),
    )
