"""GEM's names: what to use in the place of its environments that are no games played here, and its
example script.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from halteres.errors import HalteresError, InvalidConfig, NotFound, unknown


@dataclass(frozen=True, slots=True)
class Family:
    """Ids that begin alike."""

    prefix: str
    # played here; an environment of ours stands in; there is none
    kind: Literal["native", "adapter", "refused"]
    why: str = ""  # the prefix is not native
    instead: str = ""
    environment: str | None = None  # the one of ours that stands in


_RUNS_CODE = "Its questions are a data set, whose scorer runs what the model wrote on tests."

OTHER_FAMILIES = (
    Family(
        "game:Crosswords",
        "refused",
        "Its words and clues come from GEM's own data.",
        "game:WordSearch-v1-easy is the nearest game.",
    ),
    Family(
        "game:WikiGame",
        "refused",
        "It walks through Wikipedia, which a server has to serve.",
        "Take a game that needs none, e.g. game:WordSearch-v1-easy.",
    ),
    Family("game:", "native"),
    Family(
        "rg:",
        "adapter",
        "Its tasks are made and scored by the package reasoning-gym, in a process of its own.",
        "Use the environment reasoning_gym with env.task={name!r}.",
        "reasoning_gym",
    ),
    Family(
        "math:GSM8K",
        "adapter",
        "Its questions are a data set.",
        "Use the environment gsm8k_tinker.",
        "gsm8k_tinker",
    ),
    Family(
        "math:ASDiv2K",
        "adapter",
        "Its questions are a data set, whose answers are numbers.",
        "Use the environment gsm8k_tinker, with env.dataset=<a .jsonl file of its questions and "
        "answers>.",
        "gsm8k_tinker",
    ),
    Family(
        "math:",
        "refused",
        "Its answers are formulas, or its questions pictures, which no scorer here compares.",
        "Where answers are numbers, use gsm8k_tinker with env.dataset; else write an environment "
        "of your own.",
    ),
    Family(
        "code:",
        "refused",
        _RUNS_CODE,
        "Write an environment of your own, whose scorer runs code with PythonTool.",
    ),
    Family(
        "qa:",
        "refused",
        "Its questions are a data set, whose answers are words.",
        "Write an environment of your own that reads it and compares the answers.",
    ),
    Family(
        "logic:",
        "refused",
        "Its questions are a data set.",
        "Use the environment reasoning_gym, e.g. with env.task='knights_knaves'.",
    ),
    Family(
        "eval:CodeContest",
        "refused",
        _RUNS_CODE,
        "Write an environment of your own with these questions held out, whose scorer runs code "
        "with PythonTool.",
    ),
    Family(
        "eval:",
        "refused",
        "Its questions are a data set to evaluate on.",
        "Write an environment of your own with these questions held out, and evaluate it with "
        "rl_evaluate.",
    ),
)
"""The first prefix that fits an id holds."""


def family_of(id: str) -> Family | None:
    """The family of an id of GEM's, or None where it has no such prefix."""
    return next((family for family in OTHER_FAMILIES if id.startswith(family.prefix)), None)


def stands_for(id: str) -> InvalidConfig | None:
    """The error that says what takes the place of an id of GEM's; None where it may be a game that
    is played here.
    """
    family = family_of(id)
    if family is None or family.kind == "native":
        return None
    instead = family.instead.format(name=id.removeprefix(family.prefix))
    return InvalidConfig(f"{id} is no game that is played here.", family.why, instead)


def not_a_game(id: str, games: Iterable[str]) -> HalteresError:
    """The error for an id that is none of `games`: it says what takes its place, or names the
    nearest game.
    """
    return stands_for(id) or unknown(NotFound, "game", id, games)


@dataclass(frozen=True, slots=True)
class RecipeField:
    """One name of the program."""

    key: str  # section.field of ours; "": it has no effect here
    default: str  # as text; "": ours holds
    note: str = ""  # where it does not mean quite the same
    value: Callable[[str], str] = str  # of ours, made of the program's


@dataclass(frozen=True, slots=True)
class Recipe:
    """The command line of another program, as settings of ours."""

    fields: Mapping[str, RecipeField]
    further: Mapping[str, str]  # settings that the program has without a name for them

    def edits(self, assignments: Sequence[str]) -> list[str]:
        """What `--set` would be given for these `name=value` of the program, its defaults included.

        Raises:
            InvalidConfig: a name is not the program's, something is no assignment, or a value is
                none of its name's.
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
            f"{field.key}={field.value(text)}"
            for field, text in given
            if field.key and text not in ("", "None")
        ]

    def notes(self, assignments: Sequence[str]) -> list[str]:
        """What is to be known of the fields that were given."""
        names = [assignment.partition("=")[0] for assignment in assignments]
        return [
            f"{name}: {field.note}"
            for name, field in self.fields.items()
            if field.note and name in names
        ]


def _estimator(use_rebn: str) -> str:
    if use_rebn.lower() in ("true", "1", "yes"):
        return "rebn"
    if use_rebn.lower() in ("false", "0", "no"):
        return "reinforce"
    raise InvalidConfig(
        f"use_rebn={use_rebn} cannot be used.", "It is neither true nor false.", "Give one of them."
    )


GEM = Recipe(
    {
        "model_name": RecipeField(
            "inference.model", "", "the script's default is Qwen/Qwen3-4B-Instruct-2507"
        ),
        "batch_size": RecipeField(
            "env.batch_size", "64", "counts whole episodes here, and all their turns are trained on"
        ),
        "learning_rate": RecipeField("trainer.learning_rate", "4e-5"),
        "lora_rank": RecipeField("trainer.lora_rank", "8"),
        "max_tokens": RecipeField("env.max_new_tokens", "1024"),
        "seed": RecipeField(
            "run.seed", "0", "seeds games, sampling and the adapter; the script never reads it"
        ),
        "max_steps": RecipeField("trainer.total_steps", "20"),
        "save_every": RecipeField("trainer.checkpoint_every", "5"),
        "env_id": RecipeField("run.environment", "game:GuessTheNumber-v0-easy"),
        "num_env": RecipeField(
            "env.max_num_workers", "32", "episodes at once; a slot that is free takes the next"
        ),
        "env_wrappers": RecipeField("env.env_wrappers", "concat"),
        "template": RecipeField(
            "env.template",
            "qwen3_game",
            "the wording; the markup is the model's own",
            value=json.dumps,
        ),
        "gamma": RecipeField("trainer.gamma", "0.9"),
        "use_rebn": RecipeField("trainer.advantage", "True", value=_estimator),
        "wandb_project": RecipeField("run.wandb_project", ""),
        "wandb_name": RecipeField("run.name", ""),
        "log_dir": RecipeField("", "", "has no effect: a run has a directory of its own"),
    },
    {
        "env.group_size": "1",
        "env.max_token_length": "4096",
        "trainer.max_token_trainer_length": "4096",
    },
)
"""GEM's example script for Tinker: text games by REINFORCE with return batch normalisation."""

RECIPES: Mapping[str, Recipe] = {"gem": GEM}  # by the name that `halteres train --recipe` takes


def find_recipe(name: str) -> Recipe:
    """The recipe of this name. NotFound names the nearest."""
    if name not in RECIPES:
        raise unknown(NotFound, "recipe", name, RECIPES)
    return RECIPES[name]
