"""Pictures of runs: written, sized, whole for whatever rows there are, and readable."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from halteres.observe.canvas import Canvas
from halteres.observe.plots import (
    margins_of,
    moving_average,
    plot_reward_training,
    plot_run,
    plot_runs,
    sparkline,
)

ROWS = [
    {"step": 0, "src": "eval", "eval/percent_correct": 0.3, "eval/percent_correct_greedy": 0.4},
    *(
        {"step": k, "src": "trainer", "reward/mean": k / 10, "reward/success": k / 10}
        for k in range(1, 9)
    ),
    {"step": 8, "src": "eval", "eval/percent_correct": 0.9, "eval/percent_correct_greedy": 0.95},
]


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(ROWS, id="a whole run"),
        pytest.param([], id="nothing yet"),
        pytest.param(ROWS[:1], id="the baseline alone"),
        pytest.param(ROWS[1:2], id="one step"),
        pytest.param(
            [{"step": 1, "reward/mean": -3.0, "reward/success": 0.5}], id="reward below zero"
        ),
        pytest.param([{"step": 1, "reward/mean": None}], id="a reward that was not finite"),
    ],
)
def test_a_run_is_drawn_as_a_png_of_1200_by_700(
    rows: list[dict[str, object]], tmp_path: Path
) -> None:
    plot_run(rows, tmp_path / "plot.png", "arithmetic")
    assert size_of(tmp_path / "plot.png") == (1200, 700)


def test_a_reward_training_is_drawn_by_its_accuracy(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 1 / step, "accuracy": 1 - 0.5 / step} for step in range(1, 9)]
    held_out = [{"step": step, "eval_accuracy": 0.5 + step / 20} for step in (4, 8)]
    plot_reward_training(
        [*rows, *held_out], tmp_path / "plot.png", "reward model", [("nan_loss", 3)]
    )
    assert size_of(tmp_path / "plot.png") == (1200, 700)
    plot_reward_training([], tmp_path / "empty.png", "reward model")
    assert (tmp_path / "plot.png").read_bytes() != (tmp_path / "empty.png").read_bytes()


def test_a_picture_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def half(_: Figure, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "plot.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="No space"):
        plot_run(ROWS, tmp_path / "plot.png", "arithmetic")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would have been written."""
    figures: list[Any] = []
    monkeypatch.setattr(Canvas, "save", lambda canvas, file: figures.append(canvas._figure))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownMemberType]
    return figures


def labels(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_evaluations_carry_their_margins(drawn: list[Any], tmp_path: Path) -> None:
    rows = [{**row, "eval/percent_correct_stderr": 0.05, "eval/num_tasks": 64} for row in ROWS]
    plot_run(rows, tmp_path / "plot.png", "arithmetic")
    sampled, greedy = drawn[0].axes[0].containers
    assert heights(sampled) == pytest.approx([2 * 1.96 * 0.05] * 2)
    assert heights(greedy) == pytest.approx(
        [2 * 1.96 * math.sqrt(p * (1 - p) / 64) for p in (0.4, 0.95)]
    )
    assert labels(drawn[0])[-2:] == ["held-out, T = 1, 95 %", "held-out, greedy, 95 %"]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([0], ["before 25%"]),
        ([0, 8], ["before 25%", "after 33%"]),
        ([4, 8], ["step 4: 29%", "after 33%"]),
        ([8], ["step 8: 33%"]),
    ],
)
def test_an_evaluation_is_before_training_only_at_step_0(
    steps: list[int], words: list[str], drawn: list[Any], tmp_path: Path
) -> None:
    """A run that is resumed before its first evaluation has none of before."""
    plot_run(
        [{"step": step, "eval/percent_correct": 0.25 + step / 100} for step in steps],
        tmp_path / "p.png",
        "sums",
    )
    assert [text.get_text() for text in drawn[0].axes[0].texts] == words


def heights(container: Any) -> list[float]:
    return [float(ends[1][1] - ends[0][1]) for ends in container.lines[2][0].get_segments()]


def test_a_margin_that_nothing_is_known_about_is_none() -> None:
    assert margins_of(
        [{"step": 0, "eval/percent_correct": 0.3}, {"step": 1}], "eval/percent_correct"
    ) == [0.0]
    assert margins_of(
        [{"step": 0, "eval/mean_score": 0.3, "eval/num_tasks": 9}], "eval/mean_score"
    ) == [0.0]


