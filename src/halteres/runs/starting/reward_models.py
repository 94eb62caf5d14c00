"""The rewards of a run's environment that lie on this disk: reward models in folders, which the run serves itself.

An environment's settings name them (`rewards`, `panel`, `reward_model_path`); for the environment's process an address
is written in place of a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from halteres.config.settings import Settings
from halteres.rewards.model_folder import ModelFolder
from halteres.rewards.scorer import places_of
from halteres.scores import is_address

LISTS, SHORT = ("rewards", "panel"), "reward_model_path"
FIELDS = (*LISTS, SHORT)
"""Fields of an environment's settings that may name a reward model."""

RUBRIC_FILES = (".json", ".toml", ".yaml", ".yml")
"""Endings of a rubric's file; a rubric may also stand in the settings itself."""

SERVER_BYTES = 500_000_000
"""A reward server's process without a model: torch and transformers."""

WORKING_BYTES = 200_000_000
"""One forward pass of its limit of tokens, of a small model; of a large one it is a small part of its weights."""


def server_bytes(models: Sequence[ModelFolder]) -> int:
    """What a run's reward server needs at its peak."""
    return SERVER_BYTES + WORKING_BYTES + sum(model.num_bytes for model in models) if models else 0


def reward_folders(env: Mapping[str, Any]) -> tuple[Path, ...]:
    """The local folders, each once, in order."""
    models = [component.get("model") for name in LISTS for component in components_of(env.get(name))]
    places = [place for model in (*models, env.get(SHORT)) for place in _split(model)]
    return tuple(dict.fromkeys(Path(place).expanduser() for place in places if not is_address(place)))


def _split(given: Any) -> list[str]:
    """What is no string is for the environment to refuse."""
    return places_of(given) if isinstance(given, str) else []


def components_of(given: Any) -> list[dict[str, Any]]:
    """A list of components, which may have come as YAML; what is none is for the environment to refuse."""
    if isinstance(given, str):
        try:
            given = yaml.safe_load(given)
        except yaml.YAMLError:
            return []
    return [component for component in given or () if isinstance(component, dict)] if isinstance(given, list) else []


def with_absolute_folders(settings: Settings) -> Settings:
    """The settings with folders, and files of functions and rubrics, named as they are from anywhere."""

    def absolute(component: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        function, rubric = component.get("function"), component.get("rubric")
        file, colon, name = function.rpartition(":") if isinstance(function, str) else ("", "", "")
        if file.endswith(".py"):
            changes["function"] = f"{Path(file).expanduser().absolute()}{colon}{name}"
        if isinstance(rubric, str) and Path(rubric).suffix in RUBRIC_FILES:
            changes["rubric"] = str(Path(rubric).expanduser().absolute())
        return {**component, **changes}

    return with_places(_with_components(settings, absolute), lambda folder: str(folder.absolute()))


def with_places(settings: Settings, place_of: Callable[[Path], str]) -> Settings:
    """The settings with something else in place of each local folder."""

    def moved(values: Mapping[str, Any], name: str) -> dict[str, Any]:
        places = _split(values.get(name))
        replaced = (place if is_address(place) else place_of(Path(place).expanduser()) for place in places)
        return {**values, name: ",".join(replaced)} if places else dict(values)

    if not reward_folders(settings.env):
        return settings
    settings = _with_components(settings, lambda component: moved(component, "model"))
    return settings.model_copy(update={"env": moved(settings.env, SHORT)})


def _with_components(settings: Settings, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Settings:
    env = dict(settings.env)
    for name in LISTS:
        if components := components_of(env.get(name)):
            env[name] = [change(component) for component in components]
    return settings if env == settings.env else settings.model_copy(update={"env": env})
