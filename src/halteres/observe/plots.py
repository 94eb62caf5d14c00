"""Pictures of a run: the PNG at its end, and a sparkline for terminals.

Owns: how reward and evaluation are shown.
Never: computes a metric beyond a moving average; imports matplotlib before a picture is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.files import replacing
from halteres.observe.metrics import merge_by_step, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[int, float]]

WINDOW = 10
"""Steps of the moving average: the noise of one step hides what ten show."""

BARS = "▁▂▃▄▅▆▇█"
REWARD, SUCCESS, SAMPLED, GREEDY, PALE = "#1b6ca8", "#e08a1e", "#a8321b", "#2e7d4f", "#8a8f98"


def sparkline(values: Sequence[float | None], width: int = 24) -> str:
    """The values as one line of bars, at most `width` characters: the mean of each stretch, from least to greatest.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or width < 1:
        return ""
    count = min(width, len(known))
    edges = [round(index * len(known) / count) for index in range(count + 1)]
    means = [sum(known[low:high]) / (high - low) for low, high in pairwise(edges)]
    least, spread = min(means), max(means) - min(means)
    if spread == 0:
        return BARS[3] * count
    return "".join(BARS[round((mean - least) / spread * (len(BARS) - 1))] for mean in means)


def moving_average(points: Points, window: int = WINDOW) -> Points:
    """The mean of each point and up to `window - 1` before it.

    >>> moving_average([(1, 0.0), (2, 1.0), (3, 2.0)], window=2)
    [(1, 0.0), (2, 0.5), (3, 1.5)]
    """
    averages: Points = []
    for index, (step, _) in enumerate(points):
        stretch = [value for _, value in points[max(0, index - window + 1) : index + 1]]
        averages.append((step, sum(stretch) / len(stretch)))
    return averages


def plot_run(rows: Iterable[Mapping[str, Any]], file: Path, title: str) -> None:
    """Write a PNG, 1200 x 700: reward and success of training, evaluation before, during and after.

    Args:
        rows: of metrics.jsonl, merged or not.
        file: where to; the folder must exist.
        title: over the picture.
    """
    merged = merge_by_step(rows)
    figure, axes = _canvas(title)
    reward, success = series(merged, "reward/mean"), series(merged, "reward/success")
    _draw_training(axes, reward, REWARD, "reward")
    rates = bool(success) and success != reward
    if rates:
        _draw_training(axes, success, SUCCESS, "success rate")
    sampled, greedy = series(merged, "eval/percent_correct"), series(merged, "eval/percent_correct_greedy")
    _draw_evaluation(axes, sampled, greedy, SAMPLED, "held-out, T = 1", "o")
    _draw_evaluation(axes, greedy, sampled, GREEDY, "held-out, greedy", "D")
    _finish(axes, "optimiser step", "reward and rates" if rates else "reward")
    _save(figure, file)


def plot_runs(curves: Mapping[str, Iterable[Mapping[str, Any]]], file: Path, title: str, name: str) -> None:
    """Write a PNG with one metric's moving average for several runs.

    Args:
        curves: label to rows of metrics.jsonl.
        file: where to; the folder must exist.
        title: over the picture.
        name: of the metric.
    """
    figure, axes = _canvas(title)
    for colour, (label, rows) in zip(_colours(), curves.items(), strict=False):
        points = series(merge_by_step(rows), name)
        if not points:
            continue
        axes.plot(*_columns(points), color=colour, alpha=0.18, linewidth=1)
        axes.plot(*_columns(moving_average(points)), color=colour, linewidth=2.2, label=label)
    _finish(axes, "optimiser step", f"{name} (mean of {WINDOW} steps)")
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    """Whole or not at all: others may be looking at the old one."""
    with replacing(file) as beside:
        figure.savefig(beside)


def _canvas(title: str) -> tuple[Any, Axes]:
    """A figure of its own, not pyplot's: nothing global, no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", pad=14)
    return figure, axes


def _draw_training(axes: Axes, points: Points, colour: str, label: str) -> None:
    if not points:
        return
    axes.plot(*_columns(points), color=colour, alpha=0.4, linewidth=1.2, label=f"{label}, each step")
    axes.plot(*_columns(moving_average(points)), color=colour, linewidth=2.6, label=f"{label}, mean of {WINDOW} steps")


def _draw_evaluation(axes: Axes, points: Points, others: Points, colour: str, label: str, marker: str) -> None:
    """Points joined by a thin line; the first, before training, is the baseline. `others`: the curve beside it."""
    if not points:
        return
    style: dict[str, Any] = {"markersize": 9, "markeredgecolor": "white", "zorder": 5}
    axes.plot(*_columns(points), color=colour, linestyle=":", linewidth=1.4, marker=marker, label=label, **style)
    axes.axhline(points[0][1], color=colour, linestyle="--", linewidth=1, alpha=0.45)
    _label(axes, points[0], "before" if points[0][0] == 0 else "first", colour, _is_above(points[0], others, marker))
    if len(points) > 1:
        _label(axes, points[-1], "after", colour, _is_above(points[-1], others, marker))


def _is_above(point: tuple[int, float], others: Points, marker: str) -> bool:
    """The two evaluations lie close together: the label of the higher one goes above, of the lower one below."""
    other = dict(others).get(point[0], -math.inf)
    return point[1] > other or (point[1] == other and marker == "D")


def _label(axes: Axes, point: tuple[int, float], word: str, colour: str, above: bool) -> None:
    """Beside the point, outside the curves: to the left of the first, to the right of the last."""
    outward = 1 if word == "after" else -1
    text = f"{word} {point[1]:.0%}" if 0 <= point[1] <= 1 else f"{word} {point[1]:.2f}"
    axes.annotate(
        text,
        point,
        textcoords="offset points",
        xytext=(11 * outward, 8 if above else -8),
        ha="left" if outward > 0 else "right",
        va="bottom" if above else "top",
        fontsize=11.5,
        fontweight="bold",
        color=colour,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        zorder=6,
    )


def _finish(axes: Axes, across: str, up: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(across, fontsize=12)
    axes.set_ylabel(up, fontsize=12)
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.1:
        axes.set_ylim(-0.03, 1.06)
    first, last = axes.get_xlim()
    room = 0.1 * (last - first)  # for the labels beside the first and last points
    axes.set_xticks([tick for tick in MaxNLocator(integer=True).tick_values(max(0, first), last) if 0 <= tick <= last])
    axes.set_xlim(first - room, last + room)
    axes.grid(True, color=PALE, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=11)
    else:
        axes.text(0.5, 0.5, "no step yet", transform=axes.transAxes, ha="center", color=PALE, fontsize=16)


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _colours() -> tuple[str, ...]:
    return (REWARD, SUCCESS, SAMPLED, GREEDY, "#6a4ba3", "#3a9a9a", "#b5518f", "#6b6b2a")
