"""Going on from another run's checkpoint, with stand-ins."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing

import pytest

from halteres.errors import Conflict, InvalidConfig, NotFound
from halteres.observe.metrics import merge_by_step, series
from halteres.runs.directory import RunDirectory
from halteres.runs.start import start_run
from halteres.runs.stop import stop_run

from .scenes import STANDIN_SUPERVISOR, StartRun, wait, wait_for_end


@pytest.fixture
def stopped(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run stopped after three of four steps; its final checkpoint is at step 3."""
    monkeypatch.setenv("STANDIN_STEPS", "3")
    run = start()
    wait(run, lambda state: state.status == "running" and state.step == 3)
    wait(run, lambda state: any(row.get("src") == "eval" for row in run.metrics()))
    assert stop_run(run).status == "stopped"
    monkeypatch.delenv("STANDIN_STEPS")
    return run


def resume(old: RunDirectory, *edits: str, **options: str) -> RunDirectory:
    return start_run(old.settings(edits), resume=old, supervisor=STANDIN_SUPERVISOR, **options)


def test_a_resumed_run_goes_on_from_the_newest_checkpoint_and_its_curve_is_whole(stopped: RunDirectory) -> None:
    new = resume(stopped)
    state = wait_for_end(new)
    assert (state.status, state.step, state.resumed_from) == ("completed", 4, stopped.run_id)
    assert state.resume_point == {
        "name": "final",
        "step": 3,
        "state_path": f"tinker://{stopped.run_id}:0/weights/final",
    }
    rows = merge_by_step(new.metrics())
    assert [step for step, _ in series(rows, "reward/mean")] == [1, 2, 3, 4]
    assert {step for step, _ in series(rows, "eval/percent_correct")} == {0, 4}
    results = new.results()
    assert results is not None and results["samples"], "the answers before training came along"


def test_the_old_run_is_left_as_it_was_and_the_new_one_needs_it_no_more(stopped: RunDirectory) -> None:
    before = stopped.state()
    new = resume(stopped)
    assert wait_for_end(new).status == "completed"
    assert stopped.state() == before
    shutil.rmtree(stopped.path)
    checkpoint = new.path / "service" / "checkpoints" / f"{stopped.run_id}_0" / "weights" / "step-000002"
    assert (checkpoint / "adapter_config.json").is_file()


def test_the_services_journal_comes_along_with_the_rows_of_its_write_ahead_log(stopped: RunDirectory) -> None:
    journal = sqlite3.connect(stopped.path / "service" / "journal.sqlite")
    journal.execute("PRAGMA journal_mode=WAL")
    journal.execute("CREATE TABLE requests (id INTEGER)")
    journal.execute("INSERT INTO requests VALUES (7)")
    journal.commit()  # and never closed, as after kill -9
    new = resume(stopped)
    with closing(sqlite3.connect(new.path / "service" / "journal.sqlite")) as copy:
        assert copy.execute("SELECT id FROM requests").fetchall() == [(7,)]
    journal.close()
    wait_for_end(new)


def test_a_run_that_goes_on_is_not_resumed(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    run = start()
    wait(run, lambda state: state.status == "running")
    with pytest.raises(Conflict, match="is still running"):
        resume(run)


def test_a_run_without_a_checkpoint_is_not_resumed(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_DIES", "trainer@start")
    run = start()
    assert not wait_for_end(run).resumable
    with pytest.raises(NotFound, match="has no checkpoint"):
        resume(run)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ("trainer.lora_rank=8", "the checkpoint was made with 16"),
        ("trainer.total_steps=3", "the checkpoint is at step 3: nothing is left to do"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint_are_refused(stopped: RunDirectory, edit: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        resume(stopped, edit)


def test_checkpoints_of_the_runs_own_service_are_not_looked_for_in_another(stopped: RunDirectory) -> None:
    with pytest.raises(NotFound, match="does not have the checkpoints"):
        resume(stopped, service_url="http://127.0.0.1:9")
