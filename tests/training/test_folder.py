"""The run directory as the trainer reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halteres.config.settings import Settings
from halteres.errors import InvalidConfig, NotFound
from halteres.observe.metrics import append_row
from halteres.training.batch_source import registration_of
from halteres.training.folder import ResumePoint, RunFolder, Wiring

WIRING = {
    "run_id": "r1",
    "service_url": "http://s",
    "api_url": "http://a",
    "run_dir": "/r",
    "base_model": "m",
}


def test_settings_and_wiring_are_read_from_their_files(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(Settings().model_dump_json())
    (tmp_path / "wiring.json").write_text(
        json.dumps({**WIRING, "api_key": None, "resume_from": None})
    )
    folder = RunFolder(tmp_path)
    assert folder.settings() == Settings()
    assert folder.wiring() == Wiring(
        run_id="r1", service_url="http://s", api_url="http://a", base_model="m"
    )


def test_a_resume_point_is_read_whatever_else_stands_beside_it(tmp_path: Path) -> None:
    point = {
        "name": "step-000010",
        "step": 10,
        "state_path": "tinker://t/weights/step-000010",
        "t": 1.0,
    }
    (tmp_path / "wiring.json").write_text(json.dumps({**WIRING, "resume_from": point}))
    wiring = RunFolder(tmp_path).wiring()
    assert wiring.resume_from == ResumePoint(
        name="step-000010", step=10, state_path=point["state_path"]
    )


def test_the_version_of_a_checkpoint_is_what_its_row_says(tmp_path: Path) -> None:
    """Fewer optimiser steps than steps, where batches without signal were skipped."""
    point = ResumePoint(name="step-000010", step=10, state_path="tinker://t/weights/step-000010")
    folder = RunFolder(tmp_path)
    assert folder.version_at(point) == 10
    append_row(
        folder.checkpoints,
        {"name": point.name, "step": 10, "state_path": point.state_path, "version": 7},
    )
    append_row(
        folder.checkpoints, {"name": "final", "step": 12, "state_path": "tinker://t/weights/final"}
    )
    assert folder.version_at(point) == 7


def write_run(path: Path, source: str, resumed_from: str | None = None) -> RunFolder:
    path.mkdir(exist_ok=True)
    resolved = {"trainer.correction": {"value": "none", "source": source}}
    (path / "config.resolved.json").write_text(json.dumps(resolved))
    (path / "run.json").write_text(json.dumps({"resumed_from": resumed_from}))
    return RunFolder(path)


def test_a_setting_is_given_where_this_run_or_one_that_it_goes_on_from_says_so(
    tmp_path: Path,
) -> None:
    for source, is_given in (("default", False), ("edit", True), ("file", True), ("policy", True)):
        assert (
            write_run(tmp_path / "first", source).is_given("trainer.correction", not is_given)
            is is_given
        )
        write_run(tmp_path / "second", "resume", "first")
        third = write_run(tmp_path / "third", "resume", "second")
        assert third.is_given("trainer.correction", not is_given) is is_given


def test_a_run_that_says_nothing_of_a_setting_leaves_it_to_its_value(tmp_path: Path) -> None:
    missing = write_run(tmp_path / "resumed", "resume", "gone")
    for folder in (RunFolder(tmp_path), missing):
        assert [folder.is_given("trainer.correction", known) for known in (False, True)] == [
            False,
            True,
        ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, NotFound),
        ("", InvalidConfig),
        ("{}", InvalidConfig),
        ('{"run_id": 1}', InvalidConfig),
    ],
)
def test_a_missing_or_broken_file_is_told_in_a_sentence(
    tmp_path: Path, text: str | None, error: type
) -> None:
    if text is not None:
        (tmp_path / "wiring.json").write_text(text)
    with pytest.raises(error, match=r"wiring\.json cannot be .* `halteres train`"):
        RunFolder(tmp_path).wiring()


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"trainer": {"learning_rat": 1}}')
    with pytest.raises(InvalidConfig, match="Extra inputs"):
        RunFolder(tmp_path).settings()


@pytest.mark.parametrize("env", [{}, {"batch_size": -1}, {"batch_size": "many"}])
def test_a_run_without_batch_size_is_refused_with_the_setting_to_make(
    tmp_path: Path, env: dict[str, object]
) -> None:
    wiring = Wiring(run_id="r1", service_url="", api_url="", base_model="m")
    with pytest.raises(InvalidConfig, match=r"--set env\.batch_size=256"):
        registration_of(Settings(env=env), wiring, tmp_path, 0)
