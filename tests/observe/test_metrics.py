"""JSON-lines files: whole lines, strict JSON, last writer wins."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest

from halteres.observe.metrics import WriteFailed, append_row, merge_by_step, read_rows, series


def test_a_row_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    append_row(tmp_path / "m.jsonl", {"step": 1, "reward/mean": 0.5, "name": "größe"})
    assert read_rows(tmp_path / "m.jsonl") == [{"step": 1, "reward/mean": 0.5, "name": "größe"}]


def test_a_number_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    append_row(
        tmp_path / "m.jsonl", {"a": math.nan, "b": math.inf, "c": -math.inf, "d": [math.nan]}
    )
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {
        "a": None,
        "b": None,
        "c": None,
        "d": [None],
    }


def test_half_a_character_is_written_as_a_question_mark(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    append_row(file, {"why": "\ud800", "item": {"\udfff": ["whole", ("\ud83d", 1)]}})
    assert read_rows(file) == [{"why": "?", "item": {"?": ["whole", ["?", 1]]}}]


def test_numpy_scalars_and_paths_are_plain_values(tmp_path: Path) -> None:
    append_row(
        tmp_path / "m.jsonl",
        {"a": np.float32(0.5), "b": np.int64(3), "c": np.float64("nan"), "d": tmp_path},
    )
    assert read_rows(tmp_path / "m.jsonl") == [{"a": 0.5, "b": 3, "c": None, "d": str(tmp_path)}]


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.jsonl") == []


def test_a_torn_last_line_is_left_out_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    append_row(file, {"step": 1})
    with file.open("ab") as torn:
        torn.write(b'{"step": 2, "reward/me')
    assert read_rows(file) == [{"step": 1}]
    append_row(file, {"step": 3})
    assert read_rows(file) == [{"step": 1}, {"step": 3}]


def test_writers_at_the_same_time_never_mix_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"

    def write(writer: int) -> None:
        for index in range(200):
            append_row(file, {"writer": writer, "index": index, "pad": "x" * 500})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    rows = read_rows(file)
    assert len(rows) == 800
    assert [row["index"] for row in rows if row["writer"] == 2] == list(range(200))


def test_a_missing_folder_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(WriteFailed, match=r"Could not append to .*No such file"):
        append_row(tmp_path / "gone" / "m.jsonl", {"step": 1})


def test_a_full_disk_is_told_in_a_sentence() -> None:
    with pytest.raises(WriteFailed, match="No space left"):
        append_row(Path("/dev/full"), {"step": 1})


def test_rows_of_one_step_are_merged_and_the_last_writer_of_a_key_wins() -> None:
    rows = [
        {"step": 2, "src": "trainer", "t": 1.0, "reward/mean": 0.1},
        {"step": 1, "src": "trainer", "t": 1.0, "reward/mean": 0.2},
        {"step": 2, "src": "env", "t": 2.0, "train/percent_correct": 0.5},
        {"step": 2, "src": "trainer", "t": 3.0, "reward/mean": 0.3},
        {"src": "env", "t": 4.0},
    ]
    assert merge_by_step(rows) == [
        {"step": 1, "t": 1.0, "reward/mean": 0.2},
        {"step": 2, "t": 3.0, "reward/mean": 0.3, "train/percent_correct": 0.5},
    ]


def test_a_series_leaves_out_steps_without_a_number() -> None:
    assert series(
        [{"step": 1, "a": 1}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": 0.5}], "a"
    ) == [
        (1, 1.0),
        (4, 0.5),
    ]
