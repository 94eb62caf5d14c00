"""An environment as a program: a file, what runs it, and what it says about itself in a process of
its own.

What it said is remembered, in this process and in HALTERES_HOME/cache/environments, for as long as
the files that it was read from do not change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from halteres.config import environ
from halteres.config.discovery import (
    BUILTIN_FOLDER,
    EnvironmentBroken,
    find_environment,
    split_name,
)
from halteres.config.problem import MissingPackage, Problem
from halteres.config.settings import RunSettings
from halteres.errors import NotFound
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.logins import passwords_in
from halteres.process import Ended, run_caught

DEADLINE_S = 120.0
"""How long an environment may take to import and describe itself. Importing atroposlib and datasets
takes 8 s of a core, and a busy machine has a tenth of one; whoever waits less long finds the answer
remembered when they ask again.
"""

FOREIGN = str(Path(__file__).with_name("atroposlib_runner.py"))
"""What describes and runs files of atroposlib's, which know no `describe`; run by the environment's
interpreter.
"""

PROJECT = ("pyproject.toml", "setup.py", ".git")  # the folder that holds one of these is a project
NOTHING_TO_EVALUATE = 3  # exit code of `evaluate` where an environment has no held-out tasks
MOST_CACHED = 256  # descriptions in memory, and files on the disk

TRACEBACK_LINES = 8

_IMPORTS_ATROPOSLIB = re.compile(rb"^\s*(from|import)\s+atroposlib\b", re.MULTILINE)
# pydantic ends its errors with a line that leads there
_ADVERTISEMENT = "https://errors.pydantic.dev"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentProgram:
    """Where an environment lives and what runs it."""

    name: str
    path: Path  # absolute
    interpreter: str  # absolute path of a Python
    working_directory: Path  # absolute; where its commands run
    # written for atroposlib: it knows no `describe` (whoever was not asked does not know)
    is_foreign: bool = False

    @property
    def variant_setting(self) -> dict[str, str]:
        """The setting `variant` of a family's environment, which its name says; nothing of any
        other.
        """
        variant = split_name(self.name)[1]
        if variant:
            return {"variant": variant}
        return {}

    def command(self, verb: str, *arguments: str) -> tuple[str, ...]:
        """The command line of one of its verbs: serve, process, evaluate, describe."""
        return (self.interpreter, str(self.path), verb, *arguments)

    def command_in_run(
        self, verb: str, *arguments: str, metrics: Path, name: str
    ) -> tuple[str, ...]:
        """The command line within a run. A foreign environment's figures, which it gives to W&B
        alone, are appended to `metrics`; `name` is the one under which it is to register. It does
        not evaluate by itself: the run does.
        """
        if not self.is_foreign:
            return self.command(verb, *arguments)
        script = (self.interpreter, FOREIGN, "run", str(metrics), name)
        return (
            *script,
            str(self.path),
            verb,
            *arguments,
            "--env.use_wandb",
            "true",
            "--env.steps_per_eval",
            "0",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What an environment says about itself."""

    schema: Mapping[str, Any]  # JSON Schema of its config class; {} where nobody can tell
    config: Mapping[str, Any]  # effective values: config_init, then those given
    # values where none is given: config_init; None: the file does not say them
    defaults: Mapping[str, Any] | None = None
    problems: tuple[Problem, ...] = ()
    # what it needs with these values, and its Python does not have
    missing: tuple[MissingPackage, ...] = ()
    # its defaults of the trainer's settings
    trainer: Mapping[str, Any] = field(default_factory=dict)
    is_foreign: bool = False  # the file knows no `describe`
    # files of its project that it read -> `_stat`
    read: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def fields(self) -> frozenset[str]:
        """Names of its settings."""
        return frozenset(self.schema.get("properties", {}))

    @property
    def is_current(self) -> bool:
        """Whether what it was read from is unchanged, but for the environment's own file."""
        return all(_stat(Path(file)) == list(stat) for file, stat in self.read.items())

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Description:
        """From the JSON that `describe` prints. KeyError, TypeError, ValueError where it is of
        another form.
        """
        read = {file: _stat(Path(file)) for file in answer.get("read", ())}
        problems = [
            {
                **one,
                "field": f"env.{one['field']}",
                "rule": one["rule"].replace("input should be", "must be"),
            }
            for one in answer["problems"]
        ]
        return msgspec.convert({**answer, "read": read, "problems": problems}, cls)


