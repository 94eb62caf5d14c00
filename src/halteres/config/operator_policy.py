"""The operator's policy file: what it locks and caps; and the locks on what a run fills in itself.

extends: hermes-compat          # or: default
unlock: [inference.model]       # of what that one locks; the rest of it holds
lock: {trainer: {learning_rate: 4.0e-5}, env.group_size: 8}    # names as in rl_edit_config will do
caps: {max_steps: 500, max_hours: 2, max_tokens: 5.0e7, max_concurrent_runs: 1, max_open_runs: 1}
min_status_interval_s: 0
require_keys: []                # to start; or: {gate: [], start: [], test: []}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from halteres.config import environ
from halteres.config.discovery import joined_name, split_name
from halteres.config.edits import IN_FILES, OWN_KEYS, Edit, nearest_setting
from halteres.config.problem import LockedSetting, Problem, UnknownSetting, rule_of
from halteres.config.program import EnvironmentProgram
from halteres.config.settings import ENV_WIRING, SECTIONS, setting, wiring_of
from halteres.documents import read_optional_document
from halteres.errors import InvalidConfig, nearest

FILE = "policy.yaml"

# the value shown of wiring that nobody knows before there is a run
UNKNOWN_YET = "filled in by the run"


class PolicyCap(InvalidConfig):
    """The operator's policy does not allow so much."""

    code, status = "policy_cap", 403


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Caps(_Part):
    """Budgets of one run, and how many may go on at once. None: no cap."""

    def at_once(self, *, is_open: bool) -> tuple[str, int | None]:
        """The cap on runs that go on at once, and its name; `is_open`: for a start without the
        token.
        """
        if is_open and (
            self.max_concurrent_runs is None or self.max_open_runs < self.max_concurrent_runs
        ):
            return "max_open_runs", self.max_open_runs
        return "max_concurrent_runs", self.max_concurrent_runs

    max_steps: int | None = setting(None, "optimiser steps of one run", ge=1)
    max_hours: float | None = setting(None, "hours of one run; a resumed one counts anew", gt=0)
    max_tokens: float | None = setting(
        None, "sampled tokens, or a file's tokens of answers, that one run trains on", gt=0
    )
    max_concurrent_runs: int | None = setting(None, "runs that go on at once", ge=1)
    max_open_runs: int = setting(
        4, "runs that go on at once where one more is started without the token", ge=0
    )


class KeysRequired(_Part):
    """Variables that must be set, by what cannot be done without them."""

    gate: tuple[str, ...] = setting((), "the tools are offered")
    start: tuple[str, ...] = setting((), "a run starts")
    test: tuple[str, ...] = setting((), "an environment is tested")


def _key_of(name: str) -> str:
    """The setting that a name means; an environment's field that the run fills in means ours that
    it is filled from.
    """
    field = name.removeprefix("env.")
    if name.startswith("env.") and field not in ENV_WIRING:
        return name
    return IN_FILES.get(field) or Edit(name=field, value=None).key


class Policy(_Part):
    """What holds for every run that is started on this machine."""

    name: str = "default"
    lock: dict[str, Any] = setting({}, "section.field -> the value that holds")
    unlock: tuple[str, ...] = setting(
        (), "locks of the policy that it extends, which it leaves out"
    )
    caps: Caps = Caps()
    min_status_interval_s: float = setting(0, "between two looks at an unchanged run", ge=0)
    require_keys: KeysRequired = setting(
        KeysRequired(), "variables that must be set; a list: to start"
    )

    @field_validator("require_keys", mode="before")
    @classmethod
    def _to_start(cls, given: Any) -> Any:
        if isinstance(given, list | tuple):
            return {"start": given}
        return given

    @field_validator("unlock")
    @classmethod
    def _keys(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_key_of, given))

    @field_validator("lock", mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        """`{section: {field: value}}` and `{section.field: value}` mean the same; so does a name
        that is clear.
        """
        if not isinstance(given, Mapping):
            return given
        flat: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(value, Mapping) and "." not in str(name):
                flat.update({_key_of(f"{name}.{field}"): item for field, item in value.items()})
            else:
                flat[_key_of(str(name))] = value
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
        gate=("TINKER_API_KEY", "WANDB_API_KEY"),
        start=("TINKER_API_KEY",),
        test=("OPENROUTER_API_KEY",),
    ),
)
"""What the seeds locked and asked for (seed 002, LOCKED_FIELDS), in our sections. Addresses are
wiring everywhere: the one here is the seeds', a run's own is written into its config file.
"""

