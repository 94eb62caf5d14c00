"""What every picture of ours has in common: size, panels, axes, legend, and how it gets onto the
disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALE = "#8a8f98"
WIDTH, HEIGHT = 12, 7  # inches, of 100 dots


class Canvas:
    """A figure of its own, not pyplot's: nothing global, no display."""

    def __init__(
        self,
        title: str,
        *,
        rows: int = 1,
        columns: int = 1,
        heights: Sequence[float] = (),
        shared: bool = True,
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=(WIDTH, HEIGHT), dpi=100, layout="constrained")
        FigureCanvasAgg(self._figure)
        grid = self._figure.subplots(
            rows,
            columns,
            squeeze=False,
            sharex=shared,
            gridspec_kw={"height_ratios": heights} if heights else None,
        )
        self.panels: list[Axes] = list(grid.flat)
        self._figure.suptitle(
            title, x=0.012, ha="left", fontsize=15, fontweight="bold", parse_math=False
        )

    def legend(self, *of: Axes) -> None:
        """One legend under everything, where it hides nothing, with each entry once."""
        entries: dict[str, Any] = {}
        for axes in of:
            handles, labels = axes.get_legend_handles_labels()
            entries.update(zip(labels, handles, strict=True))
        if entries:
            columns = min(4, len(entries))
            legend = self._figure.legend(
                entries.values(),
                entries.keys(),
                loc="outside lower center",
                ncols=columns,
                frameon=False,
                fontsize=11,
            )
            for text in legend.get_texts():  # names are names, whatever dollars they have
                text.set_parse_math(False)

    def save(self, file: Path) -> None:
        """Whole or not at all: others may be looking at the old one."""
        with replacing(file) as beside:
            self._figure.savefig(beside)


def finish(axes: Axes, up: str, room: float = 0.0) -> None:
    """Grid, frame, limits. `room`: share of the width left free at both sides, for words beside the
    curves.
    """
    axes.set_ylabel(up, fontsize=12)
    low, high = axes.get_ylim()
    if low >= -0.12 and high <= 1.12:
        axes.set_ylim(-0.06, 1.06)
    first, last = axes.get_xlim()
    axes.set_xlim(first - room * (last - first), last + room * (last - first))
    axes.grid(True, color=PALE, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.has_data():
        axes.text(
            0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", color=PALE, fontsize=16
        )


def steps_below(axes: Axes) -> None:
    """Whole steps, none below zero, under the lowest panel."""
    from matplotlib.ticker import MaxNLocator

    first, last = axes.get_xlim()
    ticks = MaxNLocator(integer=True, steps=[1, 2, 5, 10]).tick_values(max(0, first), last)
    axes.set_xticks([tick for tick in ticks if 0 <= tick <= last])
    axes.set_xlim(first, last)
    axes.set_xlabel("optimiser step", fontsize=12)