def find_program(
    name: str, interpreter: str | None = None, working_directory: str | None = None
) -> EnvironmentProgram:
    """The environment of this name, or at this path, what runs it and where.

    Raises:
        NotFound: no such interpreter or working directory. Beside that as
            `discovery.find_environment`.
    """
    python = shutil.which(interpreter or sys.executable)
    if python is None:
        what = f"There is no Python interpreter '{interpreter}'."
        raise NotFound(what, next="Set run.interpreter to an existing one.")
    found = find_environment(name)
    file = Path(found.file_path)
    if working_directory:
        folder = Path(working_directory).expanduser().absolute()
    else:
        folder = project_of(file)
    if not folder.is_dir():
        raise NotFound(
            f"There is no folder {folder}.", next="Set run.working_directory to an existing one."
        )
    interpreter = os.path.abspath(python)
    return EnvironmentProgram(
        name=found.name, path=file, interpreter=interpreter, working_directory=folder
    )


def program_of(run: RunSettings) -> EnvironmentProgram:
    """The environment of a run with these settings. Raises as `find_program`."""
    return find_program(run.environment, run.interpreter, run.working_directory)


def project_of(file: Path) -> Path:
    """The project that an environment's file belongs to: the nearest folder above it with one of
    PROJECT; failing that the nearest that is no package, where `import` finds the packages that the
    file lies in.
    """
    folders = file.parents
    project = next(
        (folder for folder in folders if any((folder / name).exists() for name in PROJECT)), None
    )
    return project or next(folder for folder in folders if not (folder / "__init__.py").exists())


def describe(
    environment: EnvironmentProgram, values: Mapping[str, Any], *, afresh: bool = False
) -> Description:
    """What the file says about itself with these values set; `afresh`: whatever it said before.

    Raises:
        EnvironmentBroken: it cannot be run, or says nothing usable; with the place, and the end of
            its traceback.
    """
    values = {**values, **environment.variant_setting}
    key = _key(environment, values)
    found = _descriptions.get(key)
    if found is None:
        with suppress(msgspec.ValidationError):
            found = msgspec.convert(_recall(key), Description)
    if afresh or found is None or not found.is_current:
        found = _ask(environment, values)
        content = msgspec.to_builtins(found)
        # No key is kept for longer than this process lives.
        if not any(passwords_in(content)):
            _remember(key, content)
    _cache(key, found)
    return found


def last_failure(file: Path) -> str | None:
    """Why this very file could not describe itself when it was last asked; None where it could, or
    was not asked.

    It holds until the file changes or is asked again, whatever becomes of its neighbours.
    """
    return _recall(_failure_key(file))


def _ask(environment: EnvironmentProgram, values: Mapping[str, Any]) -> Description:
    try:
        with tempfile.TemporaryDirectory(prefix="halteres-describe-") as folder:
            ended = _answer(environment, values, Path(folder))
        if ended:
            found = _parse(environment, ended)
        else:
            found = Description(schema={}, config=values, is_foreign=True)
    except EnvironmentBroken as error:
        _remember(_failure_key(environment.path), error.sentence)
        raise
    with suppress(OSError):
        _file(_failure_key(environment.path)).unlink(missing_ok=True)
    return found


def _answer(
    environment: EnvironmentProgram, values: Mapping[str, Any], folder: Path
) -> Ended | None:
    """What the file prints; a file of atroposlib's knows no `describe`: then what our script finds,
    if anything.
    """
    by_script = folder / "values.json"
    by_script.write_text(json.dumps(dict(values), default=str), encoding="utf-8")
    script = (environment.interpreter, FOREIGN, "describe", str(environment.path), str(by_script))
    is_foreign = f"foreign\n{_stamp(environment.path)}"
    is_tried = bool(
        _recall(is_foreign) or _IMPORTS_ATROPOSLIB.search(environment.path.read_bytes())
    )
    if is_tried and (found := _run(environment, script)).code == 0:
        return found  # to import it once is slow enough
    given = folder / "config.yaml"
    given.write_text(yaml.safe_dump({"env": dict(values)}), encoding="utf-8")
    ended = _run(environment, environment.command("describe", "--config", str(given)))
    if ended.code != 2 or "invalid choice" not in ended.err + ended.out:
        return ended
    _remember(is_foreign, True)
    found = None
    if not is_tried:
        found = _run(environment, script)
    if found and found.code == 0:
        return found
    return None


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


