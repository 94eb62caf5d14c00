"""One change to one setting, typed (a tool's JSON) or as text (`--set`), and which setting its name
means.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from halteres.config.problem import Problem, UnknownSetting
from halteres.config.settings import ENV_WIRING, SECTIONS, wiring_of
from halteres.config.values import Word, schema_at
from halteres.errors import nearest
from halteres.logins import refused

ALIASES: Mapping[str, str] = {
    "model_name": "inference.model",
    "steps_per_eval": "trainer.eval_every",
    "save_checkpoint_interval": "trainer.checkpoint_every",
    "wandb_name": "run.name",
}
"""The seeds' names for our settings, where they differ from ours."""

IN_FILES: Mapping[str, str] = {"tokenizer_name": "inference.model"}
"""Wiring that in a file, a config's or a policy's, says what it is filled in from; as an edit it is
refused.
"""

SWITCHES: Mapping[str, str] = {
    "slurm": (
        "Halteres starts a run's processes on this machine: start it inside the job that "
        "SLURM gave you"
    ),
    "testing": (
        "to try settings without training use rl_test_inference, or rl_start_training with dry_run"
    ),
}
"""Settings of the seeds that can only be false here, with the reason."""

ENVIRONMENT = "run.environment"
"""It is selected rather than set: with another environment the other settings are not the same."""

OWN_KEYS = tuple(
    f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields
)
"""section.field of every setting of ours."""

CLOSE = 0.6  # how like a name must be to be offered: an agent follows the offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A name as it was given, and the new value."""

    name: str  # section.field, or a field that only one section has, or the seeds' name of one
    value: Any  # a Word where it was typed on a command line

    @property
    def key(self) -> str:
        """The setting it means, section.field; itself where that cannot be told."""
        place = self.place()
        if isinstance(place, str):
            return place
        return self.name

    def place(self) -> str | Problem:
        """The setting it means, section.field; a name that is none of ours may be the
        environment's.
        """
        section, _, field = self.name.rpartition(".")
        if section in (*SECTIONS, "env"):
            return self.name
        if section:  # an unknown one: perhaps the seeds' name of it
            key = IN_FILES.get(field) or Edit(name=field, value=self.value).key
            guess = key
            if key not in OWN_KEYS:
                guess = nearest(section, (*SECTIONS, "env"))
            return UnknownSetting(field=self.name, got=self.value, did_you_mean=guess)
        owners = [name for name, model in SECTIONS.items() if field in model.model_fields]
        if len(owners) > 1:
            return self.ambiguous([f"{owner}.{field}" for owner in owners])
        if owners:
            return f"{owners[0]}.{field}"
        return ALIASES.get(field, f"env.{field}")

    def ambiguous(self, choice: list[str]) -> Problem:
        """The problem with a name that means several settings."""
        rule = f"more than one section has it: write {' or '.join(choice)}"
        return Problem(field=self.name, got=self.value, rule=rule)


def read_edit(text: str) -> Edit | Problem:
    """An edit written as `name=value`. Blanks around the equals sign are no part of the value."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().rpartition(".")[2]:
        return Problem(field=refused(text), got=None, rule="write it as section.field=value")
    return Edit(name=name.strip(), value=Word(value if name == name.rstrip() else value.strip()))


def switch_refused(name: str, value: Any) -> Problem:
    """The problem with `slurm: true` and `testing: true`."""
    return Problem(field=name, got=value, rule=f"it can only be false here: {SWITCHES[name]}")


def short_name(key: str, env_fields: Collection[str]) -> str:
    """The shortest name that means this setting, beside an environment with these fields."""
    field = key.rpartition(".")[2]
    is_environments = field in env_fields and field not in ENV_WIRING
    is_clear = Edit(name=field, value=None).key == key and (
        key.startswith("env.") or not is_environments
    )
    if is_clear:
        return field
    return key


def names_beside(env_fields: Collection[str]) -> tuple[str, ...]:
    """Names of everything that can be set beside an environment with these fields, sorted."""
    theirs = [f"env.{name}" for name in env_fields if name not in ENV_WIRING]
    wiring = {
        f"{section}.{name}" for section, model in SECTIONS.items() for name in wiring_of(model)
    }
    ours = [key for key in OWN_KEYS if key not in wiring | {ENVIRONMENT}]
    seeds = [name for name in ALIASES if name in ENV_WIRING]
    return tuple(sorted([*seeds, *(short_name(key, env_fields) for key in (*theirs, *ours))]))


def nearest_setting(name: str, env_fields: Iterable[str] = ()) -> str | None:
    """The setting that a name was most likely meant for; ours with its section."""
    bare = name.rpartition(".")[2]
    if bare in ALIASES:
        return ALIASES[bare]
    ours = {key.rpartition(".")[2]: key for key in OWN_KEYS}
    close = difflib.get_close_matches(bare, [*ours, *env_fields], n=1, cutoff=CLOSE)
    if close:
        return ours.get(close[0], close[0])
    return None


def odd_numbers(schema: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of an environment's fields that are true or false where its JSON Schema has a
    number, or not finite.
    """
    for name, value in values.items():
        types = schema_at(schema, [name]).types
        if isinstance(value, bool) and "boolean" not in types and types & {"integer", "number"}:
            yield Problem(field=f"env.{name}", got=value, rule="must be a number")
        elif not is_finite(value):
            yield Problem(field=f"env.{name}", got=value, rule="must be a finite number")


def number_in_text(types: set[str], value: Any) -> float | None:
    """The number that a text says, for a field whose types are numbers and no texts; None where it
    says none.
    """
    if (
        not isinstance(value, str)
        or "string" in types
        or not {"integer", "number"}.intersection(types)
    ):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if "integer" in types and number.is_integer():
        return int(number)
    if "number" in types and math.isfinite(number):
        return number
    return None


def is_finite(value: Any) -> bool:
    """Whether every number in a value, however deep, is finite."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_finite, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, float) or math.isfinite(value)
