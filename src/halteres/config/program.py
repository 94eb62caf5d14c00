"""An environment as a program: a file, what runs it, and what it says about itself.

Owns: its command lines; asking it `describe` in a subprocess that cannot harm us: without secrets, with
a deadline, its output caught.
Never: imports an environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from halteres.config import environ
from halteres.config.discovery import EnvironmentBroken, find_environment
from halteres.config.problem import Problem
from halteres.errors import InvalidConfig, NotFound

DEADLINE_S = 30.0
"""How long an environment may take to import and describe itself."""


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

    schema: Mapping[str, Any]  # JSON Schema of its config class; {} where the file cannot tell (atroposlib's)
    config: Mapping[str, Any]  # effective values: config_init, then those given
    problems: tuple[Problem, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """Names of its settings."""
        return frozenset(self.schema.get("properties", {}))


def find_program(name: str, interpreter: str | None = None) -> EnvironmentProgram:
    """The environment of this name, or at this path, and what runs it. Raises as `discovery.find_environment`."""
    python = _interpreter(interpreter)
    found = find_environment(name)
    return EnvironmentProgram(name=found.name, path=Path(found.file_path), interpreter=python)


def describe(environment: EnvironmentProgram, values: Mapping[str, Any]) -> Description:
    """What the file says about itself with these values set. Raises InvalidConfig where it cannot be run."""
    key = _key(environment, values)
    if key not in _told:
        _told[key] = _ask(environment, values)
    return _told[key]


def confirm(environment: EnvironmentProgram, effective: Mapping[str, Any], told: Description) -> None:
    """Remember that these values are what a description without problems came to: they need not be asked about."""
    _told[_key(environment, effective)] = told


_told: dict[tuple[Any, ...], Description] = {}


def _key(environment: EnvironmentProgram, values: Mapping[str, Any]) -> tuple[Any, ...]:
    stat = environment.path.stat()
    return environment, stat.st_mtime_ns, stat.st_size, json.dumps(values, sort_keys=True, default=str)


def _ask(environment: EnvironmentProgram, values: Mapping[str, Any]) -> Description:
    with tempfile.TemporaryDirectory(prefix="halteres-describe-") as folder:
        config = Path(folder, "config.yaml")
        config.write_text(yaml.safe_dump({"env": dict(values)}))
        answer = _run(environment.command("describe", "--config", str(config)), folder)
    if answer.returncode == 2 and "invalid choice" in answer.stderr + answer.stdout:
        return Description(schema={}, config=values)  # atroposlib's own BaseEnv knows no `describe`
    if answer.returncode != 0:
        raise _broken(environment, f"It ended with code {answer.returncode}: {_last_line(answer.stderr)}")
    return _parse(environment, answer.stdout)


def _parse(environment: EnvironmentProgram, output: str) -> Description:
    if not output.strip():
        why = '`describe` printed nothing. Does the file end with `if __name__ == "__main__": YourEnv.cli()`?'
        raise _broken(environment, why)
    try:
        told = json.loads(output.strip().splitlines()[-1] if "\n" in output.strip() else output)
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
        return Description(schema=told["schema"], config=told["config"], problems=problems)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _broken(environment, f"`describe` printed no usable JSON ({type(error).__name__}: {error}).") from error


def _run(command: tuple[str, ...], folder: str) -> subprocess.CompletedProcess[str]:
    """Run to the end or the deadline, in a process group of its own that is swept up afterwards."""
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=environ.for_stranger(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        out, err = child.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise InvalidConfig(
            f"{command[1]} did not describe itself within {DEADLINE_S:.0f} s.",
            "Importing it, or its config_init, takes too long.",
            "Move downloads and models into setup().",
        ) from None
    finally:
        _sweep(child)
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def _sweep(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _broken(environment: EnvironmentProgram, why: str) -> EnvironmentBroken:
    return EnvironmentBroken(
        f"The environment file {environment.path} is broken.",
        why,
        f"Run `{environment.interpreter} {environment.path} describe` to see the whole message.",
        file=str(environment.path),
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:600] if lines else "it said nothing."


def _interpreter(name: str | None) -> str:
    found = shutil.which(name or sys.executable)
    if found is None:
        raise NotFound(f"There is no Python interpreter '{name}'.", next="Set run.interpreter to an existing one.")
    return os.path.abspath(found)
