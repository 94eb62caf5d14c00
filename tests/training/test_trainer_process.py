"""The trainer as a process, with the real SDK against the real service (scripted engine) and
trajectory server.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from inexact import PROGRAM

from .live_servers import Process, Run, ask, opened, within

pytestmark = pytest.mark.runs

MakeRun = Callable[..., Run]
FOUR_STEPS = {"total_steps": 4, "checkpoint_every": 2, "eval_every": 0}
FOR_EVER = {"total_steps": 1000, "checkpoint_every": 0, "eval_every": 0}


def test_a_run_trains_to_its_last_step_without_torch_and_leaves_its_final_weights(
    make_run: MakeRun,
) -> None:
    run = make_run("whole", trainer=FOUR_STEPS)
    trainer = run.train()
    run.play()
    within(20, "the trainer is ready", (run.path / "control" / "trainer.ready").exists)
    run.after_step(1)
    mapped = (
        Path(f"/proc/{trainer.popen.pid}/maps").read_text() if trainer.popen.poll() is None else ""
    )
    assert "libtorch" not in mapped
    assert trainer.exit_code() == 0, trainer.text

    rows = run.rows()
    assert [(row["step"], row["policy/version"]) for row in rows] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
    ]
    assert all(row["policy/staleness_max"] == 0 for row in rows), "on-policy"
    assert all(
        row["kl_sample_train_v2"] < 1e-9 and row["logprobs/absdiff_max"] < 1e-5 for row in rows
    )
    assert all(row["tokens/compared"] == row["tokens/action"] for row in rows), (
        "every token is of the own version"
    )
    assert [row["name"] for row in run.checkpoints()] == ["step-000000", "step-000002", "final"]
    assert run.events("notice") == []

    final = run.events("checkpoint")[-1]
    assert (final["final"], final["step"], final["why"]) == (True, 4, "all 4 steps are done")
    for path in (final["state_path"], final["sampler_path"]):
        assert saved(run, path).is_dir()


@pytest.mark.parametrize("given", [False, True])
def test_where_the_sampler_is_not_exact_importance_is_truncated_unless_a_correction_was_given(
    tmp_path: Path, given: bool
) -> None:
    with opened(tmp_path, program=("-c", PROGRAM)) as world:
        run = world.run("inexact", trainer={**FOUR_STEPS, "total_steps": 2})
        source = "edit" if given else "default"
        resolved = {"trainer.correction": {"value": "none", "source": source}}
        (run.path / "config.resolved.json").write_text(json.dumps(resolved))
        try:
            trainer = run.train()
            run.play()
            assert trainer.exit_code() == 0, trainer.text
            rows = run.rows()
            [decided] = run.events("sampler_not_exact")
        finally:
            run.close()
    assert decided["correction"] == ("none" if given else "truncate")
    assert [row["tokens/ratio_bounded"] for row in rows] == [None if given else 0.0] * 2
    assert all(row["kl_sample_train_v2"] > 1e-12 for row in rows), (
        "what is compared are the sampler's own"
    )


def saved(run: Run, tinker_path: str) -> Path:
    from halteres.service.checkpoint_folders import folder_of

    return folder_of(run.world.folder / "service", tinker_path)


def test_a_stop_file_lets_the_step_under_way_finish_and_writes_the_final_checkpoint(
    make_run: MakeRun,
) -> None:
    run = make_run("stop-file", trainer=FOR_EVER)
    trainer = run.train()
    run.play()
    run.after_step(1)
    (run.path / "control" / "stop.json").write_text(
        json.dumps({"mode": "after_step", "t": time.time()})
    )
    assert trainer.exit_code() == 0, trainer.text
    final = run.checkpoints()[-1]
    assert final["final"] is True
    assert final["step"] == run.rows()[-1]["step"] >= 1
    assert run.events("checkpoint")[-1]["why"] == "a stop was requested"


def test_an_interrupted_run_is_resumed_where_it_stopped(make_run: MakeRun) -> None:
    """SIGINT gives up the wait for the batch under way, writes the final checkpoint and ends
    well.
    """
    run = make_run("interrupt", trainer=FOR_EVER)
    trainer = run.train()
    player = run.play()
    run.after_step(2)
    player.stop()
    asked = time.monotonic()
    trainer.signal(signal.SIGINT)
    assert trainer.exit_code(10) == 0, trainer.text
    assert time.monotonic() - asked < 10
    final, done = run.checkpoints()[-1], run.rows()[-1]["step"]
    assert (final["name"], final["step"]) == ("final", done)
    assert run.events("checkpoint")[-1]["why"] == "SIGINT was received"

    run.settings = run.settings.model_copy(
        update={"trainer": run.settings.trainer.model_copy(update={"total_steps": done + 2})}
    )
    resumed = run.train({name: final[name] for name in ("name", "step", "state_path")})
    run.play()
    assert resumed.exit_code() == 0, resumed.text
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, done + 3)), (
        "old rows are kept, the count goes on"
    )
    assert [row["policy/version"] for row in rows] == list(range(1, done + 3)), (
        "the optimiser's count too"
    )
    assert all(row["logprobs/absdiff_max"] < 1e-5 for row in rows)
    assert [row["name"] for row in run.checkpoints()] == ["step-000000", "final", "final"]


def test_the_time_limit_is_a_planned_end(make_run: MakeRun) -> None:
    run = make_run("limit", trainer=FOR_EVER, run={"max_minutes": 0.01})
    trainer = run.train()
    run.play()
    assert trainer.exit_code() == 0, trainer.text
    assert run.events("checkpoint")[-1]["why"] == "the limit of 0.01 minutes is reached"


def test_batches_of_equal_scores_are_skipped_and_the_run_ends_well(make_run: MakeRun) -> None:
    """Nothing is learnt, nothing divides by zero, and the environment is not parked for ever."""
    run = make_run("silent", trainer=FOUR_STEPS)
    trainer = run.train()
    run.play(scores=(1.0, 1.0, 1.0, 1.0))
    assert trainer.exit_code() == 0, trainer.text
    assert [(row["step"], row["policy/version"], row["train/skipped"]) for row in run.rows()] == [
        (step, 0, 1.0) for step in (1, 2, 3, 4)
    ]


def test_a_second_signal_ends_at_once(make_run: MakeRun) -> None:
    run = make_run("twice", trainer=FOR_EVER)
    trainer = run.train()
    within(20, "the trainer is ready", (run.path / "control" / "trainer.ready").exists)
    run.world.service.signal(signal.SIGSTOP)  # so that the final checkpoint cannot be written
    try:
        trainer.signal(signal.SIGTERM)
        within(
            5,
            "the first signal is seen",
            lambda: "SIGTERM: ending with a checkpoint" in trainer.text,
        )
        trainer.signal(signal.SIGTERM)
        assert trainer.exit_code(5) == 128 + signal.SIGTERM
    finally:
        run.world.service.signal(signal.SIGCONT)
    assert "error: SIGTERM came twice; ended without a final checkpoint." in trainer.text


def test_a_missing_run_directory_is_one_sentence(make_run: MakeRun, tmp_path: Path) -> None:
    trainer = Process(tmp_path / "log", "halteres.training", "--run", str(tmp_path / "none"))
    assert trainer.exit_code() == 1
    (sentence,) = trainer.errors
    assert "settings.json cannot be read" in sentence


def test_an_engine_that_dies_costs_training_nothing(make_run: MakeRun) -> None:
    run = make_run("engine-killed", trainer=FOR_EVER)
    trainer = run.train()
    player = run.play()
    run.after_step(1)
    os.kill(ask(f"{run.world.service_url}/halteres/v1/info")["engine"]["pid"], signal.SIGKILL)
    run.after_step(3)
    player.stop()
    assert not trainer.errors, trainer.text
