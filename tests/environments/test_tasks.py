"""`load_tasks`: JSON lines of any form, of which a part is held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halteres.environments.tasks import Task, load_tasks
from halteres.errors import InvalidConfig, InvalidData


def write(file: Path, tasks: list[Task]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    return file


def test_a_task_keeps_its_side_whatever_is_added(tmp_path: Path) -> None:
    tasks = [{"name": f"task {number}"} for number in range(200)]
    train, held_out = load_tasks(write(tmp_path / "few.jsonl", tasks[:100]))
    more, more_held_out = load_tasks(write(tmp_path / "more.jsonl", tasks))
    assert len(train) + len(held_out) == 100
    assert 0 < len(held_out) < 30
    assert [one for one in more if one in tasks[:100]] == train
    assert [one for one in more_held_out if one in tasks[:100]] == held_out


def test_a_folder_has_both_sides(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"a": 1}])
    write(tmp_path / "test.jsonl", [{"a": 2}])
    assert load_tasks(tmp_path) == ([{"a": 1}], [{"a": 2}])


def test_of_few_tasks_the_last_is_held_out(tmp_path: Path) -> None:
    train, held_out = load_tasks(write(tmp_path / "t.jsonl", [{"a": 1}, {"a": 2}]))
    assert (train, held_out) == ([{"a": 1}], [{"a": 2}])


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, InvalidConfig, "cannot be read"),
        ("", InvalidData, "no task"),
        ('{"a": 1}\n[2]\n', InvalidData, r"t\.jsonl:2"),
        ('{"a": 1}\n{"a"\n', InvalidData, "no file of JSON lines"),
    ],
)
def test_what_holds_no_tasks_is_refused_with_its_place(
    tmp_path: Path, text: str | None, error: type[Exception], words: str
) -> None:
    file = tmp_path / "t.jsonl"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=words):
        load_tasks(file)
