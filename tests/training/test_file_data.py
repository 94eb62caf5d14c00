"""The data of a training on a file: what is held out, and which rows make a batch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from halteres.config.file_training import FileTraining
from halteres.errors import InvalidConfig, InvalidData
from halteres.models import TINY, builtin_path
from halteres.tokenizer import Tokenizer
from halteres.training.file_data import check_digest, read_data, with_digest

LONGEST = 64


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = builtin_path(TINY)
    assert folder is not None
    return Tokenizer(Path(folder))


def training(folder: Path, rows: list[Any], **more: Any) -> FileTraining:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileTraining(method="sft", data=str(file), batch_size=4, **more)


def sums(count: int, prompts: int = 1000) -> list[dict[str, str]]:
    return [{"prompt": f"{n % prompts} + 1 =", "completion": f" {n + 1}"} for n in range(count)]


def test_no_prompt_is_on_both_sides_and_the_side_is_kept_when_rows_are_added(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    asked = training(tmp_path, sums(100, prompts=40), hold_out=0.2)
    data = read_data(asked, tokenizer, LONGEST)
    assert len(data.train) + len(data.held_out) == 100 and 20 <= len(data.held_out) <= 23
    assert not {row.key for row in data.train} & {row.key for row in data.held_out}
    more = read_data(training(tmp_path, sums(110, 40), hold_out=0.2), tokenizer, LONGEST)
    assert {row.key for row in data.held_out} & {row.key for row in more.held_out}


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    asked = training(tmp_path, sums(10), hold_out=0.0, epochs=2)
    data = read_data(asked, tokenizer, LONGEST)
    assert data.steps(asked) == 5
    numbers = [row.number for step in range(1, 6) for row in data.batch(step, 4, seed=3)]
    first, second = numbers[:10], numbers[10:]
    assert sorted(first) == sorted(second) == list(range(1, 11))
    assert first != second
    # a batch is known without those before it, and another seed has another order
    assert [row.number for row in data.batch(4, 4, seed=3)] == numbers[12:16]
    assert [row.number for row in data.batch(1, 4, seed=4)] != first[:4]


def test_a_row_that_is_too_long_is_refused_or_left_out(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = [*sums(10), {"prompt": "a", "completion": "b " * 200}]
    with pytest.raises(InvalidData, match="row 11: longer than 64 tokens") as refused:
        read_data(training(tmp_path, rows), tokenizer, LONGEST)
    assert refused.value.details["rows"] == [11] and refused.value.details["longest"] > 200
    dropped = read_data(training(tmp_path, rows, too_long="drop"), tokenizer, LONGEST)
    assert dropped.num_dropped == 1 and len(dropped.train) + len(dropped.held_out) == 10
    with pytest.raises(InvalidConfig, match="no row to train on"):
        read_data(training(tmp_path, rows[10:], too_long="drop"), tokenizer, LONGEST)


def test_rows_of_one_prompt_cannot_be_held_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a", "completion": f"{n}"} for n in range(8)]
    with pytest.raises(InvalidConfig, match="Nothing can be held out"):
        read_data(training(tmp_path, rows), tokenizer, LONGEST)
    assert len(read_data(training(tmp_path, rows, hold_out=0.0), tokenizer, LONGEST).train) == 8


def test_a_file_of_held_out_rows_is_used_and_a_shared_prompt_told(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in sums(3)))
    asked = training(tmp_path, sums(10), eval_data=str(held_out))
    data = read_data(asked, tokenizer, LONGEST)
    assert (len(data.train), len(data.held_out)) == (10, 3)
    assert len(data.warnings) == 1 and "rows 1, 2, 3" in data.warnings[0]


def test_rows_that_have_changed_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    asked = training(tmp_path, sums(10))
    begun = with_digest(asked, read_data(asked, tokenizer, LONGEST))
    check_digest(read_data(begun, tokenizer, LONGEST), begun)
    changed = read_data(training(tmp_path, sums(11)), tokenizer, LONGEST)
    with pytest.raises(InvalidData, match="changed since the run began"):
        check_digest(changed, begun)


def test_pairs_are_read_as_pairs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": " 0"} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = FileTraining(method="dpo", data=str(file), batch_size=4)
    data = read_data(asked, tokenizer, LONGEST)
    assert Counter(len(row.sequences) for row in data.train) == {2: 19}


def test_a_pair_of_equal_answers_is_refused_or_left_out(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n} =", "chosen": " 1", "rejected": f" {n}"} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = FileTraining(method="dpo", data=str(file), batch_size=4)
    with pytest.raises(InvalidData, match="row 2: the completions are identical") as refused:
        read_data(asked, tokenizer, LONGEST)
    assert "data.on_identical=drop" in str(refused.value.next)
    dropping = asked.model_copy(update={"on_identical": "drop"})
    data = read_data(dropping, tokenizer, LONGEST)
    assert len(data.train) + len(data.held_out) == 19
