"""The page of a file of groups, as `process` writes it; that of a server is in tests/cli."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halteres.groups.group import read_groups
from halteres.groups.page import page_of

HOSTILE = "<script>alert(1)</script>"
LINE = {
    "tokens": [[1, 2, 3], [1, 2, 4]],
    "masks": [[-100, -100, 3], [-100, -100, 4]],
    "scores": [1.0, 0.0],
    "advantages": [None, None],
    "messages": [[{"role": "user", "content": HOSTILE}], None],
}


def written(folder: Path) -> Path:
    """Two groups, and a line that was torn between them."""
    file = folder / "g.jsonl"
    file.write_text(f'{json.dumps(LINE)}\n{{"tokens": [[1\n{json.dumps(LINE)}\n', encoding="utf-8")
    return file


def test_a_torn_line_keeps_its_number_and_hides_no_other(tmp_path: Path) -> None:
    first, torn, last = read_groups(written(tmp_path))
    assert torn is None
    assert first == last
    assert first is not None and first.rollout_scores == (1.0, 0.0)
    assert read_groups(tmp_path / "nowhere.jsonl") == []


def test_a_page_of_a_file_numbers_its_groups_and_escapes_what_others_wrote(tmp_path: Path) -> None:
    page = page_of(written(tmp_path), f"sums {HOSTILE}", None)
    assert HOSTILE not in page
    shown = data_of(page)
    assert shown["source"] == f"sums {HOSTILE}, g.jsonl"
    assert [group["place"] for group in shown["groups"]] == [3, 1]
    first, second = shown["groups"][0]["rollouts"]
    assert first["parts"] == [{"text": HOSTILE, "sampled": False, "label": "user"}]
    assert [part["sampled"] for part in second["parts"]] == [False, True]
    assert (first["score"], first["rank"], second["rank"]) == (1.0, "best", "worst")


def test_the_context_that_all_sequences_begin_with_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "g.jsonl"
    alike = {**LINE, "messages": None}
    other = {**alike, "tokens": [[1, 2, 3], [1, 9, 4]]}
    file.write_text(f"{json.dumps(alike)}\n{json.dumps(other)}\n")
    different, same = data_of(page_of(file, "sums", None))["groups"]
    assert same["prompt"] == "1 2 " and different["prompt"] == ""
    assert [len(group["rollouts"][0]["parts"]) for group in (same, different)] == [1, 2]


def data_of(page: str) -> dict[str, Any]:
    """What the page shows."""
    return json.loads(page.split('id="data">')[1].split("</script>")[0])
