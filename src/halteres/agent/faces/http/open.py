"""What may be asked of the seed's routes without the token: every user of this machine reaches them.

Owns: that no such request names a program, a file or a folder, which would be run, read or written as this server's
user, nor a model that its user's key pays for.
Never: authenticates anybody (`guard`), decides what may be asked with the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from halteres.agent.faces.token import FILE
from halteres.agent.trial.request import LOCAL
from halteres.config.edits import ENVIRONMENT, Edit
from halteres.errors import UserError
from halteres.models import model_folder
from halteres.runs.starting.base_model import shelf

NAMES_A_PROGRAM: Final = frozenset({ENVIRONMENT, "run.interpreter", "run.working_directory"})
"""Settings whose value is run, or says which files of a user are read by what is run."""

NAMES_A_FOLDER: Final = frozenset({"env.spool_dir", "env.data_dir_to_save_evals", "env.data_path_to_save_groups"})
"""Settings whose value is where something is written."""

MODEL: Final = "inference.model"

IS_TEXT: Final = frozenset({"env.system_prompt"})
"""Settings of an environment whose value may look like a path: Qwen3's "/no_think"."""

NAMES_AN_ENVIRONMENT: Final[Mapping[str, str]] = {
    "rl_select_environment": "name",
    "rl_start_training": "environment",
}
"""Tool -> its argument that may be the path of a file."""

TESTS = "rl_test_inference"

_NEXT = f"Send the token, which is in HALTERES_HOME/{FILE}: RL_API_URL=http://halteres:TOKEN@localhost:8080"


class TokenNeeded(UserError):
    """More than a caller without the token may ask for."""

    code, status = "unauthorized", 401


def beyond_open(tool: str, arguments: Mapping[str, Any]) -> TokenNeeded | None:
    """The refusal of a call that would choose what runs by more than an environment's name, reach a folder by its path,
    or spend this server's key; None of any other."""
    named = arguments.get(NAMES_AN_ENVIRONMENT.get(tool, ""))
    if isinstance(named, str) and ("/" in named or named.endswith(".py")):
        return TokenNeeded("Without the token an environment is chosen by its name, not by its file.", _WHY, _NEXT)
    for setting, value in _settings(arguments):
        key = Edit(name=setting, value=None).key
        may_be_path = key == MODEL or (key.startswith("env.") and key not in IS_TEXT)
        if key in NAMES_A_PROGRAM | NAMES_A_FOLDER or (may_be_path and _is_path(value)):
            return TokenNeeded(f"'{setting}' cannot be set without the token.", _WHY, _NEXT, field=setting)
    if tool == TESTS and not _is_local(arguments):
        return TokenNeeded("Without the token only models of this machine are tested.", _COSTS, _NEXT)
    return None


def _is_local(arguments: Mapping[str, Any]) -> bool:
    """Whether a test asks no endpoint: what is no list of names no tool takes, and the tool says so."""
    models = arguments.get("models")
    names = [name for name in models if isinstance(name, str)] if isinstance(models, list) else []
    return arguments.get("backend") != "openrouter" and all(
        name.startswith(LOCAL) or model_folder(name, shelf()) is not None for name in names
    )


_COSTS = "Others are asked with this server's OPENROUTER_API_KEY, and every user of this machine can ask here."
_WHY = "What it names would be run, read or written as this server's user, and every user of this machine can ask here."


def _settings(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that a call changes and their values, in either form of it; a model to test is one."""
    changes, models = arguments.get("changes"), arguments.get("models")
    yield from (changes if isinstance(changes, dict) else {}).items()
    yield from ((MODEL, model) for model in (models if isinstance(models, list) else ()))
    if isinstance(name := arguments.get("field"), str):
        yield name, arguments.get("value")


def _is_path(value: Any) -> bool:
    """Whether a value leads elsewhere than to a name below a folder of ours: `Qwen/Qwen3-0.6B` does not."""
    path = value.removeprefix(LOCAL) if isinstance(value, str) else ""
    return path.startswith(("/", "~", ".")) or ".." in path.split("/")
