"""An evaluation as a table, JSON, a picture and a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from halteres.rewards import evaluation_report
from halteres.rewards.evaluation import Evaluation, evaluate
from halteres.rewards.preferences import read_preferences
from rewards.scorers import Scripted


@pytest.fixture
async def evaluation() -> Evaluation:
    rows = [
        {"prompt": "2 + 2?", "chosen": f"a {n + 1}", "rejected": f"b {n}", "kind": "sums"}
        for n in range(12)
    ]
    rows.append(
        {
            "prompt": "<script>alert(1)</script>",
            "chosen": "$a$ 0",
            "rejected": "b 7",
            "kind": "<b>$odd$</b>",
        }
    )
    return await evaluate(Scripted(lambda text: float(text.split()[-1])), read_preferences(rows))


def test_the_table_has_a_line_for_each_kind(evaluation: Evaluation) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(evaluation_report.as_table(evaluation))
    said = captured.get()
    assert re.search(r"all .* 13 .* 92\.3% .* 66\.7% to 98\.6%", said)
    assert re.search(r"odd.* 1 .* 0\.0% \*", said)


def test_the_json_has_every_figure_and_no_text(evaluation: Evaluation) -> None:
    found = json.loads(json.dumps(evaluation_report.as_json(evaluation), allow_nan=False))
    assert found["overall"]["accuracy"]["count"] == 13
    assert found["by_kind"]["sums"]["accuracy"]["value"] == 1.0
    assert found["mistakes"] == [{"row": 13, "kind": "<b>$odd$</b>", "lead": -7.0}]
    assert "alert" not in json.dumps(found)
    assert (
        found["calibration"]["bins"][0]["accuracy"] is None
        or found["calibration"]["bins"][0]["count"]
    )


def test_the_page_is_one_file_in_which_texts_are_text(
    evaluation: Evaluation, tmp_path: Path
) -> None:
    page = evaluation_report.page(evaluation)
    assert "<script" not in page and "&lt;script&gt;" in page and "<b>" not in page
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    evaluation_report.draw(evaluation, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
