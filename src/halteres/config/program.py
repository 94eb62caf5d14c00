"""An environment as a program: a file, what runs it, and what it says about itself.

Owns: its command lines; asking it `describe` (`caught` sees to it that it cannot harm us), once for the same file and
values.
Never: imports an environment.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from halteres.config import remembered
from halteres.config.breakage import broken, last_line
from halteres.config.discovery import EnvironmentBroken, find_environment
from halteres.config.problem import Problem
from halteres.config.stranger import Ended, run_caught
from halteres.errors import NotFound

DEADLINE_S = 20.0
"""How long an environment may take to import and describe itself; who asks over HTTP waits 30 s at most."""

FOREIGN = Path(__file__).with_name("foreign.py")
"""What asks a file that knows no `describe`; run by the environment's interpreter."""

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

    def command(self, verb: str, *arguments: str) -> tuple[str, ...]:
        """The command line of one of its verbs: serve, process, evaluate, describe."""
        return (self.interpreter, str(self.path), verb, *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What an environment says about itself."""

    schema: Mapping[str, Any]  # JSON Schema of its config class; {} where nobody can tell
    config: Mapping[str, Any]  # effective values: config_init, then those given
    problems: tuple[Problem, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """Names of its settings."""
        return frozenset(self.schema.get("properties", {}))

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
        return cls(schema=dict(told["schema"]), config=dict(told["config"]), problems=problems)

    def told(self) -> dict[str, Any]:
        """The JSON it came from."""
        problems = [{**asdict(one), "field": one.field.removeprefix("env.")} for one in self.problems]
        return {"schema": self.schema, "config": self.config, "problems": problems}


def find_program(name: str, interpreter: str | None = None) -> EnvironmentProgram:
    """The environment of this name, or at this path, and what runs it. Raises as `discovery.find_environment`."""
    python = _interpreter(interpreter)
    found = find_environment(name)
    return EnvironmentProgram(name=found.name, path=Path(found.file_path), interpreter=python)


def describe(environment: EnvironmentProgram, values: Mapping[str, Any]) -> Description:
    """What the file says about itself with these values set.

    Raises:
        EnvironmentBroken: it cannot be run, or says nothing usable; with the place, and the end of its traceback.
    """
    key = _key(environment, values)
    told = _told.get(key) or _remembered(key)
    if told is None:
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
    return f"{environment.interpreter}\n{remembered.stamp(environment.path)}\n{given}"


def _remembered(key: str) -> Description | None:
    try:
        return Description.of(remembered.recall(key) or {})
    except (KeyError, TypeError, ValueError):
        return None


def _ask(environment: EnvironmentProgram, values: Mapping[str, Any]) -> Description:
    try:
        with tempfile.TemporaryDirectory(prefix="halteres-describe-") as folder:
            ended = _answer(environment, values, Path(folder))
        told = Description(schema={}, config=values) if ended is None else _parse(environment, ended)
    except EnvironmentBroken as error:
        remembered.remember(_failure_key(environment.path), error.sentence)
        raise
    remembered.forget(_failure_key(environment.path))
    return told


def _answer(environment: EnvironmentProgram, values: Mapping[str, Any], folder: Path) -> Ended | None:
    """What the file says; a file of atroposlib's knows no `describe`: then what `foreign` finds, if anything."""
    is_foreign = f"foreign\n{remembered.stamp(environment.path)}"
    if not remembered.recall(is_foreign):
        given = folder / "config.yaml"
        given.write_text(yaml.safe_dump({"env": dict(values)}))
        ended = _run(environment, environment.command("describe", "--config", str(given)), folder)
        if ended.code != 2 or "invalid choice" not in ended.err + ended.out:
            return ended
        remembered.remember(is_foreign, True)
    given, script = folder / "values.json", folder / FOREIGN.name
    given.write_text(json.dumps(dict(values), default=str))
    script.write_bytes(FOREIGN.read_bytes())  # where it lies, its neighbours would be taken for the standard library's
    ended = _run(environment, (environment.interpreter, str(script), str(environment.path), str(given)), folder)
    return ended if ended.code == 0 else None


def _run(environment: EnvironmentProgram, command: tuple[str, ...], folder: Path) -> Ended:
    try:
        return run_caught(command, folder, DEADLINE_S)
    except TimeoutError:
        raise EnvironmentBroken(
            f"{environment.path} did not describe itself within {DEADLINE_S:g} s.",
            "Importing it, or its config_init, takes too long.",
            "Move downloads and models into setup().",
            file=str(environment.path),
        ) from None


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
        return Description.of(json.loads(ended.out.strip().splitlines()[-1]))
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
