"""How a process of ours tells why it ended, up to the sentence of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from halteres.runs.directory import RunDirectory
from halteres.runs.reading import failures
from halteres.training.__main__ import write_failure
from halteres.training.failures import LossNotFinite
from halteres.training.folder import RunFolder

from .live_servers import BATCH, GROUP, LiveServers, Run, opened, within

pytestmark = pytest.mark.runs

SPOILT = LossNotFinite("The loss is not finite.", "It diverged.", "Lower trainer.learning_rate.")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "control").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("error: The last line of the log.\n")
    write_failure(RunFolder(tmp_path), SPOILT)
    return tmp_path


def died(folder: Path, role: str, code: int) -> failures.ProcessFailed:
    return failures.died(RunDirectory(folder), role, "Trainer", code, step=7, ready=True)


def test_a_runs_failure_has_the_code_cause_and_remedy_that_its_trainer_left(folder: Path) -> None:
    failed = died(folder, "trainer", 1)
    assert failed.code == "nan_loss"
    assert (failed.what, failed.why) == (
        "Trainer exited with code 1 at step 7.",
        "The loss is not finite. It diverged. Lower trainer.learning_rate.",
    )
    assert [file.name for file in (folder / "control").iterdir()] == ["failure.json"], (
        "written beside itself and renamed"
    )


@pytest.mark.parametrize(("role", "code"), [("trainer", -9), ("env", 1)])
def test_the_words_of_another_process_or_before_a_kill_are_not_taken_for_its_own(
    folder: Path, role: str, code: int
) -> None:
    assert died(folder, role, code).code == "process_exited"


@pytest.mark.parametrize("words", [None, b"{", b'{"role": "trainer"}'])
def test_a_program_that_left_no_words_is_read_from_its_log(
    folder: Path, words: bytes | None
) -> None:
    file = folder / "control" / "failure.json"
    file.write_bytes(words) if words else file.unlink()
    failed = died(folder, "trainer", 1)
    assert (failed.code, failed.why) == ("process_exited", "The last line of the log.")


@pytest.fixture(scope="module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServers]:
    """A training service that computes."""
    with opened(tmp_path_factory.mktemp("computing"), engine="torch") as world:
        yield world


@pytest.fixture
def run(computing: LiveServers) -> Iterator[Run]:
    made = computing.run(
        "diverging",
        env={"batch_size": BATCH, "group_size": GROUP, "temperature": 0.7},
        trainer={"total_steps": 2, "checkpoint_every": 0, "eval_every": 0},
    )
    yield made
    made.close()


def test_a_loss_that_the_engine_refuses_ends_the_run_as_a_diverged_one(run: Run) -> None:
    """Log-probabilities that no model gave make the ratio overflow: the engine refuses the pass."""
    trainer = run.train()
    within(60, "the trainer is ready", (run.path / "control" / "trainer.ready").exists)
    run.post_batch(logprob=-1e4)
    assert trainer.exit_code() == 1, trainer.text
    words = json.loads((run.path / "control" / "failure.json").read_bytes())
    assert (words["role"], words["code"]) == ("trainer", "nan_loss")
    assert "is not finite" in words["what"]
    assert "self.request_id" not in words["what"]
    assert "lower trainer.learning_rate" in words["next"]
    assert [notice["rule"] for notice in run.events("notice")] == ["temperature", "nan_loss"]
