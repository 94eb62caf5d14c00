"""What the verb `evaluate` of an environment found, once it has ended.

Owns: where its figures are: of an environment of ours the last line that it printed; of one of atroposlib's the file
that `evaluate_log` writes, and what it logged to W&B.
Never: runs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from halteres.config.program import EnvironmentProgram
from halteres.errors import EnvironmentFailed
from halteres.files import NOT_JSON, read_regular
from halteres.observe.metrics import read_rows

LOGGED = "logged.jsonl"
"""Rows that a foreign environment logged to W&B while it evaluated."""

EVAL = "eval/"


def figures_of(program: EnvironmentProgram, folder: Path, output: str) -> dict[str, Any]:
    """Its figures: numbers, each named `eval/...` (where its own name is another, `eval/` is put before it).

    Args:
        program: the environment.
        folder: its `data_dir_to_save_evals`.
        output: what it printed.

    Raises:
        EnvironmentFailed: it gave none.
    """
    found = _reported(folder) if program.is_foreign else _printed(output)
    if found is None:
        how = "`evaluate` has to give them to evaluate_log, or to the next wandb_log under names that begin with eval/."
        raise EnvironmentFailed(
            f"The evaluation of {program.path.name} gave no figures.",
            how if program.is_foreign else "`evaluate` has to return them, or to give them to evaluate_log.",
        )
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {name if name.startswith(EVAL) else EVAL + name: value for name, value in numbers.items()}


def _printed(output: str) -> Mapping[str, Any] | None:
    for line in reversed(output.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    return None


class _Results(msgspec.Struct):
    all: dict[str, Any]


class _Report(msgspec.Struct):
    """metrics.json, as far as it is read."""

    results: _Results


def _reported(folder: Path) -> Mapping[str, Any] | None:
    rows = read_rows(folder / LOGGED)
    logged = {name: value for row in rows for name, value in row.items() if name.startswith(EVAL)}
    try:
        reported = msgspec.json.decode(read_regular(folder / "metrics.json"), type=_Report).results.all
    except (OSError, *NOT_JSON):
        reported = {}
    return {**logged, **reported} or None
