"""Curves of a run, short enough to draw: columns for its page, a sketch for the list of runs."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from halteres.observe.metrics import Row, Tail, read_rows
from halteres.observe.plots import margins_of
from halteres.runs.state import Kind

MOST_POINTS = 500
MOST_NAMES = 512  # metrics of one run; an environment may write what it likes
_LARGEST = 2**53


Column = dict[int, float]
"""One metric: step -> value. Where a step has several, the last one holds."""


class Curves:
    """The metrics of one run, as far as they were read; reading goes on as the file grows."""

    def __init__(self, metrics: Path) -> None:
        self._tail = Tail(metrics)
        self._columns: dict[str, Column] = {}
        self._lock = threading.Lock()

    def columns(self, names: Collection[str], most: int = MOST_POINTS) -> dict[str, Any]:
        """{names: all there are, columns: {step, NAME ...}, each: steps per point, evaluations:
        {step, NAME ..., margins}}: equally long columns, null where a step has no value. `margins`:
        NAME -> 95 %, plus and minus.
        """
        with self._lock:
            for row in self._tail.fresh():
                step = row.get("step")
                if type(step) is int and 0 <= step < _LARGEST:
                    for name, value in row.items():
                        # JSON that Python reads may hold NaN, and integers that no float can hold.
                        is_figure = isinstance(value, int | float) and not isinstance(value, bool)
                        is_known = name in self._columns or len(self._columns) < MOST_NAMES
                        if (
                            is_figure
                            and abs(value) < 1e300
                            and is_known
                            and name not in ("step", "t", "src")
                        ):
                            self._columns.setdefault(name, {})[step] = float(value)
            evaluations = {
                name: column for name, column in self._columns.items() if name.startswith("eval/")
            }
            others = [name for name in names if name in self._columns and name not in evaluations]
            each, columns = _means({name: self._columns[name] for name in others}, most)
            return {
                "names": sorted(self._columns),
                "each": each,
                "columns": columns,
                "evaluations": _newest(evaluations, most),
            }


def _means(columns: Mapping[str, Column], most: int) -> tuple[int, dict[str, list[Any]]]:
    """Steps per point, and the columns: of more steps than `most`, each point is the mean of as
    many, at their last.
    """
    steps = sorted({step for column in columns.values() for step in column})
    each = max(1, math.ceil(len(steps) / most))
    stretches = [steps[at : at + each] for at in range(0, len(steps), each)]
    means: dict[str, list[Any]] = {"step": [stretch[-1] for stretch in stretches]}
    for name, column in columns.items():
        means[name] = [_mean(column, stretch) for stretch in stretches]
    return each, means


def _mean(column: Column, steps: Sequence[int]) -> float | None:
    """Over those of the steps that have a value; None where none has."""
    values = [column[step] for step in steps if step in column]
    if not values:
        return None
    return float(f"{fmean(values):.5g}")


def _newest(columns: Mapping[str, Column], most: int) -> dict[str, Any]:
    """The newest evaluations, one by one: a mean of several is no evaluation, and has no margin."""
    steps = sorted({step for column in columns.values() for step in column})[-most:]
    rows: list[Row] = [
        {name: column[step] for name, column in columns.items() if step in column} for step in steps
    ]
    margins: dict[str, list[float | None]] = {}
    for name in columns:
        if name.endswith("_stderr"):
            continue
        # one for each row that has the metric
        known = iter(margins_of(rows, name))
        margins[name] = []
        for row in rows:
            margin = None
            if name in row:
                margin = next(known)
            margins[name].append(margin)
    return {
        "step": steps,
        **{name: [row.get(name) for row in rows] for name in columns},
        "margins": margins,
    }


curves_of = lru_cache(maxsize=6)(Curves)
"""The curves in a file; those of the runs that pages showed last are remembered."""


POINTS = 40  # points of a curve that is a hundred pixels wide


@dataclass(frozen=True, slots=True)
class Spark:
    """What a list shows of a run's figures."""

    # mean of the batch, reward units, evenly spread over the run; of a reward training the share
    # of its pairs in the right order
    rewards: tuple[float, ...] = ()
    reward: float | None = None  # the newest
    evaluation: float | None = None  # the newest held-out share correct


_NAMES: dict[Kind, tuple[str, str]] = {
    "rl": ("reward/mean", "eval/percent_correct"),
    "reward": ("accuracy", "eval_accuracy"),
}
"""By what kind of run: the metrics that a list shows."""


def spark_of(metrics: Path, kind: Kind = "rl") -> Spark:
    """The curve as it is now; an empty one where there is no file. It is read again only once the
    file has grown.
    """
    try:
        found = metrics.stat()
    except OSError:
        return Spark()
    return _read_spark(metrics, kind, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=2048)
def _read_spark(metrics: Path, kind: Kind, *_file: int) -> Spark:
    rows = list(read_rows(metrics))
    rewards, evaluations = (
        [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
        for name in _NAMES[kind]
    )
    if not rewards and not evaluations:
        return Spark()
    last = len(rewards) - 1
    if last < POINTS:
        places = range(len(rewards))
    else:
        places = (round(at * last / (POINTS - 1)) for at in range(POINTS))
    reward, evaluation = None, None
    if rewards:
        reward = rewards[-1]
    if evaluations:
        evaluation = evaluations[-1]
    return Spark(tuple(rewards[place] for place in places), reward, evaluation)
