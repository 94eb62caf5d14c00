"""What may be asked of the seed's routes without the token: every user of this machine reaches them.

Owns: that no such request names a program, a file or a folder, which would be run, read or written as this server's
user.
Never: authenticates anybody (`guard`), decides what may be asked with the token, whose key a test spends (`testing`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from halteres.agent.caller import TokenNeeded
from halteres.agent.trial.request import LOCAL
from halteres.config.edits import ENVIRONMENT, Edit
from halteres.config.environment_name import is_path
from halteres.models import known_folder, model_folder
from halteres.runs.starting.base_model import shelf

NAMES_A_PROGRAM: Final = frozenset({ENVIRONMENT, "run.interpreter", "run.working_directory"})
"""Settings whose value is run, or says which files of a user are read by what is run."""

NAMES_A_FOLDER: Final = frozenset(
    {"env.spool_dir", "env.data_dir_to_save_evals", "env.data_path_to_save_groups", "run.sinks"}
)
"""Settings whose value is, or decides, where something is written."""

MODEL: Final = "inference.model"

IS_TEXT: Final = frozenset({"env.system_prompt"})
"""Settings of an environment whose value may look like a path: Qwen3's "/no_think"."""

NAMES_AN_ENVIRONMENT: Final[Mapping[str, str]] = {
    "rl_select_environment": "name",
    "rl_start_training": "environment",
}
"""Tool -> its argument that may be the path of a file."""

_PATH: Final = re.compile(r"/|~|file:|\.[\w/]|\.$")
"""How a path that leads elsewhere begins, or one of a hidden file; not ".*", a pattern."""

_WHY = "What it names would be run, read or written as this server's user"


def beyond_open(tool: str, arguments: Mapping[str, Any]) -> TokenNeeded | None:
    """The refusal of a call that would choose what runs by more than an environment's name, or reach a folder by its
    path; None of any other."""
    named = arguments.get(NAMES_AN_ENVIRONMENT.get(tool, ""))
    if isinstance(named, str) and is_path(named):
        return TokenNeeded.of("Without the token an environment is chosen by its name, not by its file.", _WHY)
    for setting, value in _settings(arguments):
        key = Edit(name=setting, value=None).key
        is_text = not key.startswith("env.") or key in IS_TEXT
        if key in NAMES_A_PROGRAM | NAMES_A_FOLDER or (not is_text and _is_path(value)):
            return TokenNeeded.of(f"'{setting}' cannot be set without the token.", _WHY, field=setting)
        if key == MODEL and _is_model_elsewhere(value):
            what = "Without the token a model is named, or a run, or tinker:// weights of one: not a folder."
            return TokenNeeded.of(what, _WHY, field=setting)
    return None


def _settings(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that a call changes and their values, in either form of it; a model to test is one."""
    changes, models = arguments.get("changes"), arguments.get("models")
    yield from (changes if isinstance(changes, dict) else {}).items()
    yield from ((MODEL, model) for model in (models if isinstance(models, list) else ()))
    if isinstance(name := arguments.get("field"), str):
        yield name, arguments.get("value")


def _is_model_elsewhere(value: Any) -> bool:
    """Whether it is a folder neither built-in nor on the shelf: also one below the server's working directory."""
    name = value.removeprefix(LOCAL) if isinstance(value, str) else ""
    return _is_path(name) or (known_folder(name, shelf()) is None and model_folder(name, shelf()) is not None)


def _is_path(value: Any) -> bool:
    """Whether a value, or one within it, leads elsewhere than to a name below a folder of ours: `openai/gsm8k` does
    not."""
    if isinstance(value, dict | list):
        return any(map(_is_path, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and (_PATH.match(value) is not None or ".." in value.split("/"))