BUILT_IN: Mapping[str, Policy] = {policy.name: policy for policy in (DEFAULT, HERMES_COMPAT)}


def load_policy(home: Path | None = None) -> Policy:
    """The policy of HALTERES_HOME, or the default one where there is no file. InvalidConfig lists
    every problem.
    """
    file = (home or environ.home()) / FILE
    given = read_optional_document(file, "policy file")
    if given is None:
        return DEFAULT
    if isinstance(given, str):  # the file is the name of a policy
        given = {"extends": given}
    if not isinstance(given, Mapping):
        raise _unreadable(file, "it holds no fields")
    fields = {str(name): value for name, value in given.items()}
    parent = str(fields.pop("extends", "default"))
    if parent not in BUILT_IN:
        problem = Problem(
            field="extends", got=parent, rule="there is no such policy", suggest=tuple(BUILT_IN)
        )
        raise _unusable(file, [problem])
    base = BUILT_IN[parent]
    try:
        own = Policy.model_validate({"name": file.stem if base is DEFAULT else base.name, **fields})
    except ValidationError as error:
        problems = list[Problem]()
        for detail in error.errors(include_url=False):
            path = ".".join(str(part) for part in detail["loc"])
            guess = nearest(path, Policy.model_fields)
            problems.append(
                Problem(field=path, got=detail["input"], rule=rule_of(detail), did_you_mean=guess)
            )
        raise _unusable(file, problems) from error
    problems = [
        problem for name, value in own.lock.items() if (problem := _lock_problem(name, value))
    ]
    rule = f"the policy '{base.name}' locks no such setting"
    problems += [
        Problem(field="unlock", got=name, rule=rule) for name in own.unlock if name not in base.lock
    ]
    if problems:
        raise _unusable(file, problems)
    locks = {name: value for name, value in base.lock.items() if name not in own.unlock} | own.lock
    changes = {name: getattr(own, name) for name in own.model_fields_set}
    caps = {name: getattr(own.caps, name) for name in own.caps.model_fields_set}
    return base.model_copy(
        update={**changes, "lock": locks, "caps": base.caps.model_copy(update=caps)}
    )


def _lock_problem(key: str, value: Any) -> Problem | None:
    section, _, field = key.rpartition(".")
    if section == "env":
        return None
    if key not in OWN_KEYS:
        return UnknownSetting(field=f"lock.{key}", got=value, did_you_mean=nearest_setting(key))
    rule = wiring_of(SECTIONS[section]).get(field)
    try:
        SECTIONS[section].model_validate({field: value})
    except ValidationError as error:
        rule = rule or rule_of(error.errors(include_url=False)[0])
    if rule:
        return Problem(field=f"lock.{key}", got=value, rule=rule)
    return None


def _unusable(file: Path, problems: list[Problem]) -> InvalidConfig:
    """Whoever asks for settings did nothing wrong: it is the file that is."""
    why = "; ".join(problem.sentence for problem in problems)
    facts = [problem.facts for problem in problems]
    return InvalidConfig(
        f"The policy file {file} cannot be used.", why, "Mend it, or remove it.", problems=facts
    )


