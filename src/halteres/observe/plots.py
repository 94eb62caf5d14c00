"""Pictures of runs (reward, evaluations with their margins, alerts), and a sparkline for
terminals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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

Points = Sequence[tuple[int, float]]


def sparkline(values: Sequence[float | None], width: int = 24) -> str:
    """The values as one line of bars, at most `width` characters: the mean of each stretch, from
    least to greatest.

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
    return [
        (stretch[-1][0], sum(value for _, value in stretch) / len(stretch)) for stretch in stretches
    ]


def margins_of(rows: list[Row], name: str) -> list[float]:
    """95 % of each evaluation: from the standard error it reports, else of a share among so many
    tasks, else 0.
    """
    margins: list[float] = []
    for row in rows:
        share, error, num_tasks = (
            row.get(name),
            row.get(f"{name}_stderr"),
            row.get("eval/num_tasks"),
        )
        if isinstance(share, int | float):
            is_share = name.startswith("eval/percent_correct") and 0 <= share <= 1
            binomial = math.sqrt(share * (1 - share) / num_tasks) if is_share and num_tasks else 0.0
            margins.append(1.96 * (error if isinstance(error, int | float) else binomial))
    return margins


def plot_run(
    rows: Iterable[Mapping[str, Any]],
    file: Path,
    title: str,
    alerts: Sequence[tuple[str, int]] = (),
) -> None:
    """Write a PNG, 1200 x 700: reward and success of training, evaluation before, during and after,
    alerts.

    Args:
        rows: of metrics.jsonl, merged or not.
        file: where to; the folder must exist.
        title: over the picture.
        alerts: (rule, step).
    """
    merged = merge_by_step(rows)
    reward = series(merged, "reward/mean")
    # of all rollouts; of a foreign environment, which counts none, of those of the batch
    success = series(merged, "train/percent_correct") or series(merged, "reward/success")
    # then shares need a scale of their own
    is_apart = any(not -0.1 <= value <= 1.1 for _, value in reward)
    canvas = _run_canvas(title, 1 + is_apart, alerts)
    above, shares = canvas.panels[0], canvas.panels[1 if is_apart else 0]
    _draw_training(above, reward, REWARD, "reward")
    has_rates = bool(success) and success != reward
    if has_rates:
        _draw_training(shares, success, SUCCESS, "success rate")
    shift = DODGE * max((row["step"] for row in merged), default=0) / 2
    sampled, greedy = "eval/percent_correct", "eval/percent_correct_greedy"
    warm = _draw_evaluations(
        shares, merged, sampled, SAMPLED, "held-out, T = 1, 95 %", shift=-shift
    )
    cold = _draw_evaluations(
        shares, merged, greedy, GREEDY, "held-out, greedy, 95 %", marker="D", shift=shift
    )
    _label_ends(shares, warm, SAMPLED, others=cold)
    _label_ends(shares, cold, GREEDY, others=warm, above_equal=True)
    has_shares = has_rates or bool(warm or cold)
    finish(above, "reward, shares" if has_shares and not is_apart else "reward", room=0.1)
    if is_apart:
        finish(shares, "shares")
    _finish_run(canvas, alerts, above, shares)
    canvas.save(file)


def plot_reward_training(
    rows: Iterable[Mapping[str, Any]],
    file: Path,
    title: str,
    alerts: Sequence[tuple[str, int]] = (),
) -> None:
    """Write a PNG, 1200 x 700, of the training of a reward model: shares of pairs that it puts in
    the right order, of each batch and held out, and alerts. Arguments are those of `plot_run`.
    """
    merged, canvas = merge_by_step(rows), _run_canvas(title, 1, alerts)
    accuracy = canvas.panels[0]
    _draw_training(accuracy, series(merged, "accuracy"), REWARD, "pairs in the right order")
    _label_ends(
        accuracy,
        _draw_evaluations(accuracy, merged, "eval_accuracy", SAMPLED, "held-out pairs"),
        SAMPLED,
    )
    finish(accuracy, "accuracy", room=0.1)
    _finish_run(canvas, alerts, accuracy)
    canvas.save(file)


def plot_file_training(
    rows: Iterable[Mapping[str, Any]],
    file: Path,
    title: str,
    alerts: Sequence[tuple[str, int]] = (),
) -> None:
    """Write a PNG, 1200 x 700, of a training on a file: its loss, of each batch and held out, and
    alerts. Arguments are those of `plot_run`.
    """
    merged, canvas = merge_by_step(rows), _run_canvas(title, 1, alerts)
    loss, words = canvas.panels[0], "loss, nats per token"
    held_out = "eval/loss_per_token"
    trained = series(merged, "train/loss_per_token")
    if not trained:
        words, held_out, trained = "loss", "eval/loss", series(merged, "train/loss")
    _draw_training(loss, trained, REWARD, "loss of the batch")
    points = _draw_evaluations(loss, merged, held_out, SAMPLED, "held-out rows, 95 %")
    _label_ends(loss, points, SAMPLED, form=".3f")
    finish(loss, words, room=0.1)
    _finish_run(canvas, alerts, loss)
    canvas.save(file)


