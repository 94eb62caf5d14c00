"""Preference data from where they lie: each place is read, and one that cannot be is named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from halteres.errors import HalteresError, InvalidConfig, InvalidData, NotFound
from halteres.rewards.preferences import read_preferences

PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize(
    ("name", "content", "kind", "sentence"),
    [
        ("a.jsonl", b"", InvalidData, "a.jsonl holds no row."),
        ("a.json", b"[]", InvalidData, "a.json holds no row."),
        ("a.json", b"[{", InvalidData, "a.json starts with '[' but is not a valid JSON list."),
        ("a.json", b'[\n"\xff"]', InvalidData, "a.json is not UTF-8 text. Line 2 is the first."),
        (
            "a.jsonl",
            b'{"chosen": "\xe9", "rejected": "e"}',
            InvalidData,
            "a.jsonl is not UTF-8 text. Line 1",
        ),
        (
            "a.jsonl",
            json.dumps(PAIR).encode("utf-16"),
            InvalidData,
            "a.jsonl is not UTF-8 text. Line 1",
        ),
        (
            "a.jsonl",
            b"[" * 100_000,
            InvalidData,
            "a.jsonl starts with '[' but is not a valid JSON list.",
        ),
        ("b.jsonl", None, NotFound, "a.jsonl?"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes | None, kind: type[HalteresError], sentence: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(kind) as raised:
        read_preferences(tmp_path / name)
    assert sentence in raised.value.sentence


def test_a_folder_is_refused_with_the_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(InvalidData, match=r"is a folder.*Name one of them: .*train\.jsonl"):
        read_preferences(tmp_path)


def test_lines_a_list_and_a_file_with_a_mark_of_its_encoding_are_the_same_rows(
    tmp_path: Path,
) -> None:
    rows = [PAIR, {**PAIR, "chosen": "vier\u2028"}]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    )
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2), encoding="utf-8-sig")
    lines, listed, objects = (
        read_preferences(it) for it in (tmp_path / "a.jsonl", tmp_path / "b.json", rows)
    )
    assert lines.comparisons == listed.comparisons == objects.comparisons


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ('{"prompt": "a", "chosen": "b", "chosen": "c", "rejected": "d"}', "line 2, column 32: "),
        ('{"prompt": "a", "chosen": [{"role": "a", "role": "b"}]}', "line 2, column 42: "),
        ('{"prompt": "a" "chosen": "b"}', "line 2, column 16: "),
    ],
)
def test_a_line_that_cannot_be_read_is_named_with_its_column(
    tmp_path: Path, bad: str, place: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(PAIR)}\n{bad}\n", encoding="utf-8")
    with pytest.raises(InvalidData) as refused:
        read_preferences(file)
    assert refused.value.details["problems"][0]["rows"] == [2] and place in refused.value.why


def test_a_key_twice_in_a_list_of_rows_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[{"chosen": "a",\n "chosen": "b", "rejected": "c"}]', encoding="utf-8")
    with pytest.raises(InvalidData) as refused:
        read_preferences(file)
    assert refused.value.why.startswith("line 2, column 2: the key 'chosen'")


def test_joined_files_may_each_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(2 * (b"\xef\xbb\xbf" + json.dumps(PAIR).encode() + b"\n"))
    assert [one.row for one in read_preferences(file).comparisons] == [1, 2]


def test_a_data_set_with_several_splits_is_refused_with_their_names() -> None:
    with pytest.raises(InvalidData, match=r"'train', 'test'.*dataset\['train'\]"):
        read_preferences({"train": [PAIR], "test": [PAIR]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "module"), [("prefs.parquet", "pyarrow.parquet"), ("owner/name", "datasets")]
)
def test_what_needs_an_extra_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, module: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prefs.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(InvalidConfig, match=r"pip install 'halteres\[hub\]'"):
        read_preferences(place)


def test_a_place_that_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(InvalidData):
        read_preferences(tmp_path / "rows.jsonl")
