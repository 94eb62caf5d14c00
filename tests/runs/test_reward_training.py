"""A reward training is a run: it is watched, stopped, gone on with and told as any other."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halteres.config.operator_policy import FILE, PolicyCap
from halteres.errors import Conflict, InvalidConfig, InvalidData, NotFound
from halteres.models import TINY
from halteres.observe.metrics import merge_by_step
from halteres.rewards.model_folder import read_model_folder
from halteres.rewards.training_plan import TrainingPlan, read_plan
from halteres.runs.directory import list_runs, stop_run
from halteres.runs.planning.checks import FREE_BYTES, MissingKey
from halteres.runs.planning.reward_plan import plan_resumed_training, plan_reward_training
from halteres.runs.reading.evaluations import outcome_of
from halteres.runs.reading.failures import DiskFull
from halteres.runs.start import start_reward_training

from .run_fixtures import survivors, wait, wait_for_end

NUM_PAIRS, BATCH = 48, 4


def preferences(folder: Path, num_pairs: int = NUM_PAIRS) -> Path:
    file = folder / "pairs.jsonl"
    rows = [
        {"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n + 2}", "kind": "correct"}
        for n in range(num_pairs)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def plan(data: Path, **more: Any) -> TrainingPlan:
    given = {"per_device_train_batch_size": BATCH, "max_length": 128, "seed": 7, **more}
    return read_plan(None, {"model": TINY, "data": str(data), **given})


def test_what_cannot_be_trained_is_refused_and_no_run_begins(home: Path, tmp_path: Path) -> None:
    data = preferences(tmp_path)
    with pytest.raises(NotFound, match="nobody/knows"):
        plan_reward_training(plan(data, model="nobody/knows"))
    with pytest.raises(InvalidConfig, match="learning_rat"):
        plan_reward_training(plan(data, learning_rat=1e-3))
    with pytest.raises(InvalidConfig, match="output_dir"):
        plan_reward_training(plan(data, output_dir="here"))
    with pytest.raises(InvalidConfig) as refused:
        plan_reward_training(plan(data), name="a\u202eb")
    assert refused.value.details["field"] == "name"
    data.write_text(json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    with pytest.raises(InvalidData, match="row 1"):
        plan_reward_training(plan(data))
    assert list_runs() == []


def test_an_operators_policy_holds_for_reward_training(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cap of steps and its keys to start, as for any other run."""
    wanted = plan(preferences(tmp_path))
    (home / FILE).write_text(
        f"caps: {{max_steps: {NUM_PAIRS // BATCH}}}\nrequire_keys: [TINKER_API_KEY]\n"
    )
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(MissingKey, match="TINKER_API_KEY not set"):
        plan_reward_training(wanted)
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    assert plan_reward_training(wanted).total_steps == NUM_PAIRS // BATCH
    with pytest.raises(PolicyCap, match="more than this machine's policy allows") as caught:
        plan_reward_training(plan(tmp_path / "pairs.jsonl", num_train_epochs=2))
    assert "max_steps" in caught.value.next


def test_a_training_whose_checkpoints_do_not_fit_on_the_disk_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in model: 1 M parameters of 12 bytes for each of eleven checkpoints, 4 at last."""
    wanted = plan(preferences(tmp_path), save_steps=1)
    disk = plan_reward_training(wanted).forecast.disk_gb
    assert disk == pytest.approx(0.9e-3 * (11 * 12 + 4), rel=0.2)
    one = plan_reward_training(plan(tmp_path / "pairs.jsonl", save_strategy="no")).forecast.disk_gb
    assert one is not None and disk is not None and one < disk / 5
    free = FREE_BYTES + int(disk * 1e9) - 20_000_000
    usage = SimpleNamespace(total=10 * free, used=9 * free, free=free)
    monkeypatch.setattr("halteres.runs.planning.checks.shutil.disk_usage", lambda _: usage)
    with pytest.raises(DiskFull, match="Too little room"):
        plan_reward_training(wanted)
    assert plan_reward_training(plan(tmp_path / "pairs.jsonl", save_strategy="no"))
    assert list_runs() == []


def test_steps_are_known_before_the_model_is_loaded(home: Path, tmp_path: Path) -> None:
    start = plan_reward_training(plan(preferences(tmp_path), num_train_epochs=2))
    assert start.total_steps == 2 * NUM_PAIRS // BATCH


@pytest.mark.runs
def test_a_reward_training_is_stopped_with_a_checkpoint_and_goes_on_from_it(
    home: Path, tmp_path: Path
) -> None:
    data = preferences(tmp_path)
    run = start_reward_training(
        plan_reward_training(plan(data, eval_data=str(data), num_train_epochs=40))
    )
    wait(run, lambda state: state.status == "running" and state.step >= 2, within_s=60)
    with pytest.raises(Conflict, match="not ended"):
        plan_resumed_training(run)
    stopped = stop_run(run)
    assert (stopped.status, stopped.resumable, stopped.error) == ("stopped", True, None)
    assert stopped.last_checkpoint is not None and stopped.last_checkpoint["step"] >= 2
    assert not survivors(stopped)
    at = stopped.last_checkpoint["step"]

    start = plan_resumed_training(run)
    resumed = start_reward_training(start)
    wait(resumed, lambda state: state.step > at, within_s=60)
    assert stop_run(resumed).resumed_from == run.run_id
    steps = [row["step"] for row in merge_by_step(resumed.metrics())]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > at


@pytest.mark.runs
def test_a_completed_reward_training_leaves_its_model_and_its_figures(
    home: Path, tmp_path: Path
) -> None:
    data = preferences(tmp_path)
    run = start_reward_training(plan_reward_training(plan(data, eval_data=str(data)), name="sums"))
    state = wait_for_end(run, within_s=90)
    assert (state.status, state.step, state.error) == ("completed", NUM_PAIRS // BATCH, None)
    model = run.path / "reward_model"
    assert read_model_folder(model).facts
    outcome = outcome_of(run, state)
    assert outcome.weights.reward_model == model
    assert {"loss", "accuracy", "eval_accuracy", "accuracy/correct"} <= set(outcome.final)
    results = run.results()
    assert results is not None
    assert results["weights"]["reward_model"] == str(model)
    assert results["final_metrics"]["num_tokens"] > 0
    assert (run.path / "STATUS.md").read_text().startswith(f"# Run {run.run_id}: sums")
    with pytest.raises(Conflict, match="complete"):
        plan_resumed_training(run)


@pytest.mark.runs
def test_a_training_that_cannot_begin_says_why(home: Path, tmp_path: Path) -> None:
    data = preferences(tmp_path)
    start = plan_reward_training(plan(data))
    data.unlink()
    state = wait_for_end(start_reward_training(start), within_s=60)
    assert state.status == "failed"
    assert "pairs.jsonl" in (state.error or "")