def _unreadable(file: Path, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"The policy file {file} cannot be read.", f"{why}.", "Mend it, or remove it."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """One setting that may not be changed."""

    key: str  # section.field
    value: Any
    why: str

    def refused(self, name: str, got: Any) -> LockedSetting:
        """The problem with an edit under this name."""
        return LockedSetting(field=name, got=got, rule=self.why, locked_value=self.value)


def locks_beside(env_config: Mapping[str, Any], policy: Policy) -> dict[str, Lock]:
    """Every lock, by key, for an environment with these fields and values."""
    keys = [f"{section}.{name}" for section, model in SECTIONS.items() for name in wiring_of(model)]
    keys += [f"env.{name}" for name in ENV_WIRING if name in env_config and is_own_wiring(name)]
    locks = {lock.key: lock for key in keys if (lock := wiring_lock(key, env_config))}
    for key, value in policy_locks(policy, env_config).items():
        if key in locks:
            locks[key] = replace(locks[key], value=value)
        else:
            locks[key] = policy_lock(key, value, policy)
    return locks


def wiring_lock(key: str, env_config: Mapping[str, Any]) -> Lock | None:
    """The lock on a field that a run fills in itself; None where this is none."""
    section, _, field = key.partition(".")
    wiring = ENV_WIRING
    if section != "env":
        wiring = wiring_of(SECTIONS[section])
    if field not in wiring:
        return None
    value = env_config.get(field)
    return Lock(key=key, value=UNKNOWN_YET if value is None else value, why=wiring[field])


def variant_lock(environment: EnvironmentProgram) -> Lock | None:
    """The lock on the setting that says which variant of a family an environment is; None of any
    other.
    """
    family, variant = split_name(environment.name)
    why = f"it is part of the environment's name: select {joined_name(family, 'VARIANT')}"
    if variant:
        return Lock(key="env.variant", value=variant, why=why)
    return None


def policy_lock(key: str, value: Any, policy: Policy) -> Lock:
    """The lock of a policy."""
    return Lock(
        key=key,
        value=value,
        why=f"the policy '{policy.name}' holds it at {json.dumps(value, default=str)}",
    )


def policy_locks(policy: Policy, env_fields: Collection[str]) -> dict[str, Any]:
    """A policy's locks without those of fields that the environment does not have, if it says which
    it has.
    """
    return {
        key: value
        for key, value in policy.lock.items()
        if not key.startswith("env.") or not env_fields or key.removeprefix("env.") in env_fields
    }


def how_to_unlock(key: str, policy: Policy) -> str:
    """What the operator does who wants all of a policy but this lock."""
    extends = ""
    if policy.name in BUILT_IN:
        extends = f"`extends: {policy.name}` and "
    file = environ.home() / FILE
    return (
        f"The policy '{policy.name}' locks {key}; {extends}`unlock: [{key}]` in {file} keep "
        "the rest of it."
    )


def is_own_wiring(env_field: str) -> bool:
    """Whether a run fills this field in from nothing of ours that can be set: an address, a
    folder.
    """
    return Edit(name=env_field, value=None).key == f"env.{env_field}"


def is_same_value(key: str, one: Any, other: Any) -> bool:
    """Whether two values of a setting mean the same: 32, "32" and 32.0 do where a number
    belongs.
    """
    section, _, field = key.partition(".")

    def typed(value: Any) -> Any:
        try:
            if section in SECTIONS:
                return getattr(SECTIONS[section].model_validate({field: value}), field)
            if isinstance(value, bool):
                return value
            return float(value)
        except (ValidationError, TypeError, ValueError):
            return value

    return typed(one) == typed(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverCap(Problem):
    """More than the operator's policy allows."""

    cap: str
    limit: float

    def alone(self, next: str) -> InvalidConfig:
        """`policy_cap`, with the cap and its file."""
        what = f"{self.field} = {self.got} is more than this machine's policy allows."
        facts = {
            "problems": [self.facts],
            "field": self.field,
            "cap": self.cap,
            "limit": self.limit,
        }
        return PolicyCap(what, f"{self.rule[:1].upper()}{self.rule[1:]}.", next, **facts)


def over_cap(policy: Policy, total_steps: int) -> OverCap | None:
    """The problem with so many steps; None where they are within the cap."""
    limit, field = policy.caps.max_steps, "trainer.total_steps"
    if limit is None or total_steps <= limit:
        return None
    rule = f"caps.max_steps is {limit} in {environ.home() / FILE}"
    return OverCap(
        field=field, got=total_steps, rule=rule, suggest=(limit,), cap="max_steps", limit=limit
    )
