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

AXES: Mapping[str, str] = {"time": "time/step", "tokens": "tokens/action"}
"""What a curve may be drawn over, besides the steps -> the metric whose sum that is. Seconds of
steps, not hours of a clock: a run that was resumed, or whose machine slept, has no gap.
"""

Column = dict[int, float]
"""One metric: step -> value. Where a step has several, the last one holds."""


class Curves:
    """The metrics of one run, as far as they were read; reading goes on as the file grows."""

    def __init__(self, metrics: Path, _inode: int | None = None) -> None:
        """`_inode`: of a file that may be replaced by a shorter one, which is then read anew."""
        self._tail = Tail(metrics)
        self._columns: dict[str, Column] = {}
        self._lock = threading.Lock()

    def columns(
        self,
        names: Collection[str],
        most: int = MOST_POINTS,
        within: tuple[int, int] = (0, _LARGEST),
    ) -> dict[str, Any]:
        """Equally long columns, null where a step has no value.

        Args:
            names: of metrics; one that ends with `*` stands for all that begin like it. Those of
                evaluations are in every answer.
            most: points of a column.
            within: the first and the last step.

        Returns:
            {names: all there are, columns: {step, NAME ...}, each: steps per point, axes: {AXIS:
            what the run had spent at each point}, evaluations: {step, NAME ..., margins, axes}}.
            `margins`: NAME -> 95 %, plus and minus.
        """
        with self._lock:
            self._read_on()
            evaluations = {
                name: column for name, column in self._columns.items() if name.startswith("eval/")
            }
            trained = {
                name: column
                for name, column in self._columns.items()
                if name not in evaluations and _is_wanted(name, names)
            }
            each, columns = _means(_between(trained, within), most)
            found = _newest(_between(evaluations, within), most)
            return {
                "names": sorted(self._columns),
                "each": each,
                "columns": columns,
                "axes": self._axes(columns["step"]),
                "evaluations": {**found, "axes": self._axes(found["step"])},
            }

    def _read_on(self) -> None:
        """Take in the rows that came since the last look."""
        for row in self._tail.fresh():
            step = row.get("step")
            if type(step) is not int or not 0 <= step < _LARGEST:
                continue
            for name, value in row.items():
                # JSON that Python reads may hold NaN, and integers that no float can hold.
                is_figure = isinstance(value, int | float) and not isinstance(value, bool)
                if name in ("step", "t", "src") or not is_figure or not abs(value) < 1e300:
                    continue
                if name in self._columns or len(self._columns) < MOST_NAMES:
                    self._columns.setdefault(name, {})[step] = float(value)

    def _axes(self, steps: Sequence[int]) -> dict[str, list[float]]:
        """Of each axis that is known: what all steps up to each of these took together."""
        return {
            axis: _sums(self._columns[metric], steps)
            for axis, metric in AXES.items()
            if metric in self._columns
        }


def _is_wanted(name: str, names: Collection[str]) -> bool:
    beginnings = tuple(one[:-1] for one in names if one.endswith("*"))
    return name in names or name.startswith(beginnings)


def _between(columns: Mapping[str, Column], within: tuple[int, int]) -> dict[str, Column]:
    """The part of each column that lies between two steps, both included."""
    first, last = within
    return {
        name: {step: value for step, value in column.items() if first <= step <= last}
        for name, column in columns.items()
    }


def _sums(column: Column, steps: Sequence[int]) -> list[float]:
    """The sum of a column's values up to each of these steps, which ascend."""
    values = sorted(column.items())
    found: list[float] = []
    total, at = 0.0, 0
    for step in steps:
        while at < len(values) and values[at][0] <= step:
            total += values[at][1]
            at += 1
        found.append(float(f"{total:.6g}"))
    return found


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
    "sft": ("train/loss_per_token", "eval/loss_per_token"),
    "dpo": ("train/loss", "eval/loss"),
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
