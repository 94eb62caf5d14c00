"""An environment as a program: a file, what runs it, and what it says about itself.

Owns: its command lines and where they run; asking it `describe` (`caught` sees to it that it cannot harm us), once for
the same file and values.
Never: imports an environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from halteres.config import remembered
from halteres.config.discovery import EnvironmentBroken, broken, find_environment, last_line, split_name
from halteres.config.problem import Problem
from halteres.config.sandboxed_process import Ended, run_caught
from halteres.config.settings import RunSettings
from halteres.errors import NotFound

DEADLINE_S = 120.0
"""How long an environment may take to import and describe itself. Importing atroposlib and datasets takes 8 s of a
core, and a busy machine has a tenth of one; whoever waits less long finds the answer remembered when they ask again."""

DESCRIBE, LAUNCH = (Path(__file__).parent / "foreign" / name for name in ("describe.py", "launch.py"))
"""What asks a file that knows no `describe`, and what runs it; run by the environment's interpreter."""

IMPORTS_ATROPOSLIB = re.compile(rb"^\s*(from|import)\s+atroposlib\b", re.MULTILINE)

PROJECT = ("pyproject.toml", "setup.py", ".git")
"""The folder that holds one of these is a project."""

NOTHING_TO_EVALUATE = 3
"""Exit code of `evaluate` where an environment has no held-out tasks."""