def test_alerts_are_marked_at_their_steps_each_rule_in_its_line(
    drawn: list[Any], tmp_path: Path
) -> None:
    plot_run(
        ROWS,
        tmp_path / "plot.png",
        "arithmetic",
        [("truncation", 3), ("entropy", 5), ("truncation", 7)],
    )
    curves, strip = drawn[0].axes
    assert [label.get_text() for label in strip.get_yticklabels()] == ["entropy", "truncation"]
    marks = sorted((line.get_xdata()[0], line.get_ydata()[0]) for line in strip.lines)
    assert marks == [(3, 1), (5, 0), (7, 1)]
    assert curves.get_xlim() == strip.get_xlim()


def test_a_reward_of_another_scale_does_not_squeeze_the_shares(
    drawn: list[Any], tmp_path: Path
) -> None:
    rows = [*ROWS, *({"step": step, "reward/mean": 40.0 * step} for step in range(1, 9))]
    plot_run(rows, tmp_path / "plot.png", "arithmetic")
    reward, shares = drawn[0].axes
    assert reward.get_ylim()[1] > 300 and shares.get_ylim() == (-0.06, 1.06)
    assert "success rate" in labels(drawn[0])


def test_words_lie_on_no_other_words(drawn: list[Any], tmp_path: Path) -> None:
    close = [
        {**row, "eval/percent_correct_greedy": 0.31} if row["step"] == 0 else row for row in ROWS
    ]
    plot_run(
        close,
        tmp_path / "plot.png",
        "arithmetic",
        [(f"rule_with_a_long_name_{k}", k) for k in range(8)],
    )
    figure = drawn[0]
    figure.canvas.draw()
    texts = [
        *figure.axes[0].texts,
        *figure.axes[1].get_yticklabels(),
        *figure.legends[0].get_texts(),
    ]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert len(boxes) >= 4 + 8 + 3
    assert not [
        pair for pair in combinations(boxes, 2) if pair[0].shrunk(0.98, 0.9).overlaps(pair[1])
    ]
    assert all(box.x0 >= 0 and box.x1 <= 1200 and box.y0 >= 0 for box in boxes)


def test_a_short_run_has_a_short_average_and_a_very_short_one_none(
    drawn: list[Any], tmp_path: Path
) -> None:
    for num in (4, 20, 100):
        rows = [{"step": step, "reward/mean": 0.5} for step in range(num)]
        plot_run(rows, tmp_path / "plot.png", "arithmetic")
    assert [labels(figure)[-1] for figure in drawn] == [
        "reward",
        "reward, mean of 4 steps",
        "reward, mean of 10 steps",
    ]


def test_a_title_is_taken_as_it_is(drawn: list[Any], tmp_path: Path) -> None:
    plot_run(ROWS, tmp_path / "plot.png", "costs $5, not $x^2$: \\frac")
    drawn[0].canvas.draw()
    assert drawn[0]._suptitle.get_text() == "costs $5, not $x^2$: \\frac"


def test_runs_are_compared_in_a_panel_for_each_metric(drawn: list[Any], tmp_path: Path) -> None:
    names = ("eval/percent_correct", "reward/mean", "reward/success")
    plot_runs({"one": ROWS, "$two$": ROWS}, tmp_path / "plot.png", "2 runs", *names)
    drawn[0].canvas.draw()
    assert [axes.get_ylabel() for axes in drawn[0].axes] == [*names, ""]
    assert labels(drawn[0]) == ["one", "$two$"]
    first, second = (container.lines[0].get_xdata() for container in drawn[0].axes[0].containers)
    assert all(a < b for a, b in zip(first, second, strict=True)), (
        "margins at one step do not hide each other"
    )


def test_several_runs_share_one_picture(tmp_path: Path) -> None:
    plot_runs(
        {"seed 0": ROWS, "seed 1": ROWS, "empty": []}, tmp_path / "plot.png", "seeds", "reward/mean"
    )
    assert size_of(tmp_path / "plot.png") == (1200, 700)


def test_a_sparkline_rises_with_its_values_and_keeps_its_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), width=20)) == 20
    assert sparkline(list(range(1000)), width=20)[0] == "▁"


def test_a_sparkline_takes_what_is_missing_equal_or_not_finite() -> None:
    assert sparkline([]) == ""
    assert sparkline([None, math.nan]) == ""
    assert sparkline([1.0, 1.0, 1.0]) == "▄▄▄"
    assert sparkline([0.0, None, 1.0]) == "▁█"
    assert sparkline([1.0], width=0) == ""


def test_a_moving_average_starts_with_what_there_is() -> None:
    assert moving_average([(1, 1.0), (2, 3.0), (3, 5.0)], window=2) == [
        (1, 1.0),
        (2, 2.0),
        (3, 4.0),
    ]


def test_importing_the_module_does_not_import_matplotlib() -> None:
    code = "import sys, halteres.observe.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
