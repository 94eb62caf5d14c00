"""Tags and notes of a run: what is written is whole, bounded and lost by nobody."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from halteres.config.settings import Settings
from halteres.errors import Conflict, HalteresError, UserError
from halteres.observe.metrics import WriteFailed
from halteres.runs.directory import RunDirectory
from halteres.runs.notes import (
    FILE,
    MOST_TAGS,
    NOTE_LENGTH,
    TAG_LENGTH,
    Notes,
    change_notes,
    read_notes,
)
from halteres.runs.state import RunUnreadable


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    settings = Settings.model_validate({"run": {"tags": ["baseline", "gsm8k"]}})
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    return RunDirectory(tmp_path)


def test_a_run_begins_with_the_tags_of_its_settings(run: RunDirectory) -> None:
    assert read_notes(run) == Notes(tags=("baseline", "gsm8k"))
    (run.path / "settings.json").write_text("{")
    assert read_notes(run) == Notes()


def test_tags_are_added_and_removed_and_a_note_is_kept(run: RunDirectory) -> None:
    change_notes(run, note="  Twice the rate.\r\nSee seed 2.\n")
    change_notes(run, add=["best", "best"], remove=["gsm8k", "none of it"])
    assert read_notes(run) == Notes(
        tags=("baseline", "best"), note="Twice the rate.\nSee seed 2.", revision=2
    )
    assert change_notes(run, tags=[], note="") == Notes(revision=3)
    assert read_notes(run) == Notes(revision=3), "the tags of the settings do not come back"


@pytest.mark.parametrize(
    "wanted",
    [
        {"add": [""]},
        {"add": ["x" * (TAG_LENGTH + 1)]},
        {"add": ["two\nlines"]},
        {"add": ["hidden\u200b"]},
        {"add": ["half \ud800"]},
        {"add": ["one, two"]},
        {"add": [f"tag {number}" for number in range(MOST_TAGS)]},
        {"note": "x" * (NOTE_LENGTH + 1)},
        {"note": "\x1b[2J"},
        {"note": "half \ud800"},
    ],
)
def test_what_is_no_tag_or_note_is_refused_and_nothing_is_lost(
    run: RunDirectory, wanted: dict[str, object]
) -> None:
    before = change_notes(run, note="kept")
    with pytest.raises(UserError) as refused:
        change_notes(run, **wanted)  # type: ignore[arg-type]
    assert refused.value.details["field"] in ("tags", "note") and refused.value.next
    assert read_notes(run) == before


def test_longer_tags_of_the_settings_may_stay(run: RunDirectory) -> None:
    long = [f"{number} {'x' * TAG_LENGTH}" for number in range(MOST_TAGS + 2)]
    settings = Settings.model_validate({"run": {"tags": long}})
    (run.path / "settings.json").write_text(settings.model_dump_json())
    assert change_notes(run, note="x", remove=long[:1]).tags == tuple(long[1:])


def test_who_saw_older_notes_does_not_overwrite_newer_ones(run: RunDirectory) -> None:
    seen = change_notes(run, note="first")
    change_notes(run, note="second")
    with pytest.raises(Conflict, match="changed meanwhile"):
        change_notes(run, note="third", revision=seen.revision)
    assert read_notes(run).note == "second"


def test_tags_that_are_added_at_the_same_time_are_all_there(run: RunDirectory) -> None:
    together = threading.Barrier(8)

    def add(number: int) -> None:
        together.wait(5)
        change_notes(run, add=[f"tag {number}"])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert set(read_notes(run).tags) == {"baseline", "gsm8k", *(f"tag {n}" for n in range(8))}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"tags": 3}', '{"note": null}'])
def test_a_damaged_file_is_named_and_left_alone(run: RunDirectory, content: str) -> None:
    file = run.path / FILE
    file.write_text(content)
    for act in (lambda: read_notes(run), lambda: change_notes(run, note="x")):
        with pytest.raises(RunUnreadable, match=FILE):
            act()
    assert file.read_text() == content


def test_a_folder_that_cannot_be_written_is_named(run: RunDirectory, tmp_path: Path) -> None:
    gone = RunDirectory(tmp_path / "gone")
    with pytest.raises(WriteFailed) as failed:
        change_notes(gone, note="x")
    assert str(gone.path) in failed.value.sentence
    assert isinstance(failed.value, HalteresError)


def test_the_file_is_json_that_people_can_read(run: RunDirectory) -> None:
    change_notes(run, note="ä")
    text = (run.path / FILE).read_text()
    assert json.loads(text) == {"tags": ["baseline", "gsm8k"], "note": "ä", "revision": 1}
    assert "ä" in text and text.count("\n") > 3
