"""What may not be set: what a run fills in itself, and what the operator's policy holds.

Owns: the noun `Lock`; which locks there are beside an environment; whether a value is the one that is held; the cap on
steps.
Never: reads the policy file (`policies`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from halteres.config import environ
from halteres.config.discovery import joined_name, split_name
from halteres.config.edits import Edit
from halteres.config.policies import BUILT_IN, FILE, Policy, PolicyCap
from halteres.config.problem import LockedSetting, Problem
from halteres.config.program import EnvironmentProgram
from halteres.config.settings import ENV_WIRING, SECTIONS, wiring_of
from halteres.errors import InvalidConfig

UNKNOWN_YET = "filled in by the run"
"""Told as the value of wiring that nobody knows before there is a run."""


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
        told = locks.get(key)
        locks[key] = replace(told, value=value) if told else policy_lock(key, value, policy)
    return locks


def wiring_lock(key: str, env_config: Mapping[str, Any]) -> Lock | None:
    """The lock on a field that a run fills in itself; None where this is none."""
    section, _, field = key.partition(".")
    wiring = ENV_WIRING if section == "env" else wiring_of(SECTIONS[section])
    if field not in wiring:
        return None
    value = env_config.get(field)
    return Lock(key=key, value=UNKNOWN_YET if value is None else value, why=wiring[field])


def variant_lock(environment: EnvironmentProgram) -> Lock | None:
    """The lock on the setting that says which variant of a family an environment is; None of any other."""
    family, variant = split_name(environment.name)
    if not variant:
        return None
    why = f"it is part of the environment's name: select {joined_name(family, 'VARIANT')}"
    return Lock(key="env.variant", value=variant, why=why)


def policy_lock(key: str, value: Any, policy: Policy) -> Lock:
    """The lock of a policy."""
    return Lock(key=key, value=value, why=f"the policy '{policy.name}' holds it at {json.dumps(value, default=str)}")


def how_to_unlock(key: str, policy: Policy) -> str:
    """What the operator does who wants all of a policy but this lock."""
    extends = f"`extends: {policy.name}` and " if policy.name in BUILT_IN else ""
    file = environ.home() / FILE
    return f"The policy '{policy.name}' locks {key}; {extends}`unlock: [{key}]` in {file} keep the rest of it."


def policy_locks(policy: Policy, env_fields: Collection[str]) -> dict[str, Any]:
    """A policy's locks, those of fields that the environment does not have passed over; it may not tell any."""
    return {
        key: value
        for key, value in policy.lock.items()
        if not key.startswith("env.") or not env_fields or key.removeprefix("env.") in env_fields
    }


def is_own_wiring(env_field: str) -> bool:
    """Whether a run fills this field in from nothing of ours that can be set: an address, a folder."""
    return Edit(name=env_field, value=None).key == f"env.{env_field}"


def same(key: str, one: Any, other: Any) -> bool:
    """Whether two values of a setting mean the same: 32, "32" and 32.0 do where a number belongs."""
    return _meaning(key, one) == _meaning(key, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverCap(Problem):
    """More than the operator's policy allows."""

    cap: str
    limit: float

    def alone(self, next: str) -> InvalidConfig:
        """`policy_cap`, with the cap and its file."""
        what = f"{self.field} = {self.got} is more than this machine's policy allows."
        facts = {"problems": [self.facts], "field": self.field, "cap": self.cap, "limit": self.limit}
        return PolicyCap(what, f"{self.rule[:1].upper()}{self.rule[1:]}.", next, **facts)


def over_cap(policy: Policy, total_steps: int) -> OverCap | None:
    """The problem with so many steps; None where they are within the cap."""
    limit = policy.caps.max_steps
    if limit is None or total_steps <= limit:
        return None
    rule = f"caps.max_steps is {limit} in {environ.home() / FILE}"
    return OverCap(
        field="trainer.total_steps", got=total_steps, rule=rule, suggest=(limit,), cap="max_steps", limit=limit
    )


def _meaning(key: str, value: Any) -> Any:
    section, _, field = key.partition(".")
    try:
        if section in SECTIONS:
            return getattr(SECTIONS[section].model_validate({field: value}), field)
        return value if isinstance(value, bool) else float(value)
    except (ValidationError, TypeError, ValueError):
        return value
