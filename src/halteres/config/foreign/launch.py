"""`PYTHON launch.py METRICS NAME FILE VERB …`: `PYTHON FILE VERB …`, with what it logs to W&B as rows of METRICS.

A script of its own: the environment's interpreter need not have Halteres. No run of W&B is opened. atroposlib puts the
name under which an environment is registered before its figures: NAME_0_train/x is train/x here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import runpy
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any


class Metrics:
    """Rows appended to one file."""

    def __init__(self, file: str, name: str) -> None:
        self._file, self._step = file, 0
        self._registered = re.compile(rf"{re.escape(name)}_\d+_")

    def log(self, data: Mapping[str, Any], step: Any = None, *_: Any, **__: Any) -> None:
        """As `wandb.log`: one row of the numbers among the data (null: not finite), at the last step that was named;
        tables, pictures and texts are passed over."""
        self._step = self._step if step is None else int(step)
        row: dict[str, float | None] = {}
        for name, value in data.items():
            if not isinstance(value, str | bytes):
                with contextlib.suppress(TypeError, ValueError, RuntimeError):  # numpy's and torch's scalars are floats
                    number = float(value)
                    row[self._registered.sub("", str(name), count=1)] = number if math.isfinite(number) else None
        if row:
            self._append({**row, "step": self._step, "t": time.time(), "src": "env"})

    def _append(self, row: Mapping[str, Any]) -> None:
        """One line in one write; whoever died inside a line before left no newline behind it."""
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, b"\n" * torn + json.dumps(row).encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:  # a figure that cannot be kept ends no rollout
            sys.stderr.write(f"Could not append to {self._file}: {error}\n")


def replace_wandb(metrics: Metrics) -> None:
    """`wandb.log` writes our rows, also before and without `wandb.init`, which gives a run that does nothing."""
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
    """An `evaluate` may leave its figures to the next `wandb_log`, which the verb `evaluate` never calls.

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


def main() -> None:
    """Run the file."""
    file, name = sys.argv[1:3]
    sys.argv = sys.argv[3:]
    sys.path[0] = os.path.dirname(sys.argv[0])  # as `PYTHON FILE` has it
    replace_wandb(Metrics(file, name))
    if sys.argv[1:2] == ["evaluate"]:
        log_after_evaluation()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
