"""`PYTHON describe.py FILE VALUES`: what `describe` prints, for an environment file that knows no `describe`.

A script of its own: the environment's interpreter need not have Halteres. VALUES is a JSON file of settings to lay over
what `config_init` gives. Exit code 1: nothing can be told. `read` in the answer: the files of the working directory
that were read on the way, a config or the modules beside the file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

MODULE = "halteres_environment"

MOST_READ = 256


def settings_of(file: Path) -> BaseModel | None:
    """What `config_init` of the environment in this file gives; of several classes, the last that is no base."""
    spec = importlib.util.spec_from_file_location(MODULE, file)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses and pydantic look their own module up
    spec.loader.exec_module(module)
    own: list[Any] = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == MODULE]
    kinds = [kind for kind in own if hasattr(kind, "config_init") and hasattr(kind, "cli")]
    leaves = [kind for kind in kinds if not any(other is not kind and issubclass(other, kind) for other in kinds)]
    return leaves[-1].config_init()[0] if leaves else None


def laid_over(base: BaseModel, values: dict[str, Any]) -> tuple[BaseModel, list[dict[str, Any]]]:
    """The settings with those values that can be used, and what is wrong with the others."""
    kept = {name: value for name, value in values.items() if name in type(base).model_fields}
    rule = "there is no such setting"
    problems = [{"field": name, "got": value, "rule": rule} for name, value in values.items() if name not in kept]
    while True:
        try:
            return type(base).model_validate({**base.model_dump(), **kept}), problems
        except ValidationError as error:
            refused = {str(detail["loc"][0]): detail for detail in error.errors() if detail["loc"]}
            refused = {name: detail for name, detail in refused.items() if name in kept}
            if not refused:
                return base, problems
            for name, detail in refused.items():
                rule = detail["msg"][:1].lower() + detail["msg"][1:]
                problems.append({"field": name, "got": kept.pop(name), "rule": rule})


def note_files_read() -> Callable[[], list[str]]:
    """From here on take note of files opened for reading; those below the working directory, without installed and
    compiled ones."""
    opened: dict[str, None] = {}
    here = os.path.join(os.getcwd(), "")
    installed = tuple({os.path.join(os.path.realpath(prefix), "") for prefix in (sys.prefix, sys.base_prefix)})

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and str(arguments[1] or "r").startswith("r"):
            opened[os.path.abspath(arguments[0])] = None

    sys.addaudithook(note)

    def noted() -> list[str]:
        own = [file for file in opened if file.startswith(here) and not os.path.realpath(file).startswith(installed)]
        return [file for file in own if not file.endswith(".pyc") and os.path.isfile(file)][:MOST_READ]

    return noted


def main() -> int:
    """Print the description; the exit code."""
    file, values = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    sys.path[0] = str(file.parent)
    answers, read = sys.stdout, note_files_read()
    with contextlib.redirect_stdout(sys.stderr):
        base = settings_of(file)
        if base is None:
            return 1
        settings, problems = laid_over(base, values)
        schema, config = type(base).model_json_schema(), settings.model_dump(mode="json")
        found = {"schema": schema, "config": config, "problems": problems, "is_foreign": True, "read": read()}
        answer = json.dumps(found)
    answers.write(answer + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
