"""Questions from files and from the hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from halteres.environments.rows import Row, load_rows
from halteres.errors import InvalidConfig, InvalidData


def write(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(number: int, answer: object = "7") -> dict[str, object]:
    return {"question": f"Question {number}?", "answer": answer}


def test_a_folder_has_its_own_split_and_answers_stand_after_the_hashes(tmp_path: Path) -> None:
    """The files of GSM8K as they are published."""
    write(tmp_path / "train.jsonl", row(1, "3 + 4 = <<3+4=7>>7\n#### 7"), row(2, "#### 1,000"))
    write(tmp_path / "test.jsonl", row(3, 12))
    train, held_out = load_rows(tmp_path)
    assert list(train) == [
        Row(question="Question 1?", answer="7"),
        Row(question="Question 2?", answer="1,000"),
    ]
    assert list(held_out) == [Row(question="Question 3?", answer="12")]


def test_of_a_single_file_a_tenth_is_held_out_and_stays_so_when_rows_are_added(
    tmp_path: Path,
) -> None:
    few = load_rows(write(tmp_path / "few.jsonl", *map(row, range(300))))
    many = load_rows(
        write(tmp_path / "many.jsonl", *map(row, range(299, -1, -1)), *map(row, range(300, 600)))
    )
    assert 15 <= len(few[1]) <= 45 and len(few[0]) + len(few[1]) == 300
    assert set(few[1]) <= set(many[1]) and set(few[0]) <= set(many[0])


@pytest.mark.parametrize(
    "bad", ["[1]", '{"question": "Q?"}', '{"question": 1, "answer": "2"}', '{"answer": "2"}']
)
def test_a_row_that_is_none_is_named_with_its_place(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(1)) + f"\n\n{bad}\n")
    with pytest.raises(InvalidData, match=r"rows\.jsonl:3 is no question"):
        load_rows(file)


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ("{", "line 3, column 2"),
        # Python 3.13 points at the comma, earlier ones at what follows it: column 31 or 32
        ('{"question": "Q?", "answer": 3,}', "line 3, column 3"),
        ('{"question": "Q?", "answer": 3, "answer": 4}', "line 3, column 33: the key 'answer'"),
        ('{"question": "half \\ud800?", "answer": "1"}', "line 3: "),
        ("[" * 100_000, "line 3: "),
        ('{"question": "Q?", "answer": ' + "9" * 5000 + "}", "line 3: "),
    ],
)
def test_a_line_that_is_not_json_is_refused_with_its_place(
    tmp_path: Path, bad: str, place: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(1)) + f"\n\n{bad}\n", encoding="utf-8")
    with pytest.raises(InvalidData) as refused:
        load_rows(file)
    assert refused.value.why.startswith(place) and str(file) in refused.value.what


@pytest.mark.parametrize("content", [b'{"question": "\xff"}', '{"question": "a"}'.encode("utf-16")])
def test_a_file_in_another_encoding_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(InvalidData, match="UTF-8"):
        load_rows(file)


def test_a_byte_order_mark_is_no_part_of_the_first_question(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(row(1)).encode() + b"\n" + json.dumps(row(2)).encode()
    )
    train, held_out = load_rows(file)
    assert len(train) + len(held_out) == 2


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("0.00005", "0.00005"),
        ("1e16", "10000000000000000"),
        ("-2.5e-7", "-0.00000025"),
        ("1E+3", "1000.0"),
        ("7", "7"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
    ],
)
def test_a_number_as_an_answer_is_kept_in_digits(tmp_path: Path, given: str, answer: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"question": "Q?", "answer": {given}}}\n' * 2, encoding="utf-8")
    train, held_out = load_rows(file)
    assert {one.answer for one in (*train, *held_out)} == {answer}


@pytest.mark.parametrize("given", ["NaN", "Infinity", "true", "null", "[1]"])
def test_what_is_no_number_is_no_answer(tmp_path: Path, given: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"question": "Q?", "answer": {given}}}\n', encoding="utf-8")
    with pytest.raises(InvalidData, match=r"rows\.jsonl:1 is no question"):
        load_rows(file)


def test_a_file_without_questions_and_a_path_that_leads_nowhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="no question to train on"):
        load_rows(write(tmp_path / "empty.jsonl"))
    with pytest.raises(InvalidConfig, match=r"none\.jsonl cannot be read.*whole path"):
        load_rows("none.jsonl")
    with pytest.raises(InvalidConfig, match=r"train\.jsonl cannot be read"):
        load_rows(Path(__file__).parent)


def test_the_hub_is_asked_through_the_package_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, configuration: str) -> dict[str, list[dict[str, object]]]:
        asked.append((name, configuration))
        return {"train": [row(1, "so\n#### 7")], "test": [row(2, "#### 8")]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    train, held_out = load_rows("openai/gsm8k")
    assert ([one.answer for one in train], [one.answer for one in held_out]) == (["7"], ["8"])
    assert asked == [("openai/gsm8k", "main")]


def test_without_the_package_or_the_network_a_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InvalidConfig, match=r"pip install 'halteres\[hub\]', or name a local JSONL file"
    ):
        load_rows("openai/gsm8k")

    def unreachable(*_: str) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(
        InvalidConfig,
        match=r"could not be loaded.*ConnectionError: Couldn't reach.*local JSONL file",
    ):
        load_rows("openai/gsm8k")


def test_a_line_separator_within_a_text_cuts_no_row(tmp_path: Path) -> None:
    question = "One\u2028two: what is 3 + 4?"
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps({"question": f"{question} {n}", "answer": "7"}, ensure_ascii=False) + "\n"
            for n in range(40)
        )
    )
    train, held_out = load_rows(file)
    assert len(train) + len(held_out) == 40