def plot_runs(
    curves: Mapping[str, Iterable[Mapping[str, Any]]], file: Path, title: str, *names: str
) -> None:
    """Write a PNG with a panel for each metric and a curve for each run: evaluations with their
    margins, moving averages of what every step reports.

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
    apart = min(DODGE, 0.03 / max(1, len(merged) - 1)) * last
    for axes, name in zip(canvas.panels, shown, strict=False):
        for place, (label, rows) in enumerate(merged.items()):
            points, colour = series(rows, name), COLOURS[place % len(COLOURS)]
            if name.startswith("eval/"):
                _draw_evaluations(
                    axes, rows, name, colour, label, shift=apart * (place - (len(merged) - 1) / 2)
                )
            elif points:
                axes.plot(*_columns(points), color=colour, alpha=0.18, linewidth=1)
                window = max(1, min(WINDOW, len(points) // 5))
                axes.plot(
                    *_columns(moving_average(points, window)),
                    color=colour,
                    linewidth=2.2,
                    label=label,
                )
        finish(axes, name)
        steps_below(axes)
    for unused in canvas.panels[len(shown) :]:
        unused.set_axis_off()
    canvas.legend(*canvas.panels[: len(shown)])
    canvas.save(file)


def _run_canvas(title: str, num_panels: int, alerts: Sequence[tuple[str, int]]) -> Canvas:
    """Panels for curves, and under them a strip with a line for each rule that spoke."""
    num_rules = len({rule for rule, _ in alerts})
    heights = [1.0] * num_panels + [0.05 * num_rules * num_panels] * bool(num_rules)
    return Canvas(title, rows=len(heights), heights=heights)


def _finish_run(canvas: Canvas, alerts: Sequence[tuple[str, int]], *curves: Axes) -> None:
    """The strip, with a mark at each step at which a rule spoke; the legend."""
    axes, rules = canvas.panels[-1], sorted({rule for rule, _ in alerts})
    if rules:
        for rule, step in alerts:
            axes.plot(
                step,
                rules.index(rule),
                marker="v",
                markersize=9,
                color=ALERT,
                linestyle="none",
                clip_on=False,
            )
        axes.set_yticks(range(len(rules)), rules, fontsize=10, color=ALERT)
        axes.set_ylim(len(rules) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x", color=PALE, alpha=0.25)
        axes.spines[["top", "right", "left"]].set_visible(False)
    steps_below(axes)
    canvas.legend(*curves)


def _draw_training(axes: Axes, points: Points, colour: str, label: str) -> None:
    # of a short run a shorter mean: a long one would only lag behind
    window = min(WINDOW, len(points) // 5)
    if points and window < 2:
        axes.plot(*_columns(points), color=colour, linewidth=2.6, label=label)
    elif points:
        axes.plot(
            *_columns(points), color=colour, alpha=0.4, linewidth=1.2, label=f"{label}, each step"
        )
        mean = moving_average(points, window)
        axes.plot(
            *_columns(mean), color=colour, linewidth=2.6, label=f"{label}, mean of {window} steps"
        )


def _draw_evaluations(
    axes: Axes,
    rows: list[Row],
    name: str,
    colour: str,
    label: str,
    *,
    marker: str = "o",
    shift: float = 0.0,
) -> Points:
    """Joined by a thin line, each with its margin. `shift`: steps to the right, so that margins
    hide no others.
    """
    if points := series(rows, name):
        steps, values = _columns(points)
        axes.errorbar(
            [step + shift for step in steps],
            values,
            yerr=margins_of(rows, name),
            fmt=marker,
            color=colour,
            label=label,
            linestyle=":",
            linewidth=1.4,
            markersize=8,
            markeredgecolor="white",
            capsize=4,
            zorder=5,
        )
    return points


def _label_ends(
    axes: Axes,
    points: Points,
    colour: str,
    *,
    others: Points = (),
    above_equal: bool = False,
    form: str = "",
) -> None:
    """Words outside the curves: left of the first point, which mostly is the baseline, and right of
    the last.

    A run that was resumed before its first evaluation has no baseline: its first point names its
    step. `form`: of the figures; none: shares between 0 and 1, else numbers.
    """
    if not points:
        return
    first, last, ends = points[0], points[-1], list[tuple[tuple[int, float], str, str, int]]()
    if first[0] == 0:
        axes.axhline(first[1], color=colour, linestyle="--", linewidth=1, alpha=0.45)
    ends.append((first, "before" if first[0] == 0 else f"step {first[0]}:", "right", -11))
    if len(points) > 1:
        ends.append((last, "after", "left", 11))
    for point, word, side, outward in ends:
        # Of two evaluations that lie close together, the higher one's label goes above, the lower
        # one's below.
        other = dict(others).get(point[0], -math.inf)
        is_above = point[1] > other or (point[1] == other and above_equal)
        axes.annotate(
            f"{word} {format(point[1], form or _form_of(point[1]))}",
            point,
            textcoords="offset points",
            xytext=(outward, 5 if is_above else -5),
            ha=side,
            va="bottom" if is_above else "top",
            fontsize=11.5,
            fontweight="bold",
            color=colour,
            bbox={
                "boxstyle": "round,pad=0.15",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.8,
            },
            zorder=6,
        )


def _form_of(value: float) -> str:
    """How a figure is written whose form is not known: a share, or a number."""
    if 0 <= value <= 1:
        return ".0%"
    return ".2f"


def _columns(points: Points) -> tuple[list[int], list[float]]:
    """Steps and values apart, as matplotlib takes them."""
    return [step for step, _ in points], [value for _, value in points]