def _parse(environment: EnvironmentProgram, ended: Ended) -> Description:
    if ended.code != 0:
        lines = _end_of(ended.err)
        last = "it said nothing."
        if lines:
            last = lines[-1].strip().removeprefix("error: ")[:600]
        why = f"It ended with code {ended.code}: {last}"
        if "ModuleNotFoundError" in why:
            why += f" (run by {environment.interpreter}; run.interpreter names another Python)"
        raise _broken(environment, why, ended.err)
    if not ended.out.strip():
        why = (
            '`describe` printed nothing. Does the file end with `if __name__ == "__main__": '
            "YourEnv.cli()`?"
        )
        raise _broken(environment, why)
    try:
        return Description.of(json.loads(ended.out.strip().splitlines()[-1]))
    except (ValueError, KeyError, TypeError) as error:
        why = f"`describe` printed no usable JSON ({type(error).__name__}: {error})."
        raise _broken(environment, why) from error


def _broken(environment: EnvironmentProgram, why: str, err: str = "") -> EnvironmentBroken:
    name = re.escape(str(environment.path))
    # a traceback's, or a sentence of `describe`
    places = re.findall(rf'(?:File "{name}", line |{name}:)(\d+)', err)
    line = None
    if places:
        line = int(places[-1])
    return EnvironmentBroken(
        f"The environment file {environment.path}{f':{line}' if line else ''} is broken.",
        why,
        f"Run `{environment.interpreter} {environment.path} describe` to see the whole message.",
        file=str(environment.path),
        line=line,
        traceback=_end_of(err) if "Traceback" in err else None,
    )


def _end_of(err: str) -> list[str]:
    lines = [
        line.rstrip() for line in err.splitlines() if line.strip() and _ADVERTISEMENT not in line
    ]
    return lines[-TRACEBACK_LINES:]


_descriptions: dict[str, Description] = {}


def _cache(key: str, description: Description) -> None:
    if len(_descriptions) >= MOST_CACHED:
        _descriptions.clear()
    _descriptions[key] = description


def _key(environment: EnvironmentProgram, values: Mapping[str, Any]) -> str:
    given = json.dumps(values, sort_keys=True, default=str)
    program = f"{environment.interpreter}\n{environment.working_directory}"
    return f"{program}\n{_stamp(environment.path)}\n{given}"


def _stamp(file: Path) -> str:
    """Changes when the file does, or a Python file beside it (which it may import), or one of our
    own environments' room, which says what every environment's settings are.
    """
    beside = [
        one for folder in (file.parent, BUILTIN_FOLDER) for one in sorted(folder.glob("*.py"))
    ]
    return json.dumps([str(file), _stat(file), [(one.name, *_stat(one)) for one in beside]])


def _failure_key(file: Path) -> str:
    return f"failure\n{file}\n{_stat(file)}"


def _stat(file: Path) -> list[int]:
    """When it was written and how long it is; nothing where it cannot be looked at."""
    try:
        stat = file.stat()
    except OSError:
        return []
    return [stat.st_mtime_ns, stat.st_size]


def _file(key: str) -> Path:
    return (
        environ.home()
        / "cache"
        / "environments"
        / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"
    )


def _recall(key: str) -> Any:
    """What was remembered under this key, by whichever process; None where nothing was."""
    try:
        return json.loads(read_regular(_file(key)))
    except (OSError, *NOT_JSON):
        return None


def _remember(key: str, content: Any) -> None:
    """Keep JSON under this key, and not too many files altogether; nothing where the disk will not
    have it.
    """
    file = _file(key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(content).encode(), private=True)
        files = list(file.parent.glob("*.json"))
        if len(files) > MOST_CACHED:
            for old in sorted(files, key=lambda one: one.stat().st_mtime)[: MOST_CACHED // 2]:
                old.unlink(missing_ok=True)
