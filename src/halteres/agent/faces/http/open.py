"""What may be asked of the seed's routes without the token: every user of this machine reaches them.

Owns: that no such request names a file or a program, which would then run as this server's user, nor a model that its
user's key pays for.
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
    """The refusal of a call that would choose what runs by more than an environment's name, or spend this server's
    key; None of any other."""
    named = arguments.get(NAMES_AN_ENVIRONMENT.get(tool, ""))
    if isinstance(named, str) and ("/" in named or named.endswith(".py")):
        return TokenNeeded("Without the token an environment is chosen by its name, not by its file.", _WHY, _NEXT)
    for setting in _settings(arguments):
        if Edit(name=setting, value=None).key in NAMES_A_PROGRAM:
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
_WHY = "What it names would run as this server's user, and every user of this machine can ask here."


def _settings(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Names of the settings that a call changes, in either form of it."""
    changes = arguments.get("changes")
    for name in (arguments.get("field"), *(changes if isinstance(changes, dict) else ())):
        if isinstance(name, str):
            yield name
