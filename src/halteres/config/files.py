"""The settings of a run from a file and edits, in one step; and the recipes, which are other programs' settings.

Order: defaults, then the file, then edits, then what the operator's policy holds; an environment's own defaults are its
`config_init` and its `trainer_defaults`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from halteres.config.edits import ENVIRONMENT, Edit, read_edit
from halteres.config.operator_policy import Policy, load_policy
from halteres.config.problem import Problem, UnknownSetting
from halteres.config.projection import Sections, from_seed_format, is_seed_format
from halteres.config.resolve import Gathering, Resolved
from halteres.config.settings import SECTIONS, Settings, wiring_of
from halteres.errors import InvalidConfig, NotFound, nearest, unknown

__all__ = ["Resolved", "load_settings", "resolve_settings", "settings_schema"]


def load_settings(
    environment: str | None, file: Path | None, edits: Sequence[str], *, base: Settings | None = None
) -> Settings:
    """The settings of a run, validated; `resolve_settings` without the sources."""
    return resolve_settings(environment, file, edits, base=base).settings


def resolve_settings(
    environment: str | None,
    file: Path | None,
    edits: Sequence[str],
    *,
    base: Settings | None = None,
    changes: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
) -> Resolved:
    """The settings of a run, validated, and where those come from that were given.

    Args:
        environment: name or path; beats the file's.
        file: YAML in our sections or in the seeds' format.
        edits: `section.field=value`, or a bare field where only one section has it; values are YAML.
        base: settings to start from instead of the defaults (a resumed run's).
        changes: edits whose values are typed (JSON), by the same names.
        policy: what the operator locks and caps; default: the policy in force.

    Raises:
        InvalidConfig: with every problem at once; UnknownField, LockedField or PolicyCap where it is the only one.
        NotFound: no such environment or file.
    """
    gathering = Gathering(policy=load_policy() if policy is None else policy)
    for name, values in (base.model_dump(exclude_unset=True) if base else {}).items():
        gathering.sections[name].update(values)
    if file is not None:
        gathering.add_file(_read_sections(file, gathering.problems))
    for edit in (*map(read_edit, edits), *(Edit(name=name, value=value) for name, value in (changes or {}).items())):
        gathering.add_edit(edit)
    if environment is not None:
        gathering.put(ENVIRONMENT, environment, "edit")
    return gathering.settle()


def settings_schema() -> dict[str, Any]:
    """JSON Schema of Settings; a field that only the supervisor writes carries `x-wiring` with the reason."""
    schema = Settings.model_json_schema()
    for model in SECTIONS.values():
        for name, why in wiring_of(model).items():
            schema["$defs"][model.__name__]["properties"][name]["x-wiring"] = why
    return schema


def _read_sections(file: Path, problems: list[Problem]) -> Sections:
    """The sections of a file, in whichever of the two formats."""
    try:
        data = yaml.safe_load(file.read_text()) or {}
    except OSError as error:
        raise InvalidConfig(f"Config file {file} cannot be read.", f"{error.strerror}.", "Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise InvalidConfig(f"Config file {file} is not YAML.", f"{where}.", "Mend it and try again.") from error
    if not isinstance(data, Mapping):
        raise InvalidConfig(f"Config file {file} holds no sections.", next="Start with `env:` or `trainer:`.")
    if is_seed_format(data):
        return from_seed_format(data, problems)
    known = ("run", "env", "inference", "trainer")
    given: Sections = {}
    for name, values in data.items():
        if name not in known:
            problems.append(UnknownSetting(field=name, got=values, did_you_mean=nearest(name, known)))
        elif not isinstance(values, Mapping):
            problems.append(Problem(field=name, got=values, rule="must be a section of fields"))
        else:
            given[name] = {str(key): value for key, value in values.items()}
    return given


@dataclass(frozen=True, slots=True)
class RecipeField:
    """One name of the program."""

    key: str  # section.field of ours; "": it has no effect here
    default: str  # as text; "": ours holds
    note: str = ""  # where it does not mean quite the same
    value: Callable[[str], str] = str  # of ours, made of the program's


@dataclass(frozen=True, slots=True)
class Recipe:
    """The command line of a program."""

    fields: Mapping[str, RecipeField]
    further: Mapping[str, str]  # settings that the program has without a name for them

    def edits(self, assignments: Sequence[str]) -> list[str]:
        """What `--set` would be given for these `name=value` of the program, its defaults included.

        Raises:
            InvalidConfig: a name is not the program's, something is no assignment, or a value is none of its name's.
        """
        values = {name: field.default for name, field in self.fields.items()}
        for assignment in assignments:
            name, is_assigned, value = assignment.partition("=")
            if not is_assigned:
                raise InvalidConfig(f"'{assignment}' is no setting.", "A setting is NAME=VALUE.")
            if name not in self.fields:
                raise unknown(InvalidConfig, "field of the recipe", name, self.fields)
            values[name] = value
        edits = [f"{key}={value}" for key, value in self.further.items()]
        given = ((field, values[name]) for name, field in self.fields.items())
        return edits + [
            f"{field.key}={field.value(text)}" for field, text in given if field.key and text not in ("", "None")
        ]

    def notes(self, assignments: Sequence[str]) -> list[str]:
        """What is to be known of the fields that were given."""
        named = [assignment.partition("=")[0] for assignment in assignments]
        return [f"{name}: {field.note}" for name, field in self.fields.items() if field.note and name in named]


def _estimator(use_rebn: str) -> str:
    if use_rebn.lower() in ("true", "1", "yes"):
        return "rebn"
    if use_rebn.lower() in ("false", "0", "no"):
        return "reinforce"
    raise InvalidConfig(f"use_rebn={use_rebn} cannot be used.", "It is neither true nor false.", "Give one of them.")


GEM = Recipe(
    {
        "model_name": RecipeField("inference.model", "", "the script's default is Qwen/Qwen3-4B-Instruct-2507"),
        "batch_size": RecipeField(
            "env.batch_size", "64", "counts whole episodes here, and all their turns are trained on"
        ),
        "learning_rate": RecipeField("trainer.learning_rate", "4e-5"),
        "lora_rank": RecipeField("trainer.lora_rank", "8"),
        "max_tokens": RecipeField("env.max_new_tokens", "1024"),
        "seed": RecipeField("run.seed", "0", "seeds games, sampling and the adapter; the script never reads it"),
        "max_steps": RecipeField("trainer.total_steps", "20"),
        "save_every": RecipeField("trainer.checkpoint_every", "5"),
        "env_id": RecipeField("run.environment", "game:GuessTheNumber-v0-easy"),
        "num_env": RecipeField("env.max_num_workers", "32", "episodes at once; a slot that is free takes the next"),
        "env_wrappers": RecipeField("env.env_wrappers", "concat"),
        "template": RecipeField(
            "env.template", "qwen3_game", "the wording; the markup is the model's own", value=json.dumps
        ),
        "gamma": RecipeField("trainer.gamma", "0.9"),
        "use_rebn": RecipeField("trainer.advantage", "True", value=_estimator),
        "wandb_project": RecipeField("run.wandb_project", ""),
        "wandb_name": RecipeField("run.name", ""),
        "log_dir": RecipeField("", "", "has no effect: a run has a directory of its own"),
    },
    {"env.group_size": "1", "env.max_token_length": "4096", "trainer.max_token_trainer_length": "4096"},
)
"""GEM's example script for Tinker: text games by REINFORCE with return batch normalisation."""

RECIPES: Mapping[str, Recipe] = {"gem": GEM}  # by the name that `halteres train --recipe` takes


def find_recipe(name: str) -> Recipe:
    """The recipe of this name. NotFound names the nearest."""
    if name not in RECIPES:
        raise unknown(NotFound, "recipe", name, RECIPES)
    return RECIPES[name]
