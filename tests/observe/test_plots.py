"""Pictures of a run: written, sized, and whole for whatever rows there are."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from halteres.observe.plots import moving_average, plot_run, plot_runs, sparkline

ROWS = [
    {"step": 0, "src": "eval", "eval/percent_correct": 0.3, "eval/percent_correct_greedy": 0.4},
    *({"step": k, "src": "trainer", "reward/mean": k / 10, "reward/success": k / 10} for k in range(1, 9)),
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
        pytest.param([{"step": 1, "reward/mean": -3.0, "reward/success": 0.5}], id="reward below zero"),
        pytest.param([{"step": 1, "reward/mean": None}], id="a reward that was not finite"),
    ],
)
def test_a_run_is_drawn_as_a_png_of_1200_by_700(rows: list[dict[str, object]], tmp_path: Path) -> None:
    plot_run(rows, tmp_path / "plot.png", "arithmetic")
    assert size_of(tmp_path / "plot.png") == (1200, 700)


def test_a_picture_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def half(_: Figure, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "plot.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="No space"):
        plot_run(ROWS, tmp_path / "plot.png", "arithmetic")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def test_several_runs_share_one_picture(tmp_path: Path) -> None:
    plot_runs({"seed 0": ROWS, "seed 1": ROWS, "empty": []}, tmp_path / "plot.png", "seeds", "reward/mean")
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
    assert moving_average([(1, 1.0), (2, 3.0), (3, 5.0)], window=2) == [(1, 1.0), (2, 2.0), (3, 4.0)]


def test_importing_the_module_does_not_import_matplotlib() -> None:
    code = "import sys, halteres.observe.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
