"""Describes or runs an environment file that was written for atroposlib, in that file's own Python.

    PYTHON atroposlib_runner.py describe FILE VALUES
    PYTHON atroposlib_runner.py run METRICS NAME FILE VERB …

A script of its own: the environment's interpreter need not have Halteres.

describe: what the verb prints of files that know it. VALUES is a JSON file of settings to lay over
what `config_init` gives. Exit code 1: nothing is known. `read` in the answer: files of the working
directory that were read on the way.

run: `PYTHON FILE VERB …`, with what it logs to W&B as rows of METRICS. No run of W&B is opened.
atroposlib puts the environment's registered name before its figures: NAME_0_train/x is train/x
here.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import importlib.util
import inspect
import json
import math
import os
import re
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

MODULE = "halteres_environment"

MOST_READ = 256


def settings_of(file: Path) -> BaseModel | None:
    """What `config_init` of the environment in this file gives; of several classes, the last that
    is no base.
    """
    spec = importlib.util.spec_from_file_location(MODULE, file)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses and pydantic look their own module up
    spec.loader.exec_module(module)
    own: list[Any] = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == MODULE
    ]
    kinds = [kind for kind in own if hasattr(kind, "config_init") and hasattr(kind, "cli")]
    leaves = [
        kind
        for kind in kinds
        if not any(other is not kind and issubclass(other, kind) for other in kinds)
    ]
    if leaves:
        return leaves[-1].config_init()[0]
    return None


def laid_over(base: BaseModel, values: dict[str, Any]) -> tuple[BaseModel, list[dict[str, Any]]]:
    """The settings with those values that can be used, and what is wrong with the others."""
    from pydantic import ValidationError

    usable = {name: value for name, value in values.items() if name in type(base).model_fields}
    rule = "there is no such setting"
    problems = [
        {"field": name, "got": value, "rule": rule}
        for name, value in values.items()
        if name not in usable
    ]
    while True:
        try:
            return type(base).model_validate({**base.model_dump(), **usable}), problems
        except ValidationError as error:
            refused = {str(detail["loc"][0]): detail for detail in error.errors() if detail["loc"]}
            refused = {name: detail for name, detail in refused.items() if name in usable}
            if not refused:
                return base, problems
            for name, detail in refused.items():
                rule = detail["msg"][:1].lower() + detail["msg"][1:]
                problems.append({"field": name, "got": usable.pop(name), "rule": rule})


def note_files_read() -> Callable[[], list[str]]:
    """From here on take note of files opened for reading; those below the working directory,
    without installed and compiled ones.
    """
    opened: dict[str, None] = {}
    here = os.path.join(os.getcwd(), "")
    installed = tuple(
        {os.path.join(os.path.realpath(prefix), "") for prefix in (sys.prefix, sys.base_prefix)}
    )

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if (
            event == "open"
            and isinstance(arguments[0], str)
            and str(arguments[1] or "r").startswith("r")
        ):
            opened[os.path.abspath(arguments[0])] = None

    sys.addaudithook(note)

    def noted() -> list[str]:
        own = [
            file
            for file in opened
            if file.startswith(here) and not os.path.realpath(file).startswith(installed)
        ]
        return [file for file in own if not file.endswith(".pyc") and os.path.isfile(file)][
            :MOST_READ
        ]

    return noted


def describe(file: Path, values: dict[str, Any]) -> int:
    """Print the description; the exit code."""
    answers, read = sys.stdout, note_files_read()
    with contextlib.redirect_stdout(sys.stderr):
        base = settings_of(file)
        if base is None:
            return 1
        settings, problems = laid_over(base, values)
        schema, config = type(base).model_json_schema(), settings.model_dump(mode="json")
        found = {
            "schema": schema,
            "config": config,
            "defaults": laid_over(base, {})[0].model_dump(mode="json"),
            "problems": problems,
            "is_foreign": True,
            "read": read(),
        }
        answer = json.dumps(found)
    answers.write(answer + "\n")
    return 0


class Metrics:
    """Rows appended to one file."""

    def __init__(self, file: str, name: str) -> None:
        self._file, self._step = file, 0
        self._registered = re.compile(rf"{re.escape(name)}_\d+_")

    def log(self, data: Mapping[str, Any], step: Any = None, *_: Any, **__: Any) -> None:
        """As `wandb.log`: one row of the numbers among the data (null: not finite), at the newest
        step that was given; tables, pictures and texts are passed over.
        """
        if step is not None:
            self._step = int(step)
        row: dict[str, Any] = {}
        for name, value in data.items():
            if not isinstance(value, str | bytes):
                # numpy's and torch's scalars are floats
                with contextlib.suppress(TypeError, ValueError, RuntimeError):
                    number = float(value)
                    if math.isfinite(number):
                        row[self._registered.sub("", str(name), count=1)] = number
                    else:
                        row[self._registered.sub("", str(name), count=1)] = None
        if not row:
            return
        row |= {"step": self._step, "t": time.time(), "src": "env"}
        try:  # one line in one write; whoever died inside a line before left no newline behind it
            descriptor = os.open(
                self._file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            try:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, b"\n" * torn + json.dumps(row).encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:  # a figure that cannot be written ends no rollout
            sys.stderr.write(f"Could not append to {self._file}: {error}\n")


def replace_wandb(metrics: Metrics) -> None:
    """`wandb.log` writes our rows, also before and without `wandb.init`, which gives a run that
    does nothing.
    """
    try:
        import wandb
    except ImportError:
        return  # the environment has none either
    real: Any = wandb.init

    def init(*arguments: Any, **options: Any) -> Any:
        run = real(*arguments, **{**options, "mode": "disabled"})
        wandb.log = run.log = metrics.log
        return run

    wandb.init, wandb.log = init, metrics.log


def log_after_evaluation() -> None:
    """An `evaluate` may leave its figures to the next `wandb_log`, which the verb `evaluate` never
    calls.

    Source: atroposlib 0.4.0, `BaseEnv._run_evaluate`, which is what that verb runs.
    """
    try:
        from atroposlib.envs.base import BaseEnv  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    evaluate: Any = BaseEnv._run_evaluate

    async def evaluate_and_log(self: Any) -> None:
        await evaluate(self)
        try:
            await self.wandb_log({})
        except Exception:  # noqa: BLE001 - the evaluation itself is done
            traceback.print_exc()

    BaseEnv._run_evaluate = evaluate_and_log


def beat_while_serving(limit_s: float, file: str) -> None:
    """Touch this file every second, from when the environment has registered, or is evaluating:
    whoever started it ends it where its event loop hangs. Before, its tasks may be loaded on the
    loop. Shortly before it would be ended, its stack goes to stderr.

    Source: atroposlib 0.4.0: `BaseEnv.env_manager` sets up, then registers; `_run_evaluate` calls
    `evaluate`.
    """
    try:
        from atroposlib.envs.base import BaseEnv  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    beats: list[asyncio.Task[None]] = []

    async def beat() -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        while True:
            os.utime(descriptor)
            faulthandler.dump_traceback_later(0.8 * limit_s, file=sys.stderr)
            await asyncio.sleep(min(1.0, limit_s / 8))

    def begin() -> None:
        if not beats:
            beats.append(asyncio.get_running_loop().create_task(beat(), name="heartbeat"))

    register: Any = BaseEnv.register_env
    evaluate: Any = BaseEnv._run_evaluate

    async def register_and_beat(self: Any) -> Any:
        answer = await register(self)
        begin()
        return answer

    async def evaluate_and_beat(self: Any) -> Any:
        own = self.evaluate

        async def begin_and_evaluate(*arguments: Any, **options: Any) -> Any:
            begin()
            return await own(*arguments, **options)

        self.evaluate = begin_and_evaluate
        return await evaluate(self)

    BaseEnv.register_env, BaseEnv._run_evaluate = register_and_beat, evaluate_and_beat

    @atexit.register
    def _over() -> None:
        # nothing beats any more: what is left of the process is not watched
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            os.unlink(file)


def main() -> int:
    """Do as the command line says; the exit code."""
    what, *arguments = sys.argv[1:]
    if what == "describe":
        file, values = (
            Path(arguments[0]),
            json.loads(Path(arguments[1]).read_text(encoding="utf-8")),
        )
        sys.path[0] = str(file.parent)
        return describe(file, values)
    metrics, name, *sys.argv = arguments
    sys.path[0] = os.path.dirname(sys.argv[0])  # as `PYTHON FILE` has it
    replace_wandb(Metrics(metrics, name))
    if sys.argv[1:2] == ["evaluate"]:
        log_after_evaluation()
    # `config.environ` is part of Halteres, which this Python need not have
    asked = os.environ.pop("HALTERES_HEARTBEAT", "")  # noqa: TID251
    limit_s, colon, file = asked.partition(":")
    if colon:
        beat_while_serving(float(limit_s), file)
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
