"""The policy file: what the operator of this machine locks and caps.

Owns: the nouns `Policy`, `Caps` and `KeysRequired`, reading HALTERES_HOME/policy.yaml, the policies of the
package.
Never: applies a lock (`config.gathering`), ends a run at a cap (the supervisor), speaks of a model's policy.

    extends: hermes-compat          # or: default
    unlock: [inference.model]       # of what that one locks; the rest of it holds
    lock: {trainer: {learning_rate: 4.0e-5}, env.group_size: 8}    # names as in rl_edit_config will do
    caps: {max_steps: 500, max_hours: 2, max_tokens: 5.0e7, max_concurrent_runs: 1}
    min_status_interval_s: 0
    require_keys: []                # to start; or: {gate: [], start: [], test: []}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from halteres.config import environ
from halteres.config.edits import IN_FILES, OWN_KEYS, Edit, nearest_setting
from halteres.config.problem import Problem, UnknownSetting
from halteres.config.settings import ENV_WIRING, SECTIONS, wiring_of
from halteres.errors import HalteresError, InvalidConfig, nearest

FILE = "policy.yaml"


class PolicyCap(InvalidConfig):
    """The operator's policy does not allow so much."""

    code, status = "policy_cap", 403


def _meant(name: str) -> str:
    """The setting that a name means; an environment's field that the run fills in means ours that it is filled from."""
    field = name.removeprefix("env.")
    if name.startswith("env.") and field not in ENV_WIRING:
        return name
    return IN_FILES.get(field) or Edit(name=field, value=None).key


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Caps(_Part):
    """Budgets of one run, and how many may go on at once. None: no cap."""

    max_steps: Annotated[int | None, Field(ge=1, description="optimiser steps of one run")] = None
    max_hours: Annotated[float | None, Field(gt=0, description="hours of one run; a resumed one counts anew")] = None
    max_tokens: Annotated[float | None, Field(gt=0, description="sampled tokens that one run trains on")] = None
    max_concurrent_runs: Annotated[int | None, Field(ge=1, description="runs that go on at once")] = None


class KeysRequired(_Part):
    """Variables that must be set, by what cannot be done without them."""

    gate: Annotated[tuple[str, ...], Field(description="the tools are offered")] = ()
    start: Annotated[tuple[str, ...], Field(description="a run starts")] = ()
    test: Annotated[tuple[str, ...], Field(description="an environment is tested")] = ()


