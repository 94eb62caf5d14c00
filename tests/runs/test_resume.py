"""Going on from another run's checkpoint, with stand-ins."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from typing import Any

import msgspec
import pytest
from sqlalchemy import create_engine, insert

from halteres.config.resolution import resolve_settings
from halteres.errors import Conflict, InvalidConfig, NotFound
from halteres.observe.metrics import append_row, merge_by_step, read_rows, series
from halteres.runs.directory import QUARANTINE, RunDirectory, stop_run
from halteres.runs.state import write_state
from halteres.service.durable.journal import BURNT, GATEWAY_SESSIONS, MODELS, REQUESTS, SCHEMA

from .run_fixtures import StartRun, start_standins, wait, wait_for_end

pytestmark = pytest.mark.runs


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


def resume(old: RunDirectory, *edits: str, **options: Any) -> RunDirectory:
    resolved = resolve_settings(None, None, edits, base=old.settings())
    return start_standins(resolved, resume=old, **options)


def test_a_resumed_run_goes_on_from_the_newest_checkpoint_and_its_curve_is_whole(
    stopped: RunDirectory,
) -> None:
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


def test_the_old_run_is_left_as_it_was_and_the_new_one_needs_it_no_more(
    stopped: RunDirectory,
) -> None:
    before = stopped.state()
    new = resume(stopped)
    assert wait_for_end(new).status == "completed"
    assert stopped.state() == before
    shutil.rmtree(stopped.path)
    checkpoint = (
        new.path / "service" / "checkpoints" / f"{stopped.run_id}_0" / "weights" / "step-000002"
    )
    assert (checkpoint / "adapter_config.json").is_file()


def test_tasks_that_were_quarantined_up_to_its_step_come_along(stopped: RunDirectory) -> None:
    for step in (1, 3, 4):
        append_row(stopped.path / QUARANTINE, {"step": step, "task": str(step)})
    new = resume(stopped)
    assert [row["step"] for row in read_rows(new.path / QUARANTINE)] == [1, 3]
    wait_for_end(new)


def test_rollouts_and_their_advantages_up_to_its_step_come_along(stopped: RunDirectory) -> None:
    for step in (1, 3, 4):
        for name in ("step", "advantages"):
            (stopped.path / "rollouts" / f"{name}_{step}.jsonl").write_text(f"of {step}\n")
    new = resume(stopped)
    for step in (1, 3, 4):
        files = [new.path / "rollouts" / f"{name}_{step}.jsonl" for name in ("step", "advantages")]
        came = [file.exists() and file.read_text().startswith(f"of {step}") for file in files]
        assert came == [step <= 3] * 2
    wait_for_end(new)


def test_the_services_journal_comes_along_with_the_rows_of_its_write_ahead_log(
    stopped: RunDirectory,
) -> None:
    journal = sqlite3.connect(stopped.path / "service" / "journal.sqlite")
    journal.execute("PRAGMA journal_mode=WAL")
    journal.execute("CREATE TABLE checkpoints (path TEXT)")
    journal.execute("INSERT INTO checkpoints VALUES ('tinker://r/weights/a')")
    journal.commit()  # and never closed, as after kill -9
    new = resume(stopped)
    with closing(sqlite3.connect(new.path / "service" / "journal.sqlite")) as copy:
        assert copy.execute("SELECT path FROM checkpoints").fetchall() == [
            ("tinker://r/weights/a",)
        ]
    journal.close()
    wait_for_end(new)


def test_what_was_open_in_the_old_service_is_not_executed_again(stopped: RunDirectory) -> None:
    """Requests and gateway sessions that the old service accepted belong to its clients; its
    adapters are not brought back either.
    """
    file = stopped.path / "service" / "journal.sqlite"
    with closing(create_engine(f"sqlite:///{file}").connect()) as journal, journal.begin():
        SCHEMA.create_all(journal)
        facts = {
            "session_id": "s",
            "tenant": "local",
            "base_model": "b",
            "lora": {},
            "user_metadata": {},
        }
        journal.execute(insert(MODELS).values(id="s:train:0", created_at=1.0, point=7, **facts))
        asked = {
            "subject": "s:train:0",
            "tenant": "local",
            "content_type": "application/json",
            "body": b"{}",
        }
        for state in ("accepted", "done"):
            journal.execute(
                insert(REQUESTS).values(
                    id=state, key=state, kind="optim_step", accepted_at=1.0, state=state, **asked
                )
            )
        journal.execute(insert(BURNT).values(model_id="s:train:0", seq=3))
        session = {"key_sha256": "", "opening": {}, "created_at": 1.0, "expires_at": 2.0}
        journal.execute(
            insert(GATEWAY_SESSIONS).values(id="s-1", tenant="local", state="open", **session)
        )
    new = resume(stopped)
    with closing(sqlite3.connect(new.path / "service" / "journal.sqlite")) as copy:
        assert (
            copy.execute("SELECT id FROM requests UNION ALL SELECT seq FROM burnt").fetchall() == []
        )
        assert copy.execute("SELECT id FROM gateway_sessions").fetchall() == []
        assert copy.execute("SELECT id, point FROM models").fetchall() == [("s:train:0", None)]
    with closing(sqlite3.connect(file)) as old:
        assert len(old.execute("SELECT id FROM requests").fetchall()) == 2
    wait_for_end(new)


def test_not_a_byte_of_the_old_run_changes_when_the_new_one_writes(stopped: RunDirectory) -> None:
    """Also where the old service was killed, and its journal has rows in the write-ahead log
    alone.
    """
    with sqlite3.connect(stopped.path / "service" / "journal.sqlite") as journal:
        journal.execute("PRAGMA journal_mode=WAL")
        journal.execute("CREATE TABLE requests (id INTEGER)")
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        shutil.copy2(stopped.path / "service" / name, stopped.path / f"{name}.killed")
    journal.close()
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        (stopped.path / f"{name}.killed").rename(stopped.path / "service" / name)
    rollouts = stopped.path / "rollouts" / "step_3.jsonl"
    rollouts.write_text("{}\n")
    before = hashes(stopped)
    new = resume(stopped)
    with (new.path / "rollouts" / "step_3.jsonl").open("a") as late:
        late.write("{}\n")
    assert wait_for_end(new).status == "completed"
    assert hashes(stopped) == before
    assert (new.path / "service" / "engine.log").read_text() == "an engine started\n"


def test_where_each_setting_of_a_resumed_run_comes_from_is_told(stopped: RunDirectory) -> None:
    new = resume(stopped, "trainer.total_steps=5")
    told = json.loads((new.path / "config.resolved.json").read_bytes())
    assert told["trainer.total_steps"] == {"value": 5, "source": "edit"}
    assert told["trainer.lora_rank"] == {"value": 16, "source": "resume"}
    assert told["env.group_size"] == {"value": 2, "source": "resume"}
    wait_for_end(new)


def hashes(run: RunDirectory) -> dict[str, str]:
    """Every file of the run, but the lock that everybody opens."""
    files = [file for file in run.path.rglob("*") if file.is_file() and file.name != "lock"]
    return {
        str(file.relative_to(run.path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def test_a_run_that_goes_on_is_not_resumed(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    run = start()
    wait(run, lambda state: state.status == "running")
    with pytest.raises(Conflict, match="is still running"):
        resume(run)


def test_a_run_without_a_checkpoint_is_not_resumed(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_settings_that_do_not_fit_the_checkpoint_are_refused(
    stopped: RunDirectory, edit: str, says: str
) -> None:
    with pytest.raises(InvalidConfig, match=says):
        resume(stopped, edit)


def test_checkpoints_of_the_runs_own_service_are_not_looked_for_in_another(
    stopped: RunDirectory,
) -> None:
    with pytest.raises(NotFound, match="does not have the checkpoints"):
        resume(stopped, service_url="http://127.0.0.1:9")


def test_a_run_whose_steps_are_all_done_is_resumed_to_its_last_evaluation_and_its_results(
    start: StartRun,
) -> None:
    """Its supervisor was killed while the final weights were evaluated."""
    old = start()
    assert wait_for_end(old).status == "completed"
    rows = [row for row in old.metrics() if (row.get("src"), row["step"]) != ("eval", 4)]
    assert len(rows) < len(list(old.metrics()))
    (old.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(old.path / "evals" / "step_4")
    lost = msgspec.structs.replace(
        old.state(), status="failed", code="supervisor_lost", resumable=True
    )
    write_state(old.path / "run.json", lost)
    new = resume(old)
    assert wait_for_end(new).status == "completed"
    assert [row["step"] for row in new.metrics() if row.get("src") == "eval"] == [0, 4]
    assert [row["step"] for row in new.metrics() if row.get("src") == "trainer"] == [1, 2, 3, 4]
    assert (new.path / "adapter").is_dir() and (new.path / "results.json").is_file()


def test_a_completed_run_has_nothing_left_to_do(start: StartRun) -> None:
    old = start()
    assert wait_for_end(old).status == "completed"
    with pytest.raises(InvalidConfig, match="nothing is left to do"):
        resume(old)
