"""Curves of a run, column by column, short enough to draw.

Owns: reading metrics.jsonl on as it grows; what becomes of steps where there are more than a chart has room for.
Never: decides which metrics are worth a chart.
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from halteres.observe.metrics import Tail
from halteres.observe.plots import margins_of

MOST_POINTS = 500

MOST_NAMES = 512
"""Metrics of one run; an environment may write what it likes."""

KEPT = 6
"""Runs whose curves are kept: those that pages show."""

EVALUATION = "eval/"
_BESIDE = ("step", "t", "src")
_LARGEST = 2**53


class Column:
    """One metric: (step, value), ascending."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def put(self, step: int, value: float) -> None:
        """Add a value; where the step has one, the last word holds."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        at = bisect_left(self.steps, step)
        if self.steps[at] == step:
            self.values[at] = value
        else:
            self.steps.insert(at, step)
            self.values.insert(at, value)


class Curves:
    """The metrics of one run, as far as they were read."""

    def __init__(self, metrics: Path) -> None:
        self._tail = Tail(metrics)
        self._columns: dict[str, Column] = {}
        self._lock = threading.Lock()

    def told(self, names: Collection[str], most: int = MOST_POINTS) -> dict[str, Any]:
        """{names: all there are, columns: {step, NAME ...}, each: steps per point, evaluations: {step, NAME ...,
        margins}}: equally long columns, null where a step has no value. `margins`: NAME -> 95 %, plus and minus.
        """
        with self._lock:
            self._read_on()
            trained = {
                name: self._columns[name] for name in names if name in self._columns and not _is_evaluation(name)
            }
            each, columns = _thinned(trained, most)
            return {
                "names": sorted(self._columns),
                "each": each,
                "columns": columns,
                "evaluations": _evaluations({k: v for k, v in self._columns.items() if _is_evaluation(k)}, most),
            }

    def _read_on(self) -> None:
        for row in self._tail.fresh():
            step = row.get("step")
            if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _LARGEST:
                for name, value in row.items():
                    self._put(name, step, value)

    def _put(self, name: str, step: int, value: Any) -> None:
        if name in _BESIDE or not _is_figure(value):
            return
        if name not in self._columns and len(self._columns) >= MOST_NAMES:
            return
        self._columns.setdefault(name, Column()).put(step, float(value))


def _is_evaluation(name: str) -> bool:
    return name.startswith(EVALUATION)


def _is_figure(value: Any) -> bool:
    """JSON that Python reads may hold NaN, and integers that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _LARGEST if isinstance(value, int) else math.isfinite(value)


def _thinned(columns: Mapping[str, Column], most: int) -> tuple[int, dict[str, list[Any]]]:
    """Steps per point, and the columns: of more steps than `most`, each point is the mean of as many, at their last."""
    steps = sorted({step for column in columns.values() for step in column.steps})
    each = max(1, math.ceil(len(steps) / most))
    stretches = [steps[at : at + each] for at in range(0, len(steps), each)]
    told: dict[str, list[Any]] = {"step": [stretch[-1] for stretch in stretches]}
    for name, column in columns.items():
        by_step = dict(zip(column.steps, column.values, strict=True))
        told[name] = [_mean([by_step[step] for step in stretch if step in by_step]) for stretch in stretches]
    return each, told


def _mean(values: Sequence[float]) -> float | None:
    """Five digits are more than a chart shows."""
    return float(f"{values[0] if len(values) == 1 else fmean(values):.5g}") if values else None


def _evaluations(columns: Mapping[str, Column], most: int) -> dict[str, Any]:
    """The newest of them: a mean of evaluations would be none, and its margin a wrong one."""
    steps = sorted({step for column in columns.values() for step in column.steps})[-most:]
    values = {name: dict(zip(column.steps, column.values, strict=True)) for name, column in columns.items()}
    rows = [{name: found[step] for name, found in values.items() if step in found} for step in steps]
    return {
        "step": steps,
        **{name: [row.get(name) for row in rows] for name in columns},
        "margins": {name: _margins(rows, name) for name in columns if not name.endswith("_stderr")},
    }


def _margins(rows: Sequence[Mapping[str, float]], name: str) -> list[float | None]:
    """In the places of the values; None where there is no value."""
    known = iter(margins_of([dict(row) for row in rows], name))
    return [next(known) if name in row else None for row in rows]


class RecentCurves:
    """The curves of the runs that were asked for last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, Curves] = OrderedDict()
        self._lock = threading.Lock()

    def curves(self, metrics: Path) -> Curves:
        """Those of this file."""
        with self._lock:
            found = self._kept.setdefault(metrics, Curves(metrics))
            self._kept.move_to_end(metrics)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return found