class Policy(_Part):
    """What holds for every run that is started on this machine."""

    name: str = "default"
    lock: Annotated[dict[str, Any], Field(description="section.field -> the value that holds")] = {}
    unlock: Annotated[
        tuple[str, ...], Field(description="locks of the policy that it extends, which it leaves out")
    ] = ()
    caps: Caps = Caps()
    min_status_interval_s: Annotated[float, Field(ge=0, description="between two looks at an unchanged run")] = 0
    require_keys: Annotated[KeysRequired, Field(description="variables that must be set; a list: to start")] = (
        KeysRequired()
    )

    @field_validator("require_keys", mode="before")
    @classmethod
    def _to_start(cls, given: Any) -> Any:
        return {"start": given} if isinstance(given, list | tuple) else given

    @field_validator("unlock")
    @classmethod
    def _keys(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_meant(name) for name in given)

    @field_validator("lock", mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        """`{section: {field: value}}` and `{section.field: value}` mean the same; so does a name that is clear."""
        if not isinstance(given, Mapping):
            return given
        flat: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(value, Mapping) and "." not in str(name):
                flat.update({_meant(f"{name}.{field}"): item for field, item in value.items()})
            else:
                flat[_meant(str(name))] = value
        return flat


DEFAULT = Policy()

HERMES_COMPAT = Policy(
    name="hermes-compat",
    lock={
        "inference.model": "Qwen/Qwen3-8B",
        "env.max_token_length": 8192,
        "env.max_num_workers": 2048,
        "env.worker_timeout": 3600,
        "env.max_batches_offpolicy": 3,
        "env.inference_weight": 1.0,
        "env.eval_limit_ratio": 0.1,
        "env.use_wandb": True,
        "env.rollout_server_url": "http://localhost:8000",
        "trainer.total_steps": 2500,
        "trainer.eval_every": 25,
        "trainer.lora_rank": 32,
        "trainer.learning_rate": 4e-5,
        "trainer.max_token_trainer_length": 9000,
        "trainer.checkpoint_every": 25,
    },
    min_status_interval_s=1800,
    require_keys=KeysRequired(
        gate=("TINKER_API_KEY", "WANDB_API_KEY"), start=("TINKER_API_KEY",), test=("OPENROUTER_API_KEY",)
    ),
)
"""What the seeds locked and asked for (seed 002, LOCKED_FIELDS), in our sections. Addresses are wiring
everywhere: the one told is the seeds', a run's own is written into its config file."""

BUILT_IN: Mapping[str, Policy] = {policy.name: policy for policy in (DEFAULT, HERMES_COMPAT)}


def load_policy(home: Path | None = None) -> Policy:
    """The policy of HALTERES_HOME, or the default one where there is no file. InvalidConfig lists every problem."""
    file = (home or environ.home()) / FILE
    try:
        told = yaml.safe_load(file.read_text()) or {}
    except FileNotFoundError:
        return DEFAULT
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise _unreadable(file, " ".join(str(error).split())) from error
    if isinstance(told, str):  # the file is the name of a policy
        told = {"extends": told}
    if not isinstance(told, Mapping):
        raise _unreadable(file, "it holds no fields")
    return _policy(file, {str(name): value for name, value in told.items()})


def _policy(file: Path, told: dict[str, Any]) -> Policy:
    parent = told.pop("extends", "default")
    base = BUILT_IN.get(str(parent))
    if base is None:
        raise _unusable(
            file, [Problem(field="extends", got=parent, rule="there is no such policy", suggest=tuple(BUILT_IN))]
        )
    try:
        own = Policy.model_validate({"name": base.name if base is not DEFAULT else file.stem, **told})
    except ValidationError as error:
        raise _unusable(file, [_problem(detail) for detail in error.errors(include_url=False)]) from error
    problems = [problem for name, value in own.lock.items() for problem in _lock_problems(name, value)]
    rule = f"the policy '{base.name}' locks no such setting"
    problems += [Problem(field="unlock", got=name, rule=rule) for name in own.unlock if name not in base.lock]
    if problems:
        raise _unusable(file, problems)
    merged = {name: getattr(own, name) for name in own.model_fields_set}
    kept = {name: value for name, value in base.lock.items() if name not in own.unlock}
    merged["lock"] = {**kept, **own.lock}
    merged["caps"] = base.caps.model_copy(update={name: getattr(own.caps, name) for name in own.caps.model_fields_set})
    return base.model_copy(update=merged)


def _lock_problems(key: str, value: Any) -> list[Problem]:
    """What is wrong with a lock. Of an environment's fields nothing is known here."""
    section, _, field = key.rpartition(".")
    if section == "env":
        return []
    if key not in OWN_KEYS:
        return [UnknownSetting(field=f"lock.{key}", got=value, did_you_mean=nearest_setting(key))]
    if why := wiring_of(SECTIONS[section]).get(field):
        return [Problem(field=f"lock.{key}", got=value, rule=why)]
    try:
        SECTIONS[section].model_validate({field: value})
    except ValidationError as error:
        rule = error.errors(include_url=False)[0]["msg"].replace("Input should be", "must be")
        return [Problem(field=f"lock.{key}", got=value, rule=rule)]
    return []


def _problem(detail: Any) -> Problem:
    path = ".".join(str(part) for part in detail["loc"])
    rule = detail["msg"].replace("Input should be", "must be")
    if detail["type"] == "extra_forbidden":
        rule = "there is no such field"
    return Problem(field=path, got=detail["input"], rule=rule, did_you_mean=nearest(path, Policy.model_fields))


def _unusable(file: Path, problems: list[Problem]) -> HalteresError:
    """Whoever asks for settings did nothing wrong: it is the file that has to be mended."""
    return InvalidConfig(
        f"The policy file {file} cannot be used.",
        "; ".join(problem.sentence for problem in problems),
        "Mend it, or remove it.",
        problems=[problem.facts for problem in problems],
    )


def _unreadable(file: Path, why: str) -> HalteresError:
    return InvalidConfig(f"The policy file {file} cannot be read.", f"{why}.", "Mend it, or remove it.")
