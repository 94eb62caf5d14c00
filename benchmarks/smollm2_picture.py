"""Draws what `smollm2.py` found: a panel for each task, a curve for each seed.

python benchmarks/smollm2_picture.py RESULT.json PICTURE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.observe.canvas import Canvas, finish, steps_below
from halteres.observe.plots import COLOURS, moving_average

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "sums": "sums of two numbers",
    "middle": "the middle of three numbers",
    "chain_sum": "reasoning-gym's chain_sum",
}
WINDOW = 5  # steps of the moving average
ROOM = 0.22  # share of a panel's width at each side, for the held-out figures
HELD_OUT = "#1f2328"


def draw(found: dict[str, Any], file: Path) -> None:
    """A PNG of the results."""
    tasks = found["tasks"]
    canvas = Canvas("SmolLM2-135M-Instruct, RL on two CPU cores", columns=len(tasks), shared=False)
    beside = "share of answers that are right"
    for axes, task in zip(canvas.panels, tasks, strict=True):
        seeds = [one for one in found["seeds"] if one["task"] == task]
        for at, one in enumerate(seeds):
            colour = COLOURS[at % len(COLOURS)]
            draw_seed(axes, one["scores"], colour, f"seed {one['seed']}")
        draw_held_out(axes, seeds)
        axes.set_title(TITLES[task], fontsize=12)
        steps_below(axes)
        finish(axes, beside, ROOM)
        beside = ""  # the others have the same
    canvas.legend(*canvas.panels)
    canvas.save(file)


def draw_seed(axes: Axes, scores: list[float], colour: str, label: str) -> None:
    """Draw what a run answered while it was trained, dropped groups too."""
    points = list(enumerate(scores, 1))
    axes.plot(*zip(*points, strict=True), color=colour, alpha=0.2, linewidth=1)
    mean = moving_average(points, WINDOW)
    axes.plot(*zip(*mean, strict=True), color=colour, linewidth=2.2, label=label)


def draw_held_out(axes: Axes, seeds: list[dict[str, Any]]) -> None:
    """Mark what the first and the last weights answer, with the means in figures."""
    last = max(one["steps"] for one in seeds)
    for name, step, side, outward in (("before", 0, "right", -8), ("after", last, "left", 8)):
        shares = [one[name] for one in seeds]
        axes.plot(
            [step] * len(shares),
            shares,
            "o",
            color=HELD_OUT,
            markersize=7,
            markeredgecolor="white",
            zorder=5,
            label="held out",
        )
        mean = sum(shares) / len(shares)
        axes.annotate(
            f"{mean:.0%}",
            (step, mean),
            textcoords="offset points",
            xytext=(outward, 0),
            ha=side,
            va="center",
            fontsize=13,
            fontweight="bold",
            color=HELD_OUT,
        )


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
