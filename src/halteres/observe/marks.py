"""Evaluations in a picture: points with their margins, and words beside the first and the last.

Owns: how sure a figure is, and how that is drawn.
Never: decides which figures are shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halteres.observe.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How one kind of evaluation is drawn."""

    colour: str
    label: str
    marker: str = "o"
    aside: float = 0.0  # steps to the right, so that margins at the same step do not hide each other


def draw_points(axes: Axes, points: Points, margins: list[float], style: Style) -> None:
    """Joined by a thin line, each with its margin."""
    if not points:
        return
    steps, values = columns(points)
    axes.errorbar(
        [step + style.aside for step in steps],
        values,
        yerr=margins,
        fmt=style.marker,
        color=style.colour,
        label=style.label,
        linestyle=":",
        linewidth=1.4,
        markersize=8,
        markeredgecolor="white",
        capsize=4,
        zorder=5,
    )


def margins_of(rows: list[Row], name: str) -> list[float]:
    """95 % of each evaluation: from the standard error it reports, else of a share among so many tasks, else 0."""
    return [1.96 * _error(row, name) for row in rows if isinstance(row.get(name), int | float)]


def _error(row: Row, name: str) -> float:
    error, share, num_tasks = row.get(f"{name}_stderr"), row[name], row.get("eval/num_tasks")
    if isinstance(error, int | float):
        return float(error)
    is_share = name.startswith("eval/percent_correct") and 0 <= share <= 1
    return math.sqrt(share * (1 - share) / num_tasks) if is_share and num_tasks else 0.0


def tell_ends(axes: Axes, points: Points, others: Points, style: Style) -> None:
    """Words beside the first point, which is the baseline, and beside the last."""
    if not points:
        return
    axes.axhline(points[0][1], color=style.colour, linestyle="--", linewidth=1, alpha=0.45)
    _label(axes, points[0], "before" if points[0][0] == 0 else "first", _is_above(points[0], others, style), style)
    if len(points) > 1:
        _label(axes, points[-1], "after", _is_above(points[-1], others, style), style)


def _is_above(point: tuple[int, float], others: Points, style: Style) -> bool:
    """The two evaluations lie close together: the label of the higher one goes above, of the lower one below."""
    other = dict(others).get(point[0], -math.inf)
    return point[1] > other or (point[1] == other and style.marker == "D")


def _label(axes: Axes, point: tuple[int, float], word: str, above: bool, style: Style) -> None:
    """Beside the point, outside the curves: to the left of the first, to the right of the last."""
    outward = 1 if word == "after" else -1
    text = f"{word} {point[1]:.0%}" if 0 <= point[1] <= 1 else f"{word} {point[1]:.2f}"
    axes.annotate(
        text,
        point,
        textcoords="offset points",
        xytext=(11 * outward, 5 if above else -5),
        ha="left" if outward > 0 else "right",
        va="bottom" if above else "top",
        fontsize=11.5,
        fontweight="bold",
        color=style.colour,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        zorder=6,
    )


def columns(points: Points) -> tuple[list[int], list[float]]:
    """Steps and values apart, as matplotlib takes them."""
    return [step for step, _ in points], [value for _, value in points]
