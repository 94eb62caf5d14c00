"""The rewards of a run's environment: reward models in local folders, which the run serves itself; functions, rubrics.

Owns: where in an environment's settings they are named (`rewards`, `panel`, `reward_model_path`); their check before
the run; what is written in place of a reward model for the environment's process: addresses.
Never: starts the server (`supervision`), knows what a reward is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from halteres.config.settings import Settings
from halteres.errors import HalteresError, InvalidConfig, NotFound, nearest
from halteres.rewards.model_folder import ModelFolder, read_model_folder
from halteres.rewards.rubrics import read_rubric
from halteres.rewards.scorer import places_of
from halteres.runs.starting.check import Check, attempt
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


def reward_folders(env: Mapping[str, Any]) -> tuple[Path, ...]:
    """The local folders, each once, in order."""
    return tuple(dict.fromkeys(Path(place).expanduser() for place in _places(env) if not is_address(place)))


def with_absolute_folders(settings: Settings) -> Settings:
    """The settings with folders, and files of functions and rubrics, named as they are from anywhere."""
    env = dict(settings.env)
    for name in LISTS:
        if components := _components(env.get(name)):
            env[name] = [_with_absolute_files(component) for component in components]
    moved = settings if env == settings.env else settings.model_copy(update={"env": env})
    return with_places(moved, lambda folder: str(folder.absolute()))


def with_places(settings: Settings, place_of: Callable[[Path], str]) -> Settings:
    """The settings with something else in place of each local folder."""
    if not reward_folders(settings.env):
        return settings
    env = dict(settings.env)
    for name in LISTS:
        if components := _components(env.get(name)):
            env[name] = [_moved(component, "model", place_of) for component in components]
    return settings.model_copy(update={"env": _moved(env, SHORT, place_of)})


def examine_reward_models(env: Mapping[str, Any]) -> tuple[list[Check], list[ModelFolder]]:
    """A check per folder, and those that are reward models."""
    checks, found = list[Check](), list[ModelFolder]()
    for folder in reward_folders(env):
        try:
            found.append(read_model_folder(folder))
            checks.append(Check(name="reward model", found=str(found[-1].path)))
        except HalteresError as error:
            error.details.setdefault("field", _field_of(env, folder))
            checks.append(Check(name="reward model", ok=False, failure=error))
    return checks, found


def examine_components(env: Mapping[str, Any]) -> list[Check]:
    """A check per function in a file and per rubric, which the environment would fail at as soon as it begins.

    A function of a module is the environment's to find: its interpreter and its folder are others.
    """
    checks = list[Check]()
    for name in LISTS:
        for component in _components(env.get(name)):
            function, rubric = component.get("function"), component.get("rubric")
            if isinstance(function, str) and function.rpartition(":")[0].endswith(".py"):
                checks.append(attempt("reward function", lambda named=function: _check_function(named))[0])
            if rubric and (not isinstance(rubric, str) or "\n" in rubric or rubric.endswith(RUBRIC_FILES)):
                checks.append(attempt("rubric", lambda given=rubric: read_rubric(given))[0])
            for failure in (check.failure for check in checks if check.failure):
                failure.details.setdefault("field", f"env.{name}")
    return checks


def server_bytes(models: Sequence[ModelFolder]) -> int:
    """What a run's reward server needs at its peak."""
    return SERVER_BYTES + WORKING_BYTES + sum(model.num_bytes for model in models) if models else 0


def _places(env: Mapping[str, Any]) -> Iterator[str]:
    for name in LISTS:
        for component in _components(env.get(name)):
            yield from _split(component.get("model"))
    yield from _split(env.get(SHORT))


def _components(given: Any) -> list[dict[str, Any]]:
    """A list of components, which may have come as YAML; what is none is for the environment to refuse."""
    if isinstance(given, str):
        try:
            given = yaml.safe_load(given)
        except yaml.YAMLError:
            return []
    return [component for component in given or () if isinstance(component, dict)] if isinstance(given, list) else []


def _split(given: Any) -> list[str]:
    """What is no string is for the environment to refuse."""
    return places_of(given) if isinstance(given, str) else []


def _moved(values: Mapping[str, Any], name: str, place_of: Callable[[Path], str]) -> dict[str, Any]:
    places = _split(values.get(name))
    if not places:
        return dict(values)
    replaced = (place if is_address(place) else place_of(Path(place).expanduser()) for place in places)
    return {**values, name: ",".join(replaced)}


def _with_absolute_files(component: Mapping[str, Any]) -> dict[str, Any]:
    """A component whose function's file and whose rubric's are named as they are from anywhere."""
    absolute = dict(component)
    function, rubric = absolute.get("function"), absolute.get("rubric")
    file, colon, name = function.rpartition(":") if isinstance(function, str) else ("", "", "")
    if file.endswith(".py"):
        absolute["function"] = f"{Path(file).expanduser().absolute()}{colon}{name}"
    if isinstance(rubric, str) and Path(rubric).suffix in RUBRIC_FILES:
        absolute["rubric"] = str(Path(rubric).expanduser().absolute())
    return absolute


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _check_function(function: str) -> None:
    """NotFound or InvalidConfig where the file is not there, is no Python, or defines nothing of the name."""
    place, _, name = function.rpartition(":")
    file = Path(place).expanduser()
    try:
        tree = ast.parse(file.read_bytes())
    except FileNotFoundError as error:
        beside = nearest(file.name, [one.name for one in file.parent.glob("*.py")])
        raise NotFound(
            f"There is no file {file} for the reward function '{name}'.",
            next=f"Did you mean {file.parent / beside}?" if beside else "Name the file that defines it.",
        ) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidConfig(f"The reward function '{function}' cannot be read.", f"{error}.", "Mend it.") from error
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bound = {node.asname or node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)}
    if not bound & {name, "*"}:
        guess = nearest(name, defined)
        raise InvalidConfig(
            f"There is no function '{name}' in {file}.",
            f"It defines {', '.join(defined) or 'none'}.",
            f"Did you mean '{guess}'?" if guess else "",
        )


def _field_of(env: Mapping[str, Any], folder: Path) -> str:
    named = [name for name in FIELDS if folder in reward_folders({name: env.get(name)})]
    return f"env.{named[0]}"
