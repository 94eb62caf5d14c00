"""Pictures of runs (reward, evaluations with their margins, alerts), and a sparkline for terminals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.observe.canvas import PALE, Canvas, finish, steps_below
from halteres.observe.metrics import Row, merge_by_step, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 10  # steps of the moving average, at most: the noise of one step hides what ten show
DODGE = 0.008  # how far apart, as a share of the steps, margins at the same step are drawn

BARS = "▁▂▃▄▅▆▇█"
REWARD, SUCCESS, SAMPLED, GREEDY, ALERT = "#1b6ca8", "#e08a1e", "#a8321b", "#2e7d4f", "#c0392b"
COLOURS = (REWARD, SUCCESS, GREEDY, SAMPLED, "#6a4ba3", "#3a9a9a", "#b5518f", "#6b6b2a")

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """How one kind of evaluation is drawn."""

    colour: str
    label: str
    marker: str = "o"
    aside: float = 0.0  # steps to the right, so that margins at the same step do not hide each other


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
    stretches = [points[max(0, index - window + 1) : index + 1] for index in range(len(points))]
    return [(stretch[-1][0], sum(value for _, value in stretch) / len(stretch)) for stretch in stretches]


def margins_of(rows: list[Row], name: str) -> list[float]:
    """95 % of each evaluation: from the standard error it reports, else of a share among so many tasks, else 0."""
    margins: list[float] = []
    for row in rows:
        share, error, num_tasks = row.get(name), row.get(f"{name}_stderr"), row.get("eval/num_tasks")
        if isinstance(share, int | float):
            is_share = name.startswith("eval/percent_correct") and 0 <= share <= 1
            binomial = math.sqrt(share * (1 - share) / num_tasks) if is_share and num_tasks else 0.0
            margins.append(1.96 * (error if isinstance(error, int | float) else binomial))
    return margins


def plot_run(rows: Iterable[Mapping[str, Any]], file: Path, title: str, alerts: Sequence[tuple[str, int]] = ()) -> None:
    """Write a PNG, 1200 x 700: reward and success of training, evaluation before, during and after, alerts.

    Args:
        rows: of metrics.jsonl, merged or not.
        file: where to; the folder must exist.
        title: over the picture.
        alerts: (rule, step).
    """
    merged = merge_by_step(rows)
    reward, success = series(merged, "reward/mean"), series(merged, "reward/success")
    apart = any(not -0.1 <= value <= 1.1 for _, value in reward)  # then shares need a scale of their own
    rules = sorted({rule for rule, _ in alerts})
    heights = [1.0] * (1 + apart) + [0.05 * len(rules) * (1 + apart)] * bool(rules)
    canvas = Canvas(title, rows=len(heights), heights=heights)
    above, shares = canvas.panels[0], canvas.panels[1 if apart else 0]
    _draw_training(above, reward, REWARD, "reward")
    has_rates = bool(success) and success != reward
    if has_rates:
        _draw_training(shares, success, SUCCESS, "success rate")
    sampled, greedy = series(merged, "eval/percent_correct"), series(merged, "eval/percent_correct_greedy")
    aside = DODGE * max((row["step"] for row in merged), default=0) / 2
    warm = _Style(colour=SAMPLED, label="held-out, T = 1, 95 %", marker="o", aside=-aside)
    cold = _Style(colour=GREEDY, label="held-out, greedy, 95 %", marker="D", aside=aside)
    for points, others, name, style in (
        (sampled, greedy, "eval/percent_correct", warm),
        (greedy, sampled, "eval/percent_correct_greedy", cold),
    ):
        _draw_points(shares, points, margins_of(merged, name), style)
        _label_ends(shares, points, others, style)
    has_shares = has_rates or bool(sampled or greedy)
    finish(above, "reward, shares" if has_shares and not apart else "reward", room=0.1)
    if apart:
        finish(shares, "shares")
    _finish_run(canvas, rules, alerts, above, shares)
    canvas.save(file)


def plot_reward_training(
    rows: Iterable[Mapping[str, Any]], file: Path, title: str, alerts: Sequence[tuple[str, int]] = ()
) -> None:
    """Write a PNG, 1200 x 700, of the training of a reward model: shares of pairs that it puts in the right order, of
    each batch and held out, and alerts. Arguments are those of `plot_run`."""
    merged, rules = merge_by_step(rows), sorted({rule for rule, _ in alerts})
    heights = [1.0] + [0.05 * len(rules)] * bool(rules)
    canvas = Canvas(title, rows=len(heights), heights=heights)
    accuracy = canvas.panels[0]
    _draw_training(accuracy, series(merged, "accuracy"), REWARD, "pairs in the right order")
    held_out = series(merged, "eval_accuracy")
    style = _Style(colour=SAMPLED, label="held-out pairs")
    _draw_points(accuracy, held_out, margins_of(merged, "eval_accuracy"), style)
    _label_ends(accuracy, held_out, [], style)
    finish(accuracy, "accuracy", room=0.1)
    _finish_run(canvas, rules, alerts, accuracy)
    canvas.save(file)


def plot_runs(curves: Mapping[str, Iterable[Mapping[str, Any]]], file: Path, title: str, *names: str) -> None:
    """Write a PNG with a panel for each metric and a curve for each run: evaluations with their margins, moving
    averages of what every step tells.

    Args:
        curves: label to rows of metrics.jsonl.
        file: where to; the folder must exist.
        title: over the picture.
        names: of the metrics; four at most are drawn.
    """
    shown = names[:4]
    canvas = Canvas(title, rows=1 + (len(shown) > 2), columns=1 + (len(shown) > 1), shared=False)
    merged = {label: merge_by_step(rows) for label, rows in curves.items()}
    last = max((row["step"] for rows in merged.values() for row in rows), default=0)
    aside = min(DODGE, 0.03 / max(1, len(merged) - 1)) * last
    for axes, name in zip(canvas.panels, shown, strict=False):
        for place, (label, rows) in enumerate(merged.items()):
            points, colour = series(rows, name), COLOURS[place % len(COLOURS)]
            if name.startswith("eval/"):
                dodged = aside * (place - (len(merged) - 1) / 2)
                _draw_points(axes, points, margins_of(rows, name), _Style(colour=colour, label=label, aside=dodged))
            elif points:
                axes.plot(*_columns(points), color=colour, alpha=0.18, linewidth=1)
                window = max(1, min(WINDOW, len(points) // 5))
                axes.plot(*_columns(moving_average(points, window)), color=colour, linewidth=2.2, label=label)
        finish(axes, name)
        steps_below(axes)
    for unused in canvas.panels[len(shown) :]:
        unused.set_axis_off()
    canvas.legend(*canvas.panels[: len(shown)])
    canvas.save(file)


def _finish_run(canvas: Canvas, rules: list[str], alerts: Sequence[tuple[str, int]], *curves: Axes) -> None:
    """A strip under the curves, with a line for each rule and a mark at each step at which it spoke; the legend."""
    axes = canvas.panels[-1]
    if rules:
        for rule, step in alerts:
            axes.plot(step, rules.index(rule), marker="v", markersize=9, color=ALERT, linestyle="none", clip_on=False)
        axes.set_yticks(range(len(rules)), rules, fontsize=10, color=ALERT)
        axes.set_ylim(len(rules) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x", color=PALE, alpha=0.25)
        axes.spines[["top", "right", "left"]].set_visible(False)
    steps_below(axes)
    canvas.legend(*curves)


def _draw_training(axes: Axes, points: Points, colour: str, label: str) -> None:
    window = min(WINDOW, len(points) // 5)  # of a short run a shorter mean: a long one would only lag behind
    if points and window < 2:
        axes.plot(*_columns(points), color=colour, linewidth=2.6, label=label)
    elif points:
        axes.plot(*_columns(points), color=colour, alpha=0.4, linewidth=1.2, label=f"{label}, each step")
        mean = moving_average(points, window)
        axes.plot(*_columns(mean), color=colour, linewidth=2.6, label=f"{label}, mean of {window} steps")


def _draw_points(axes: Axes, points: Points, margins: list[float], style: _Style) -> None:
    """Joined by a thin line, each with its margin."""
    if not points:
        return
    steps, values = _columns(points)
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


def _label_ends(axes: Axes, points: Points, others: Points, style: _Style) -> None:
    """Words outside the curves: left of the first point, which is the baseline, and right of the last."""
    if points:
        axes.axhline(points[0][1], color=style.colour, linestyle="--", linewidth=1, alpha=0.45)
    ends = [(points[0], "before" if points[0][0] == 0 else "first", "right", -11)] if points else []
    ends += [(points[-1], "after", "left", 11)] if len(points) > 1 else []
    for point, word, side, outward in ends:
        # Of two evaluations that lie close together, the higher one's label goes above, the lower one's below.
        other = dict(others).get(point[0], -math.inf)
        is_above = point[1] > other or (point[1] == other and style.marker == "D")
        axes.annotate(
            f"{word} {point[1]:.0%}" if 0 <= point[1] <= 1 else f"{word} {point[1]:.2f}",
            point,
            textcoords="offset points",
            xytext=(outward, 5 if is_above else -5),
            ha=side,
            va="bottom" if is_above else "top",
            fontsize=11.5,
            fontweight="bold",
            color=style.colour,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            zorder=6,
        )


def _columns(points: Points) -> tuple[list[int], list[float]]:
    """Steps and values apart, as matplotlib takes them."""
    return [step for step, _ in points], [value for _, value in points]