MOST_KEPT = 256
"""Descriptions in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentProgram:
    """Where an environment lives and what runs it."""

    name: str
    path: Path  # absolute
    interpreter: str  # absolute path of a Python
    working_directory: Path  # absolute; where its commands run
    is_foreign: bool = False  # written for atroposlib: it knows no `describe` (whoever was not asked does not know)

    @property
    def variant_setting(self) -> dict[str, str]:
        """The setting `variant` of a family's environment, which its name says; nothing of any other."""
        variant = split_name(self.name)[1]
        return {"variant": variant} if variant else {}

    def command(self, verb: str, *arguments: str) -> tuple[str, ...]:
        """The command line of one of its verbs: serve, process, evaluate, describe."""
        return (self.interpreter, str(self.path), verb, *arguments)

    def command_in_run(self, verb: str, *arguments: str, metrics: Path, name: str) -> tuple[str, ...]:
        """The command line within a run. A foreign environment's figures, which it gives to W&B alone, are appended to
        `metrics`; `name` is the one under which it is to register. It does not evaluate by itself: the run does."""
        if not self.is_foreign:
            return self.command(verb, *arguments)
        script = (self.interpreter, str(LAUNCH), str(metrics), name)
        return (*script, str(self.path), verb, *arguments, "--env.use_wandb", "true", "--env.steps_per_eval", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What an environment says about itself."""

    schema: Mapping[str, Any]  # JSON Schema of its config class; {} where nobody can tell
    config: Mapping[str, Any]  # effective values: config_init, then those given
    problems: tuple[Problem, ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)  # its defaults of the trainer's settings
    is_foreign: bool = False  # the file knows no `describe`
    read: Mapping[str, Sequence[int]] = field(default_factory=dict)  # files of its project that it read -> `_looks`

    @property
    def fields(self) -> frozenset[str]:
        """Names of its settings."""
        return frozenset(self.schema.get("properties", {}))

    @property
    def is_current(self) -> bool:
        """Whether what it was read from is unchanged, but for the environment's own file."""
        return all(_looks(file) == list(looks) for file, looks in self.read.items())

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Description:
        """From the JSON that `describe` prints. KeyError, TypeError, ValueError where it is of another form."""
        problems = tuple(
            Problem(
                field=f"env.{item['field']}",
                got=item.get("got"),
                rule=item["rule"].replace("input should be", "must be"),
                did_you_mean=item.get("did_you_mean"),
                suggest=tuple(item.get("suggest") or ()),
            )
            for item in told["problems"]
        )
        return cls(
            schema=dict(told["schema"]),
            config=dict(told["config"]),
            problems=problems,
            trainer=dict(told.get("trainer", {})),
            is_foreign=told.get("is_foreign", False),
            read=dict(told.get("read", {})),
        )

    def told(self) -> dict[str, Any]:
        """The JSON it came from."""
        problems = [{**asdict(one), "field": one.field.removeprefix("env.")} for one in self.problems]
        known = {"trainer": self.trainer, "is_foreign": self.is_foreign, "read": self.read}
        return {"schema": self.schema, "config": self.config, "problems": problems, **known}


def find_program(name: str, interpreter: str | None = None, working_directory: str | None = None) -> EnvironmentProgram:
    """The environment of this name, or at this path, what runs it and where.

    Raises:
        NotFound: no such interpreter or working directory. Beside that as `discovery.find_environment`.
    """
    python = _interpreter(interpreter)
    found = find_environment(name)
    file = Path(found.file_path)
    folder = Path(working_directory).expanduser().absolute() if working_directory else project_of(file)
    if not folder.is_dir():
        raise NotFound(f"There is no folder {folder}.", next="Set run.working_directory to an existing one.")
    return EnvironmentProgram(name=found.name, path=file, interpreter=python, working_directory=folder)


def program_of(run: RunSettings) -> EnvironmentProgram:
    """The environment of a run with these settings. Raises as `find_program`."""
    return find_program(run.environment, run.interpreter, run.working_directory)


def project_of(file: Path) -> Path:
    """The project that an environment's file belongs to: the nearest folder above it with one of PROJECT; failing that
    the nearest that is no package, where `import` finds the packages that the file lies in."""
    folders = file.parents
    project = next((folder for folder in folders if any((folder / name).exists() for name in PROJECT)), None)
    return project or next(folder for folder in folders if not (folder / "__init__.py").exists())


def describe(environment: EnvironmentProgram, values: Mapping[str, Any]) -> Description:
    """What the file says about itself with these values set.

    Raises:
        EnvironmentBroken: it cannot be run, or says nothing usable; with the place, and the end of its traceback.
    """
    values = {**values, **environment.variant_setting}
    key = _key(environment, values)
    told = _told.get(key) or _remembered(key)
    if told is None or not told.is_current:
        told = _ask(environment, values)
        remembered.remember(key, told.told())
    _keep(key, told)
    return told


def last_failure(file: Path) -> str | None:
    """Why this very file could not describe itself when it was last asked; None where it could, or was not asked.

    It holds until the file changes or is asked again, whatever becomes of its neighbours.
    """
    try:
        return remembered.recall(_failure_key(file))
    except OSError:
        return None


def confirm(environment: EnvironmentProgram, effective: Mapping[str, Any], told: Description) -> None:
    """Remember that these values are what a description without problems came to: they need not be asked about."""
    _keep(_key(environment, effective), told)


_told: dict[str, Description] = {}


def _keep(key: str, told: Description) -> None:
    _told[key] = told
    while len(_told) > MOST_KEPT:
        _told.pop(next(iter(_told)), None)


def _failure_key(file: Path) -> str:
    looked = file.stat()
    return f"failure\n{file}\n{looked.st_mtime_ns}\n{looked.st_size}"


def _key(environment: EnvironmentProgram, values: Mapping[str, Any]) -> str:
    given = json.dumps(values, sort_keys=True, default=str)
    where = f"{environment.interpreter}\n{environment.working_directory}"
    return f"{where}\n{remembered.stamp(environment.path)}\n{given}"


def _remembered(key: str) -> Description | None:
    try:
        return Description.of(remembered.recall(key) or {})
    except (KeyError, TypeError, ValueError):
        return None


def _ask(environment: EnvironmentProgram, values: Mapping[str, Any]) -> Description:
    try:
        with tempfile.TemporaryDirectory(prefix="halteres-describe-") as folder:
            ended = _answer(environment, values, Path(folder))
        told = Description(schema={}, config=values, is_foreign=True) if ended is None else _parse(environment, ended)
    except EnvironmentBroken as error:
        remembered.remember(_failure_key(environment.path), error.sentence)
        raise
    remembered.forget(_failure_key(environment.path))
    return told


def _answer(environment: EnvironmentProgram, values: Mapping[str, Any], folder: Path) -> Ended | None:
    """What the file says; a file of atroposlib's knows no `describe`: then what our script finds, if anything."""
    is_foreign = f"foreign\n{remembered.stamp(environment.path)}"
    tried = bool(remembered.recall(is_foreign) or IMPORTS_ATROPOSLIB.search(environment.path.read_bytes()))
    if tried and (found := _found(environment, values, folder)):
        return found  # to import it once is slow enough
    given = folder / "config.yaml"
    given.write_text(yaml.safe_dump({"env": dict(values)}))
    ended = _run(environment, environment.command("describe", "--config", str(given)))
    if ended.code != 2 or "invalid choice" not in ended.err + ended.out:
        return ended
    remembered.remember(is_foreign, True)
    return None if tried else _found(environment, values, folder)


def _found(environment: EnvironmentProgram, values: Mapping[str, Any], folder: Path) -> Ended | None:
    """What our script finds in the file; None where it fails."""
    given = folder / "values.json"
    given.write_text(json.dumps(dict(values), default=str))
    ended = _run(environment, (environment.interpreter, str(DESCRIBE), str(environment.path), str(given)))
    return ended if ended.code == 0 else None


def _run(environment: EnvironmentProgram, command: tuple[str, ...]) -> Ended:
    try:
        return run_caught(command, environment.working_directory, DEADLINE_S)
    except TimeoutError:
        raise EnvironmentBroken(
            f"{environment.path} did not describe itself within {DEADLINE_S:g} s.",
            "Importing it, or its config_init, takes too long.",
            "Move downloads and models into setup().",
            file=str(environment.path),
        ) from None


def _looks(file: str) -> list[int]:
    """When it was written and how long it is; nothing where it cannot be looked at."""
    try:
        looked = os.stat(file)
    except OSError:
        return []
    return [looked.st_mtime_ns, looked.st_size]


def _parse(environment: EnvironmentProgram, ended: Ended) -> Description:
    if ended.code != 0:
        why = f"It ended with code {ended.code}: {last_line(ended.err)}"
        if "ModuleNotFoundError" in why:
            why += f" (run by {environment.interpreter}; run.interpreter names another Python)"
        raise broken(environment.path, environment.interpreter, why, ended.err)
    if not ended.out.strip():
        why = '`describe` printed nothing. Does the file end with `if __name__ == "__main__": YourEnv.cli()`?'
        raise broken(environment.path, environment.interpreter, why)
    try:
        told = json.loads(ended.out.strip().splitlines()[-1])
        return Description.of({**told, "read": {file: _looks(file) for file in told.get("read", ())}})
    except (ValueError, KeyError, TypeError) as error:
        raise broken(
            environment.path,
            environment.interpreter,
            f"`describe` printed no usable JSON ({type(error).__name__}: {error}).",
        ) from error


def _interpreter(name: str | None) -> str:
    found = shutil.which(name or sys.executable)
    if found is None:
        raise NotFound(f"There is no Python interpreter '{name}'.", next="Set run.interpreter to an existing one.")
    return os.path.abspath(found)
