"""The page of a file of groups, as `process` writes it; that of a server is in tests/cli."""

from __future__ import annotations

import json
from pathlib import Path

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
    assert page.count("&lt;script&gt;") == 5  # two messages, and the owner: two groups, one head
    assert ('id="g1"' in page, 'id="g2"' in page, 'id="g3"' in page) == (True, False, True)
    assert (page.count("<section"), "set aside" in page, "<script" in page) == (4, False, False)
