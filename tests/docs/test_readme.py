"""The first page: its pictures exist and are small, its figures are those of the measurements."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
FIRST_SCREEN_LINES = 40
LARGEST_BYTES = 150_000
LEAST_WIDTH = 800


def first_screen() -> str:
    """What a visitor sees before the first heading below the title."""
    return README.read_text().partition("\n## ")[0]


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def learning(moment: str) -> str:
    """The share of held-out sums that are right, mean of all seeds, as the page writes it."""
    seeds = result("learning_arithmetic.json")["seeds"]
    return f"{fmean(seed[moment]['sampled'] for seed in seeds):.0%}".replace("%", " %")


def step_s(party: str) -> str:
    parties = result("rl_step_smollm2-135m_1_threads.json")["parties"]
    return f"{parties[party]['median_wall_s']:.1f} s"


def sample_ms(party: str) -> str:
    peer = result("service_overhead.json")["peer"]
    return f"{peer[party]['sample_ms']['p50']:.0f} ms"


def training_s() -> str:
    return f"{result('learning_arithmetic.json')['minutes_of_training'] * 60:.0f} seconds"


def of_smollm2(moment: str) -> str:
    """The share of held-out sums that SmolLM2 has right, mean of all seeds."""
    share = result("smollm2.json")["tasks"]["sums"][moment]
    return f"{share:.0%}".replace("%", " %")


FIGURES = {
    "34 %": lambda: learning("before"),
    "98 %": lambda: learning("after"),
    "45 seconds": training_s,
    "2 %": lambda: of_smollm2("before"),
    "75 %": lambda: of_smollm2("after"),
    "13.9 s": lambda: step_s("halteres-bfloat16"),
    "45.7 s": lambda: step_s("trl-bfloat16"),
    "12 ms": lambda: sample_ms("halteres"),
    "118 ms": lambda: sample_ms("skyrl"),
}
"""Every figure with a unit on the first screen, and the measurement that it is taken from."""


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_is_the_one_that_was_measured(figure: str) -> None:
    assert FIGURES[figure]() == figure


def test_there_is_no_figure_without_a_measurement() -> None:
    found = re.findall(r"\b[\d.,]+ (?:%|ms|s|seconds|minutes|GB|MB)(?![a-z])", first_screen())
    assert sorted(found) == sorted(FIGURES)


def test_it_says_what_it_is_on_one_screen() -> None:
    lines = first_screen().splitlines()
    assert len(lines) <= FIRST_SCREEN_LINES
    for said in ("**Today**", "**Not yet**", "**Why not TRL?**", "| you have | do |"):
        assert said in first_screen()


def test_its_pictures_are_there_small_and_described() -> None:
    text = first_screen()
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(pictures) == 2
    for picture in pictures:
        data = (ROOT / picture).read_bytes()
        assert len(data) < LARGEST_BYTES
        # the header of a PNG: its first chunk holds width and height
        width, _ = struct.unpack(">II", data[16:24])
        assert data[1:4] == b"PNG" and width >= LEAST_WIDTH
    assert re.search(r'alt="[^"]{40,}"', text)


def test_every_mark_of_a_source_is_explained() -> None:
    """¹ run here, ² read in the package, ³ read in its documentation."""
    rows = [line for line in first_screen().splitlines() if line.startswith("|")]
    table = rows[rows.index(next(row for row in rows if "TRL 1" in row)) + 2 :]
    assert len(table) >= 5
    for row in table:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for cell in cells:
            assert cell == "not tried" or re.search(r"[¹²³]", cell), f"{name}: {cell}"
